"""Settings of the attacks' optimisation, and the steps of each optimiser."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hyperfl_flwr.attacks.objectives import ObjectiveName
from hyperfl_flwr.core.optimisers import LBFGS, Adam

Tensors = Mapping[str, Tensor]

OptimiserName = Literal["adam", "l-bfgs"]

ScheduleName = Literal["cuts", "cosine"]

_CUTS = (3 / 8, 5 / 8, 7 / 8)
_LAST_RATE = 0.1
_MOST_EVALUATIONS = 10


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """Settings of the loop.

    Attributes:
        iterations: Number of steps of the optimiser.
        learning_rate: Learning rate, in units of normalised pixels or of the latents; for `l-bfgs` the first length
            that each line search tries, in units of the quasi-Newton step.
        optimiser: `adam`, or `l-bfgs` with the strong Wolfe conditions, which solves one problem after the other and
            bounds no unknown. A step of `l-bfgs` evaluates the objective up to ten times; it ends early where no step
            finds a lower point.
        schedule: Rate of `adam`: `cuts` to a tenth at 3/8, 5/8 and 7/8 of the steps, or a `cosine` to a tenth.
        signed: Whether Adam gets only the sign of the gradient.
        total_variation: Weight of the prior.
        objective: Name of the objective.
        polish: Number of further steps from the best point, with a tenth of the rate. Not for `l-bfgs`.
        polish_objective: Name of their objective; `squared` uses the norm of the reply, too.
        restarts: Number of random starts.
    """

    iterations: int
    learning_rate: float = 0.1
    optimiser: OptimiserName = "adam"
    schedule: ScheduleName = "cuts"
    signed: bool = False
    total_variation: float = 1e-4
    objective: ObjectiveName = "cosine"
    polish: int = 0
    polish_objective: ObjectiveName = "squared"
    restarts: int = 1

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: If iterations, restarts or the rate are not positive, or polish is negative.
        """
        if self.iterations < 1 or self.restarts < 1 or self.polish < 0 or self.learning_rate <= 0:
            raise ValueError(f"iterations, restarts and learning_rate must be positive, polish not negative: {self}")

    def for_unknown_scale(self) -> "Optimisation":
        """Return a copy for replies that clipping has changed by an unknown factor: no objective uses their norm."""
        return replace(self, objective="cosine", polish_objective="cosine")


Evaluate = Callable[[Tensors], tuple[Tensor, Tensor]]
"""Maps the unknowns of all problems to the objective [N] and to the objective plus prior [N]."""

Clamp = Callable[[Tensors], None]
"""Clamps the images among the unknowns to the range of pixels, in place."""


def _adam_step(
    unknowns: Tensors, evaluate: Evaluate, optimisation: Optimisation, clamp: Clamp
) -> Callable[[Tensor], bool]:
    """Return a function that takes a step from the scores of the present point, within the range of pixels."""
    clamp(unknowns)
    optimiser = Adam(unknowns.values(), lr=optimisation.learning_rate)
    schedule: torch.optim.lr_scheduler.LRScheduler
    if optimisation.schedule == "cosine":
        last = _LAST_RATE * optimisation.learning_rate
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, optimisation.iterations, last)
    else:
        cuts = [int(share * optimisation.iterations) for share in _CUTS]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones=cuts, gamma=0.1)

    def advance(scores: Tensor) -> bool:
        # The problems are independent: the gradient of the sum holds the gradient of each.
        gradients = torch.autograd.grad(scores.sum(), list(unknowns.values()))
        for value, gradient in zip(unknowns.values(), gradients, strict=True):
            value.grad = gradient.sign() if optimisation.signed else gradient
        optimiser.step()
        schedule.step()
        clamp(unknowns)
        return True

    return advance


def _lbfgs_step(
    unknowns: Tensors, evaluate: Evaluate, optimisation: Optimisation, clamp: Clamp
) -> Callable[[Tensor], bool]:
    """Return a function that takes a step of L-BFGS on one problem."""
    optimiser = LBFGS(
        list(unknowns.values()),
        lr=optimisation.learning_rate,
        max_iter=1,
        max_eval=_MOST_EVALUATIONS,  # the default for a single iteration would end each line search at its first point
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def score() -> Tensor:
        optimiser.zero_grad()
        total = evaluate(unknowns)[1].sum()
        total.backward()  # type: ignore[no-untyped-call] # torch's function has no types
        return total

    def advance(scores: Tensor) -> bool:
        before = [value.detach().clone() for value in unknowns.values()]
        optimiser.step(score)
        return not all(torch.equal(*pair) for pair in zip(before, unknowns.values(), strict=True))

    return advance


Step = Callable[[Tensors, Evaluate, Optimisation, Clamp], Callable[[Tensor], bool]]
"""Maps unknowns, their evaluation, the settings and the clamp to a function that takes a step from the present scores.

It returns False if nothing was changed: L-BFGS has found no lower point, and will find none."""

STEPS: Mapping[OptimiserName, Step] = {"adam": _adam_step, "l-bfgs": _lbfgs_step}
"""Steps by the optimiser's name."""
