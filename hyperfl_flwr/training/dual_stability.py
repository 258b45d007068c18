"""Linear stability of PRIV-HFL's rounds: limits of the dual step, its default value, and warnings.

On a direction of curvature h and an eigenvalue l of C^T C a round is a 2x2 matrix: with rho = (1 - alpha h)^K and
A = (1 - rho) / h (alpha K for h = 0) the client's K local steps of rate alpha give theta <- rho theta - A mu, and mu
is updated by `DualRule`. The Jury criterion on the characteristic polynomial gives the limits.

With client sampling a client's rounds are k = 1, 2, ... apart, and its matrix is random with determinant rho. In flat
directions (rho = 1) a product of such matrices grows for either order. With s = beta kappa l alpha K it behaves as a
random oscillator of frequency sqrt(s k), which grows at the rate s var(k) / (8 mean(k)) per training. For a share p of
the clients that is s (1 - p) / 8 per round. Curvature damps by alpha K h / 2 per training, which dominates where
beta kappa l (1 - p) < 4 p h.
"""

import math
from typing import Literal, Protocol

from hyperfl_flwr.core.setting_types import Order, Realisation, resolved_number
from hyperfl_flwr.training.dual_averaging import KAPPA, DualRule

LARGEST_EIGENVALUE: dict[Realisation, float] = {"mean": 1.0, "chain": 4.0}
"""Largest eigenvalue l_max of C^T C; that of a chain approaches 4 with many clients."""

FORGETTING = 0.1
"""1 - D with `priv-hfl.sigma = auto`: without it a network's flat directions oscillate without end."""


def default_step(realisation: Realisation, learning_rate: float, local_steps: int, fraction: float = 1.0) -> float:
    """Return beta = 1 / (kappa l_max alpha K), a quarter of the alternating order's limit with sigma = 0 and h = 0.

    With a share p < 1 of the clients in a round it is p / 10 of that value, so that errors in flat directions grow by
    at most a factor e in 300 rounds.

    Args:
        realisation: The kind of residuals.
        learning_rate: Rate alpha of the local steps.
        local_steps: Number K of local steps.
        fraction: Share p of the clients in a round.
    """
    share = 1.0 if fraction == 1 else fraction / 10
    return share / _pull(realisation, learning_rate, local_steps)


def _pull(realisation: Realisation, learning_rate: float, local_steps: int) -> float:
    """Return kappa l_max alpha K."""
    return KAPPA * LARGEST_EIGENVALUE[realisation] * learning_rate * local_steps


def sampled_growth(rule: DualRule, learning_rate: float, local_steps: int, fraction: float) -> float:
    """Return s (1 - p) / 8, the growth rate per round of errors in flat directions under client sampling."""
    return rule.step * _pull(rule.realisation, learning_rate, local_steps) * (1 - fraction) / 8


def is_stable(rule: DualRule, learning_rate: float, local_steps: int, curvature: float = 0.0) -> bool:
    """Return whether no error grows in directions of a given curvature.

    Alternating: beta kappa l A < (1 + rho) (1 + D); published: beta kappa l A < 1 - rho D.

    Args:
        rule: The update rule of the multipliers.
        learning_rate: Rate alpha of plain gradient descent.
        local_steps: Number K of local steps.
        curvature: Curvature h >= 0; from 2 / alpha on, the local steps alone diverge.
    """
    rho = (1 - learning_rate * curvature) ** local_steps
    reach = (1 - rho) / curvature if curvature else learning_rate * local_steps
    pull = rule.step * KAPPA * LARGEST_EIGENVALUE[rule.realisation] * reach
    if rule.order == "alternating":
        return pull < (1 + rho) * (1 + rule.decay)
    overshoots = max(-(1 + rho) * (1 + rule.decay), -1 - rho * rule.decay)  # positive if sigma beta^2 > 2
    return overshoots < pull < 1 - rho * rule.decay


