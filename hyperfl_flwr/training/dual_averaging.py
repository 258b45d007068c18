"""Consensus by dual variables: the updates of PRIV-HFL in their compact form.

The clients' models theta_i [m] are to become equal while each client minimises its own f_i. The paper writes the
constraints as E theta = (C (x) I; -C (x) I) theta <= 0 with an incidence matrix C and lets two vectors of the size of
all constraints, lambda >= 0 and a tracked copy nu of the residuals, travel between all clients and the server. Both
are functions of what is kept here (nu = N/N sum_i e_i at all times, lambda_- = -lambda_+ without the projection), so
that a client sends and receives m numbers instead of 4 (N - 1) m, and the models theta_i are the same up to rounding:

- `mean`, C = I - 11^T/N: theta_i is compared with the mean of all. Only the sum of the clients' changes is needed;
  each client keeps its own multiplier mu_i = lambda_+ - lambda_-.
- `chain`, the paper's C: theta_i is compared with theta_{i+1}. The server keeps one multiplier for each pair of
  neighbours.

A change is theta_i minus the theta_i(0) = theta(0) that all clients start from. An absent client's counts as it was.

The paper's factor in the update of nu is N here, the number of clients, with which nu is the sum of the residuals. A
client's step is theta <- theta - alpha (grad f_i + r_i) with r_i = (C^T mu)_i constant over its K local steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperfl_flwr.core.setting_types import Order, Realisation

KAPPA = 2
"""lambda_+ and lambda_- both act on a residual: without the projection always, with it at worst."""


@dataclass(frozen=True, kw_only=True)
class DualRule:
    """How multipliers follow the residuals, d: mu <- (1 - sigma beta^2) mu + 2 beta d.

    Attributes:
        realisation: Which residuals, see the module.
        order: `alternating`: a client's step uses multipliers that have seen the newest models. `published`: it uses
            those of one round before, as in the paper.
        step: Dual step beta, above 0.
        sigma: The regulariser, not negative; 0 leads to exact consensus.
        projection: Keep lambda_+ and lambda_- and make them non-negative, as in the paper; `chain` only.
    """

    realisation: Realisation
    order: Order
    step: float
    sigma: float = 0.0
    projection: bool = False

    def __post_init__(self) -> None:
        if self.step <= 0 or self.sigma < 0:
            raise ValueError(f"step must be positive and sigma not negative: {self.step}, {self.sigma}")
        if self.projection and self.realisation != "chain":
            raise ValueError("the projection needs the multipliers of a chain; mean has no form with it")

    @property
    def decay(self) -> float:
        """Return D = 1 - sigma beta^2, which a multiplier is shrunk by in each round."""
        return 1 - self.sigma * self.step**2

    def accumulated(self, total: Tensor, change: Tensor, rounds: int) -> Tensor:
        """Return A after some rounds of A <- D A + x with a constant x, in float64.

        Args:
            total: A [m].
            change: x [m].
            rounds: k >= 0; the result is D^k A + (1 - D^k) / (1 - D) x, with sigma = 0 A + k x.
        """
        power = self.decay**rounds
        weight = rounds if self.decay == 1 else (1 - power) / (1 - self.decay)
        return power * total.double() + weight * change.double()


@dataclass(kw_only=True)
class MeanClient:
    """One client's side of the mean form.

    With A_i <- D A_i + x_i and S <- D S + mean_j x_j, its multiplier is mu_i = 2 beta (A_i - S): it is never stored,
    and a client that was away knows all of it from its own A_i and the server's S.

    Attributes:
        rule: The settings.
        change: x_i [m] as the server has counted it.
        total: A_i [m], float64; zeros before the first round.
    """

    rule: DualRule
    change: Tensor
    total: Tensor

    def multiplier(self, accumulated: Tensor, missed: int) -> Tensor:
        """Return mu_i [m] for this round, and catch up with the rounds since the last.

        Args:
            accumulated: The server's S [m].
            missed: Rounds since the last one that counted, without this one.
        """
        self.total = self.rule.accumulated(self.total, self.change, missed)
        return KAPPA * self.rule.step * (self.total - accumulated.double())

    def move(self, change: Tensor) -> None:
        """Take the change x_i [m] that this round's upload has brought the server to."""
        self.total = self.rule.accumulated(
            self.total, change if self.rule.order == "alternating" else self.change, rounds=1
        )
        self.change = change


@dataclass(kw_only=True)
class MeanServer:
    """The server's side of the mean form.

    Attributes:
        rule: The settings.
        consensus: mean_j x_j [m], float64; zeros before the first round.
        total: S [m], float64; zeros before the first round.
    """

    rule: DualRule
    consensus: Tensor
    total: Tensor

    def advance(self, increments: Tensor | float, num_clients: int) -> None:
        """Finish a round.

        Args:
            increments: Sum over the clients that finished of what each has changed since its last upload [m]; 0
                without any.
            num_clients: All clients N, present or not.
        """
        before = self.consensus
        self.consensus = before + increments / num_clients
        newest = self.consensus if self.rule.order == "alternating" else before
        self.total = self.rule.accumulated(self.total, newest, rounds=1)

    def leave(self, change: Tensor, total: Tensor, num_clients: int) -> None:
        """Let a client go that says goodbye with its x_i [m] and A_i [m], so that the others' multipliers sum to zero.

        Args:
            change: Its change.
            total: Its total, caught up to this round.
            num_clients: Clients before it leaves, at least 2.
        """
        self.consensus = (num_clients * self.consensus - change) / (num_clients - 1)
        self.total = (num_clients * self.total - total) / (num_clients - 1)


@dataclass(kw_only=True)
class ChainServer:
    """The server's side of the chain; a client keeps nothing but its model.

    Attributes:
        rule: The settings.
        residuals: d_b = theta_b - theta_{b+1} [N - 1, m]; zeros before the first round.
        multipliers: mu_b [1, N - 1, m]; with the projection lambda_+ and lambda_- [2, N - 1, m].
    """

    rule: DualRule
    residuals: Tensor
    multipliers: Tensor

    @classmethod
    def start(cls, rule: DualRule, num_clients: int, size: int, dtype: torch.dtype = torch.float32) -> "ChainServer":
        """Return the state before the first round of N clients with models of m numbers."""
        residuals = torch.zeros(max(num_clients - 1, 0), size, dtype=dtype)
        return cls(rule=rule, residuals=residuals, multipliers=torch.stack([residuals] * (1 + rule.projection)))

    def force(self, client: int) -> Tensor:
        """Return r_i = mu_i - mu_{i-1} [m] for a client i from 0, with mu_{-1} = mu_{N-1} = 0."""
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
            increments: What each client that finished has changed since its last upload [m].
        """
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

    def leave(self, client: int) -> None:
        """Take a client out of the chain: its neighbours become neighbours, d = d_{i-1} + d_i; mu_i is dropped."""
        last = len(self.residuals)
        kept = [pair for pair in range(last) if pair != min(client, last - 1)]
        residuals, multipliers = self.residuals.clone(), self.multipliers
        if 0 < client < last:
            residuals[client - 1] += residuals[client]
        self.residuals, self.multipliers = residuals[kept], multipliers[:, kept].clone()
