"""Which dual steps converge: the linear stability of PRIV-HFL's rounds, and the step that is taken by default.

On a direction of curvature h and an eigenvalue l of C^T C a round is a 2x2 matrix: with rho = (1 - alpha h)^K and
A = (1 - rho) / h (alpha K for h = 0) the client's K local steps of rate alpha give theta <- rho theta - A mu, and mu
follows by `DualRule`. The Jury criterion on its characteristic polynomial gives the limits.

With client sampling a client's rounds are k = 1, 2, ... apart, and its matrix is a random one of determinant rho. In
flat directions (rho = 1) a product of such matrices grows whatever the order: with s = beta kappa l alpha K as a random
oscillator of frequency sqrt(s k), at the rate s var(k) / (8 mean(k)) per training, which for a share p of the clients
is s (1 - p) / 8 per round. Curvature damps by alpha K h / 2 per training and wins where beta kappa l (1 - p) < 4 p h.
"""

import math
from typing import Literal, Protocol

from hyperfl_flwr.core.setting_types import Order, Realisation, number
from hyperfl_flwr.training.dual_averaging import KAPPA, DualRule

LARGEST_EIGENVALUE: dict[Realisation, float] = {"mean": 1.0, "chain": 4.0}
"""l_max of C^T C; a chain's comes close to 4 with many clients."""


FORGETTING = 0.1
"""1 - D with `priv-hfl.sigma = auto`: a network has flat directions, which oscillate for ever without it."""


def default_step(realisation: Realisation, learning_rate: float, local_steps: int, fraction: float = 1.0) -> float:
    """Return beta = 1 / (kappa l_max alpha K), a quarter of the alternating order's limit with sigma = 0 and h = 0.

    With a share p < 1 of the clients in a round, p / 10 of that, so that what grows in flat directions grows by no more
    than a factor e in 300 rounds.
    """
    share = 1.0 if fraction == 1 else fraction / 10
    return share / _pull(realisation, learning_rate, local_steps)


def _pull(realisation: Realisation, learning_rate: float, local_steps: int) -> float:
    """Return kappa l_max alpha K."""
    return KAPPA * LARGEST_EIGENVALUE[realisation] * learning_rate * local_steps


def sampled_growth(rule: DualRule, learning_rate: float, local_steps: int, fraction: float) -> float:
    """Return the rate s (1 - p) / 8 per round at which errors in flat directions grow with sampled clients."""
    return rule.step * _pull(rule.realisation, learning_rate, local_steps) * (1 - fraction) / 8


def is_stable(rule: DualRule, learning_rate: float, local_steps: int, curvature: float = 0.0) -> bool:
    """Say whether a round does not enlarge any error in directions of a curvature.

    Alternating: beta kappa l A < (1 + rho) (1 + D); published: beta kappa l A < 1 - rho D.

    Args:
        rule: The dual's settings.
        learning_rate: alpha, of plain gradient descent.
        local_steps: K.
        curvature: h >= 0; below 2 / alpha, or the local steps diverge by themselves.
    """
    rho = (1 - learning_rate * curvature) ** local_steps
    reach = (1 - rho) / curvature if curvature else learning_rate * local_steps
    pull = rule.step * KAPPA * LARGEST_EIGENVALUE[rule.realisation] * reach
    if rule.order == "alternating":
        return pull < (1 + rho) * (1 + rule.decay)
    overshoots = max(-(1 + rho) * (1 + rule.decay), -1 - rho * rule.decay)  # positive if sigma beta^2 > 2
    return overshoots < pull < 1 - rho * rule.decay


def smallest_stable_curvature(rule: DualRule, learning_rate: float, local_steps: int) -> float:
    """Return the h in [0, 1 / alpha] from which on all directions are stable; infinity if 1 / alpha is not.

    Found by bisection, to a relative error of 1e-6.
    """
    low, high = 0.0, 1 / learning_rate
    if is_stable(rule, learning_rate, local_steps):
        return low
    if not is_stable(rule, learning_rate, local_steps, high):
        return math.inf
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_stable(rule, learning_rate, local_steps, middle) else (middle, high)
    return high


class DualSettings(Protocol):
    """The settings `priv-hfl.*` that say how the multipliers move."""

    @property
    def realisation(self) -> Realisation:
        """Pairs of clients."""

    @property
    def order(self) -> Order:
        """Order of primal and dual steps."""

    @property
    def projection(self) -> bool:
        """Whether multipliers stay non-negative."""

    @property
    def sigma(self) -> Literal["auto"] | float:
        """Forgetting of the multipliers."""

    @property
    def dual_step(self) -> Literal["auto"] | float:
        """Step size beta."""

    @property
    def local_steps(self) -> int:
        """Local steps K."""


def dual_rule(settings: DualSettings) -> DualRule:
    """Return the rule that settings without `auto` ask for; the same on the server and on every client."""
    return DualRule(
        realisation=settings.realisation,
        order=settings.order,
        projection=settings.projection,
        sigma=number(settings.sigma),
        step=number(settings.dual_step),
    )


def default_dual(settings: DualSettings, learning_rate: float, fraction_train: float) -> tuple[float, float]:
    """Return the dual step and sigma that `auto` stands for; sigma goes with a step that is set, too.

    Args:
        settings: The method's.
        learning_rate: Of plain descent, see `effective_rate`.
        fraction_train: Fraction of the clients that train in a round.
    """
    step = default_step(settings.realisation, learning_rate, settings.local_steps, fraction_train)
    chosen = step if settings.dual_step == "auto" else settings.dual_step
    return step, FORGETTING / chosen**2


def effective_rate(learning_rate: float, momentum: float) -> float:
    """Return the rate of plain descent that moves as far as descent with momentum b does: alpha / (1 - b)."""
    return learning_rate / (1 - momentum)


def stability_warnings(
    settings: DualSettings, learning_rate: float, fraction_train: float, num_rounds: int
) -> list[str]:
    """Return warnings about settings without `auto` under which errors in flat directions grow.

    A network has directions without curvature, so the limits are those of h = 0.

    Args:
        settings: The method's.
        learning_rate: Of plain descent, see `effective_rate`.
        fraction_train: Fraction of the clients that train in a round.
        num_rounds: Rounds of the run.
    """
    rule, rate, steps = dual_rule(settings), learning_rate, settings.local_steps
    where = f"with priv-hfl.order = {rule.order}, a dual step of {rule.step:.3g} and {steps} local steps errors grow in"
    warnings = []
    if curvature := smallest_stable_curvature(rule, rate, steps):
        which = "all directions" if math.isinf(curvature) else f"directions with a curvature below {curvature:.3g}"
        below = f"priv-hfl.dual-step below {_limit(rule, rate, steps):.3g}"
        warnings.append(f"{where} {which}; take {below if rule.order == 'alternating' else 'the alternating order'}")
    growth = sampled_growth(rule, rate, steps, fraction_train)
    if growth * num_rounds > 1:
        warnings.append(
            f"{where} flat directions by a factor e every {1 / growth:.0f} rounds, since fraction-train = "
            f"{fraction_train:g}; take a smaller priv-hfl.dual-step"
        )
    return warnings


def _limit(rule: DualRule, rate: float, steps: int) -> float:
    """Return the alternating order's limit at h = 0: beta kappa l alpha K < 2 (2 - sigma beta^2), solved for beta."""
    pull = _pull(rule.realisation, rate, steps)
    return 4 / pull if rule.sigma == 0 else (math.sqrt(pull**2 + 32 * rule.sigma) - pull) / (4 * rule.sigma)