def smallest_stable_curvature(rule: DualRule, learning_rate: float, local_steps: int) -> float:
    """Return the smallest h in [0, 1 / alpha] above which directions are stable; infinity if 1 / alpha is unstable.

    It is found by bisection, to a relative error of 1e-6.
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
    """The settings `priv-hfl.*` of the multipliers' update rule."""

    @property
    def realisation(self) -> Realisation:
        """The kind of residuals: `mean` or `chain`."""

    @property
    def order(self) -> Order:
        """Order of primal and dual steps."""

    @property
    def projection(self) -> bool:
        """Whether multipliers stay non-negative."""

    @property
    def sigma(self) -> Literal["auto"] | float:
        """Regularisation coefficient of the multipliers."""

    @property
    def dual_step(self) -> Literal["auto"] | float:
        """Dual step beta."""

    @property
    def local_steps(self) -> int:
        """Number K of local steps."""


def dual_rule(settings: DualSettings) -> DualRule:
    """Return the update rule of settings without `auto`; server and clients get the same one."""
    return DualRule(
        realisation=settings.realisation,
        order=settings.order,
        projection=settings.projection,
        sigma=resolved_number(settings.sigma),
        step=resolved_number(settings.dual_step),
    )


def default_dual(settings: DualSettings, learning_rate: float, fraction_train: float) -> tuple[float, float]:
    """Return the values of `auto` for the dual step and sigma; sigma matches a dual step that is set explicitly.

    Args:
        settings: The method's settings.
        learning_rate: Rate of plain descent, see `effective_rate`.
        fraction_train: Fraction of the clients that train in a round.
    """
    step = default_step(settings.realisation, learning_rate, settings.local_steps, fraction_train)
    chosen = step if settings.dual_step == "auto" else settings.dual_step
    return step, FORGETTING / chosen**2


def effective_rate(learning_rate: float, momentum: float) -> float:
    """Return the rate of plain descent that is equivalent to descent with momentum b: alpha / (1 - b)."""
    return learning_rate / (1 - momentum)


def stability_warnings(
    settings: DualSettings, learning_rate: float, fraction_train: float, num_rounds: int
) -> list[str]:
    """Return warnings about settings without `auto` under which errors in flat directions grow.

    A network has directions without curvature, so the limits are those of h = 0.

    Args:
        settings: The method's settings.
        learning_rate: Rate of plain descent, see `effective_rate`.
        fraction_train: Fraction of the clients that train in a round.
        num_rounds: Number of rounds of the run.
    """
    rule, rate, steps = dual_rule(settings), learning_rate, settings.local_steps
    where = f"with priv-hfl.order = {rule.order}, a dual step of {rule.step:.3g} and {steps} local steps errors grow in"
    warnings = []
    if curvature := smallest_stable_curvature(rule, rate, steps):
        which = "all directions" if math.isinf(curvature) else f"directions with a curvature below {curvature:.3g}"
        below = f"priv-hfl.dual-step below {_limit(rule, rate, steps):.3g}"
        other = "priv-hfl.order = alternating"
        warnings.append(f"{where} {which}; set {below if rule.order == 'alternating' else other}")
    growth = sampled_growth(rule, rate, steps, fraction_train)
    if growth * num_rounds > 1:
        warnings.append(
            f"{where} flat directions by a factor e every {1 / growth:.0f} rounds, since fraction-train = "
            f"{fraction_train:g}; set a smaller priv-hfl.dual-step"
        )
    return warnings


def _limit(rule: DualRule, rate: float, steps: int) -> float:
    """Return the alternating order's limit at h = 0: beta kappa l alpha K < 2 (2 - sigma beta^2), solved for beta."""
    pull = _pull(rule.realisation, rate, steps)
    return 4 / pull if rule.sigma == 0 else (math.sqrt(pull**2 + 32 * rule.sigma) - pull) / (4 * rule.sigma)
