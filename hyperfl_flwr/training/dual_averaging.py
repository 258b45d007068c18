"""Consensus by dual variables: the updates of PRIV-HFL in a compact form.

The clients' models theta_i [m] shall become equal while each client minimises its loss f_i. The paper writes the
constraints as E theta = (C (x) I; -C (x) I) theta <= 0 with an incidence matrix C. It sends two vectors of the size of
all constraints, lambda >= 0 and a tracked copy nu of the residuals, between all clients and the server. Both are
functions of the state kept here (nu = N/N sum_i e_i at all times, lambda_- = -lambda_+ without the projection). A
client therefore sends and receives m numbers instead of 4 (N - 1) m, and the models theta_i are equal up to rounding:

- `mean`, C = I - 11^T/N: theta_i is compared with the mean of all models. Only the sum of the clients' changes is
  needed; each client keeps its multiplier mu_i = lambda_+ - lambda_-.
- `chain`, the paper's C: theta_i is compared with theta_{i+1}. The server keeps one multiplier for each pair of
  neighbours.

A change is theta_i minus the theta_i(0) = theta(0) that all clients start from. The last change of an absent client
still counts.

The paper's factor in the update of nu is the number of clients N here, which makes nu the sum of the residuals. A
client's step is theta <- theta - alpha (grad f_i + r_i) with r_i = (C^T mu)_i constant over its K local steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperfl_flwr.core.setting_types import Order, Realisation

KAPPA = 2
"""Number of multipliers that act on a residual, lambda_+ and lambda_-: always without the projection, else at most."""


@dataclass(frozen=True, kw_only=True)
class DualRule:
    """Update rule of the multipliers from the residuals d: mu <- (1 - sigma beta^2) mu + 2 beta d.

    Attributes:
        realisation: The kind of residuals, see the module.
        order: `alternating`: a client's step uses multipliers that include the newest models. `published`: it uses
            the multipliers of the round before, as in the paper.
        step: Dual step beta, above 0.
        sigma: Regularisation coefficient, not negative; 0 leads to exact consensus.
        projection: Whether lambda_+ and lambda_- are kept and made non-negative, as in the paper; `chain` only.

    Raises:
        ValueError: If step or sigma is out of range, or the projection is combined with `mean`.
    """

    realisation: Realisation
    order: Order
    step: float
    sigma: float = 0.0
    projection: bool = False

    def __post_init__(self) -> None:
        if self.step <= 0 or self.sigma < 0:
            raise ValueError(f"step must be positive and sigma not negative, got {self.step} and {self.sigma}")
        if self.projection and self.realisation != "chain":
            raise ValueError("the projection needs the multipliers of the realisation chain, got mean")

    @property
    def decay(self) -> float:
        """Return D = 1 - sigma beta^2, the factor of a multiplier in each round."""
        return 1 - self.sigma * self.step**2

    def accumulated(self, total: Tensor, change: Tensor, rounds: int) -> Tensor:
        """Return A after k rounds of A <- D A + x with a constant x, in float64.

        The result is D^k A + (1 - D^k) / (1 - D) x, or A + k x for sigma = 0.

        Args:
            total: A before these rounds [m].
            change: x [m].
            rounds: Number of rounds k >= 0.
        """
        power = self.decay**rounds
        weight = rounds if self.decay == 1 else (1 - power) / (1 - self.decay)
        return power * total.double() + weight * change.double()


@dataclass(kw_only=True)
class MeanClient:
    """One client's state in the realisation `mean`.

    With A_i <- D A_i + x_i and S <- D S + mean_j x_j, the client's multiplier is mu_i = 2 beta (A_i - S). It is never
    stored: a client that missed rounds computes it from its A_i and the server's S.

    Attributes:
        rule: The update rule.
        change: The change x_i [m] that the server has last counted.
        total: The accumulated changes A_i [m], float64; zeros before the first round.
    """

    rule: DualRule
    change: Tensor
    total: Tensor

    def multiplier(self, accumulated: Tensor, missed: int) -> Tensor:
        """Return mu_i [m] for this round, after updating A_i for the missed rounds.

        Args:
            accumulated: The server's S [m].
            missed: Number of rounds between the client's last counted round and this one.
        """
        self.total = self.rule.accumulated(self.total, self.change, missed)
        return KAPPA * self.rule.step * (self.total - accumulated.double())

    def record_change(self, change: Tensor) -> None:
        """Record the change x_i [m] that the server counts after this round's upload."""
        # `published` accumulates the change of the round before, as the server does.
        self.total = self.rule.accumulated(
            self.total, change if self.rule.order == "alternating" else self.change, rounds=1
        )
        self.change = change


