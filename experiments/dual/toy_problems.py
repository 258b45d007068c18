"""Toy problems with a known optimum, and federations that solve them with PRIV-HFL's dual updates.

They serve tests and pictures of convergence: few clients, few parameters, float64, full gradients, no network. The dual
updates are those of `hyperfl_flwr.training.dual_averaging`; this module only provides models, gradients and optima.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from hyperfl_flwr.core.setting_types import Realisation
from hyperfl_flwr.training.dual_averaging import ChainServer, DualRule, MeanClient, MeanServer

Array = NDArray[np.float64]

NUM_CLIENTS, DIM = 5, 6
"""Default number of clients N and of parameters m."""

NEWTON_STEPS = 30
"""Number of Newton steps to an optimum."""


class Problem(ABC):
    """A problem: one loss function f_i per client.

    Attributes:
        start: The model [m] that all clients start from.
        num_clients: Number of clients N.
    """

    start: Array
    num_clients: int

    @abstractmethod
    def gradient(self, client: int, theta: Array) -> Array:
        """Return the gradient [m] of f_i at theta [m]."""

    @abstractmethod
    def hessian(self, client: int, theta: Array) -> Array:
        """Return the second derivatives [m, m] of f_i at theta [m]."""

    def optimum(self, clients: Sequence[int] | None = None) -> Array:
        """Return the theta [m] that minimises the sum of f_i over some clients, by default all, by Newton's method."""
        some = range(self.num_clients) if clients is None else clients
        theta = np.zeros_like(self.start)
        for _ in range(NEWTON_STEPS):
            slope = np.sum([self.gradient(i, theta) for i in some], axis=0)
            theta = theta - np.linalg.solve(np.sum([self.hessian(i, theta) for i in some], axis=0), slope)
        return theta

    def biased(self, matrix: Array, weight: float) -> Array:
        """Return the theta_i [N, m] that minimise sum f_i + weight / 2 |C theta|^2, by Newton's method.

        Args:
            matrix: The matrix C [constraints, N], see `incidence`.
            weight: Weight of the coupling, not negative.
        """
        size = len(self.start)
        coupling = weight * np.kron(matrix.T @ matrix, np.eye(size))
        theta = np.zeros((self.num_clients, size))
        for _ in range(NEWTON_STEPS):
            slope, system = coupling @ theta.ravel(), coupling.copy()
            for i, model in enumerate(theta):
                block = slice(i * size, (i + 1) * size)
                slope[block] += self.gradient(i, model)
                system[block, block] += self.hessian(i, model)
            theta = theta - np.linalg.solve(system, slope).reshape(theta.shape)
        return theta


class LeastSquares(Problem):
    """Quadratic problem f_i = theta^T H_i theta / 2 - b_i^T theta.

    Attributes:
        hessians: Second derivatives H_i [m, m].
        slopes: Slopes b_i [m].
    """

    def __init__(self, start: Array, hessians: Sequence[Array], slopes: Sequence[Array]) -> None:
        self.start, self.hessians, self.slopes = start, hessians, slopes
        self.num_clients = len(hessians)

    @classmethod
    def random(
        cls, seed: int = 0, num_clients: int = NUM_CLIENTS, dim: int = DIM, *, alike: bool = False
    ) -> "LeastSquares":
        """Draw a problem with curvatures from 0.14 to 1 in random directions, the same for all clients if `alike`."""
        rng = np.random.default_rng(seed)
        start, hessians, slopes = rng.normal(size=dim), [], []
        for _ in range(num_clients):
            rotation = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
            hessians.append(rotation @ np.diag(np.linspace(0.14, 1, dim)) @ rotation.T)
            slopes.append(2 * rng.normal(size=dim))
        return cls(start, hessians[:1] * num_clients if alike else hessians, slopes)

    def gradient(self, client: int, theta: Array) -> Array:
        """Return H_i theta - b_i."""
        return self.hessians[client] @ theta - self.slopes[client]

    def hessian(self, client: int, theta: Array) -> Array:
        """Return H_i."""
        return self.hessians[client]


class Logistic(Problem):
    """Mean logistic loss of 30 random samples per client, plus 0.05 |theta|^2.

    Args:
        seed: Seed of the samples.
        num_clients: Number of clients N.
        dim: Number of parameters m.
        alike: Whether all clients have the same inputs with different labels; the second derivatives of all f_i are
            then equal at equal theta.
    """

    def __init__(self, seed: int = 0, num_clients: int = NUM_CLIENTS, dim: int = DIM, *, alike: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.start = rng.normal(size=dim)
        self.num_clients = num_clients
        self.inputs = rng.normal(size=(num_clients, 30, dim))
        if alike:
            self.inputs[:] = self.inputs[0]
        truths = rng.normal(size=(num_clients, dim)) * 2
        self.signs = np.sign(np.einsum("nsd,nd->ns", self.inputs, truths) + rng.normal(size=(num_clients, 30)))

    def gradient(self, client: int, theta: Array) -> Array:
        """Return the gradient [m] of f_i."""
        margins = self.signs[client] * (self.inputs[client] @ theta)
        wrong: Array = self.signs[client] * expit(-margins)
        slope: Array = 0.1 * theta - wrong @ self.inputs[client] / 30
        return slope

    def hessian(self, client: int, theta: Array) -> Array:
        """Return the second derivatives [m, m] of f_i."""
        shares = expit(self.inputs[client] @ theta)
        weighted: Array = self.inputs[client].T * (shares * (1 - shares) / 30)
        curvature: Array = weighted @ self.inputs[client] + 0.1 * np.eye(len(theta))
        return curvature


def incidence(realisation: Realisation, num_clients: int = NUM_CLIENTS) -> Array:
    """Return the matrix C of the constraints: differences of neighbours [N - 1, N], or from the mean [N, N]."""
    if realisation == "mean":
        return np.eye(num_clients) - 1 / num_clients
    return np.eye(num_clients)[:-1] - np.eye(num_clients, k=1)[:-1]


def local_steps(problem: Problem, client: int, theta: Array, force: Array, rate: float, steps: int) -> Array:
    """Return the model [m] after K steps along gradient + force."""
    for _ in range(steps):
        theta = theta - rate * (problem.gradient(client, theta) + force)
    return theta


def distance(theta: Array, optimum: Array) -> float:
    """Return the largest distance of a client's model, theta [N, m], from the optimum [m] or from its row [N, m]."""
    return float(np.linalg.norm(theta - optimum, axis=1).max())


class ToyFederation:
    """A server and clients with one model each, which run PRIV-HFL's rounds on a problem.

    Attributes:
        theta: The clients' models [N, m].
        rounds: Number of rounds so far.
        last: Each client's last round with a reply that arrived.
        server: The server's state in `hyperfl_flwr.training.dual_averaging`.
        clients: The clients' states in that module; empty for the chain, where a client keeps only its model.

    Args:
        problem: The problem to solve.
        rule: The update rule of the multipliers.
        rate: Rate alpha of the local steps.
        steps: Number of local steps K.
    """

    def __init__(self, problem: Problem, rule: DualRule, rate: float = 0.1, steps: int = 5) -> None:
        self.problem, self.rule, self.rate, self.steps = problem, rule, rate, steps
        self.num_clients, self.rounds, size = problem.num_clients, 0, len(problem.start)
        self.theta = np.tile(problem.start, (self.num_clients, 1))
        self.last = [0] * self.num_clients
        self.clients: list[MeanClient] = []
        self.server: MeanServer | ChainServer
        if rule.realisation == "mean":
            self.server = MeanServer(rule=rule, consensus=_zeros(size), total=_zeros(size))
            for _ in range(self.num_clients):
                self.clients.append(MeanClient(rule=rule, change=_zeros(size), total=_zeros(size)))
        else:
            self.server = ChainServer.start(rule, self.num_clients, size, torch.float64)

    def force(self, client: int) -> Tensor:
        """Return the term [m] that a client adds to its gradients in this round; updates its state in `mean`."""
        if isinstance(self.server, ChainServer):
            return self.server.force(client)
        return self.clients[client].multiplier(self.server.total, self.rounds - self.last[client])

    def round(self, present: Collection[int] | None = None, lost: Collection[int] = ()) -> None:
        """Run a round.

        Args:
            present: Clients that train; by default all.
            lost: Clients among them with a reply that never arrives; they go back to their state before the round.
        """
        increments = {}
        # `kept` holds the state before the round, for lost replies; it is empty for the chain.
        for i in range(self.num_clients) if present is None else present:
            before, kept = self.theta[i].copy(), [(client.change, client.total) for client in self.clients[i : i + 1]]
            force = self.force(i).numpy()
            self.theta[i] = local_steps(self.problem, i, before, force, self.rate, self.steps)
            if self.clients:
                self.clients[i].record_change(torch.from_numpy(self.theta[i] - self.problem.start))
            if i in lost:
                self.restore(i, before, kept)
            else:
                increments[i], self.last[i] = torch.from_numpy(self.theta[i] - before), self.rounds + 1
        self.rounds += 1
        if isinstance(self.server, ChainServer):
            self.server.advance(increments)
        else:
            self.server.advance(sum(increments.values(), _zeros(len(self.problem.start))), self.num_clients)

    def restore(self, client: int, theta: Array, kept: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Restore a client after the loss of its reply: its model [m], and its change and total, if any."""
        self.theta[client] = theta
        for change, total in kept:
            self.clients[client].change, self.clients[client].total = change, total


def _zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64)