@dataclass(kw_only=True)
class MeanServer:
    """The server's state in the realisation `mean`.

    Attributes:
        rule: The update rule.
        consensus: The mean change mean_j x_j [m], float64; zeros before the first round.
        total: The accumulated mean changes S [m], float64; zeros before the first round.
    """

    rule: DualRule
    consensus: Tensor
    total: Tensor

    def advance(self, increments: Tensor | float, num_clients: int) -> None:
        """Finish a round.

        Args:
            increments: Sum, over the clients that finished, of the change since the last upload [m]; 0 if none did.
            num_clients: Number of all clients N, present or not.
        """
        before = self.consensus
        self.consensus = before + increments / num_clients
        newest = self.consensus if self.rule.order == "alternating" else before
        self.total = self.rule.accumulated(self.total, newest, rounds=1)

    def remove_client(self, change: Tensor, total: Tensor, num_clients: int) -> None:
        """Remove a client for good, so that the multipliers of the others sum to zero.

        Args:
            change: The client's x_i [m].
            total: The client's A_i [m], updated up to this round.
            num_clients: Number of clients before it leaves, at least 2.
        """
        self.consensus = (num_clients * self.consensus - change) / (num_clients - 1)
        self.total = (num_clients * self.total - total) / (num_clients - 1)


@dataclass(kw_only=True)
class ChainServer:
    """The server's state in the realisation `chain`; a client keeps only its model.

    Attributes:
        rule: The update rule.
        residuals: Residuals d_b = theta_b - theta_{b+1} [N - 1, m]; zeros before the first round.
        multipliers: Multipliers mu_b [1, N - 1, m]; with the projection lambda_+ and lambda_- [2, N - 1, m].
    """

    rule: DualRule
    residuals: Tensor
    multipliers: Tensor

    @classmethod
    def start(cls, rule: DualRule, num_clients: int, size: int, dtype: torch.dtype = torch.float32) -> "ChainServer":
        """Return the state before the first round, for N clients with models of m numbers."""
        residuals = torch.zeros(max(num_clients - 1, 0), size, dtype=dtype)
        return cls(rule=rule, residuals=residuals, multipliers=torch.stack([residuals] * (1 + rule.projection)))

    def force(self, client: int) -> Tensor:
        """Return r_i = mu_i - mu_{i-1} [m] for a client i, counted from 0, with mu_{-1} = mu_{N-1} = 0."""
        force = torch.zeros(self.residuals.shape[1], dtype=self.residuals.dtype)
        if client < len(self.residuals):
            force += self._multiplier(client)
        if client > 0:
            force -= self._multiplier(client - 1)
        return force

    def _multiplier(self, pair: int) -> Tensor:
        above = self.multipliers[0, pair]
        return above - self.multipliers[1, pair] if self.rule.projection else above

    def advance(self, increments: Mapping[int, Tensor]) -> None:
        """Finish a round.

        Args:
            increments: Change since the last upload [m] of each client that finished.
        """
        # `published` updates the multipliers before the new models count, which delays them by one round.
        if self.rule.order == "published":
            self._ascend()
        for client, increment in increments.items():
            if client < len(self.residuals):
                self.residuals[client] += increment
            if client > 0:
                self.residuals[client - 1] -= increment
        if self.rule.order == "alternating":
            self._ascend()

    def _ascend(self) -> None:
        self.multipliers *= self.rule.decay
        if self.rule.projection:
            self.multipliers[0] += self.rule.step * self.residuals
            self.multipliers[1] -= self.rule.step * self.residuals
            self.multipliers.clamp_(min=0)
        else:
            self.multipliers[0] += KAPPA * self.rule.step * self.residuals

    def remove_client(self, client: int) -> None:
        """Remove a client from the chain: its neighbours form a pair with d = d_{i-1} + d_i, and mu_i is dropped."""
        last = len(self.residuals)
        # The last client belongs only to the pair before it, which is dropped if that client leaves.
        kept = [pair for pair in range(last) if pair != min(client, last - 1)]
        residuals, multipliers = self.residuals.clone(), self.multipliers
        if 0 < client < last:
            residuals[client - 1] += residuals[client]
        self.residuals, self.multipliers = residuals[kept], multipliers[:, kept].clone()
