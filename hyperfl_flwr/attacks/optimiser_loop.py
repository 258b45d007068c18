"""Optimisation loop of all attacks: adjust unknowns until the simulated reply matches the observed one.

Geiping, Bauermeister, Droege, Moeller: "Inverting Gradients - How easy is it to break privacy in federated learning?",
NeurIPS 2020, section 4: Adam, optionally on the gradient's sign, with the rate cut to a tenth after 3/8, 5/8 and 7/8 of
the iterations, images clamped to the range of valid pixels, and total variation as the prior. Attacks of other papers
take L-BFGS or another schedule, see `Optimisation`, or search for latents of images, see `Problems.images_of`.

Many clients are attacked at once: their problems are independent, have equal shapes, and run as one batch
(`torch.func.vmap`). For each the best point over all iterations and restarts is kept, by its own objective.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from hyperfl_flwr.attacks.objectives import OBJECTIVES
from hyperfl_flwr.attacks.optimisation import STEPS, Evaluate, Optimisation, Tensors
from hyperfl_flwr.attacks.priors import total_variation

IMAGES = "images"
"""Name of the unknown to which the prior and the range of pixels apply."""

LATENTS = "latents"
"""Name of the unknown that takes the images' place if `Problems.images_of` maps it to them."""

Simulate = Callable[[Tensors, Tensors], Tensors]
"""Maps one problem's unknowns and constants to the parts of its reply."""

Progress = Callable[[int, int], None]
"""Called with the number of iterations done and their total, over restarts and stages."""

_PROGRESS_EVERY = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class Problems:
    """N independent inversion problems of equal shapes.

    Attributes:
        simulate: Maps the unknowns of one problem to the reply that they would cause.
        observed: Parts of the replies, each [N, ...].
        constants: Further inputs of the simulation, each [N, ...].
        low: Smallest valid pixel of each channel after normalisation, [C, 1, 1].
        high: Largest valid pixel of each channel, [C, 1, 1].
        shared: Constants that all problems have in common, without the leading dimension.
        images_of: Maps the unknown `LATENTS` [m, ...] of one problem to its images; None if the images are an unknown.
    """

    simulate: Simulate
    observed: Tensors
    constants: Tensors
    low: Tensor
    high: Tensor
    shared: Tensors = field(default_factory=dict)
    images_of: Callable[[Tensor], Tensor] | None = None

    def with_images(self, unknowns: Tensors) -> Tensors:
        """Return the unknowns of one problem with the images, if these follow from latents."""
        if self.images_of is None:
            return unknowns
        return {**unknowns, IMAGES: self.images_of(unknowns[LATENTS])}

    def all_images(self, unknowns: Tensors) -> Tensor:
        """Return the images [N, m, C, H, W] of the unknowns of all problems."""
        images: Tensor = vmap(lambda each: self.with_images(each)[IMAGES])(unknowns)
        return images

    def row(self, number: int) -> "Problems":
        """Return one of the problems."""
        observed, constants = (
            {n: v[number : number + 1] for n, v in each.items()} for each in (self.observed, self.constants)
        )
        return replace(self, observed=observed, constants=constants)

    def clamp(self, unknowns: Tensors) -> None:
        """Clamp the images to the valid range, in place; other unknowns are not bounded."""
        if IMAGES not in unknowns:
            return
        with torch.no_grad():
            unknowns[IMAGES].copy_(torch.minimum(torch.maximum(unknowns[IMAGES], self.low), self.high))


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """The best point found for each problem.

    Attributes:
        unknowns: Values of the unknowns by name, each [N, ...].
        objective: Final value of the objective without the prior, [N].
        iterations: Number of steps taken for each problem, over all restarts; L-BFGS may end before the limit.
        seconds: Wall time of the whole batch.
    """

    unknowns: Tensors
    objective: Tensor
    iterations: Sequence[int]
    seconds: float


def solve(
    problems: Problems,
    start: Callable[[int], Tensors],
    optimisation: Optimisation,
    progress: Progress | None = None,
) -> Solution:
    """Minimise the objective of all problems.

    Args:
        problems: Problems, with all tensors on one device.
        start: Maps the number of a restart to the initial unknowns, each [N, ...].
        optimisation: Settings of the loop.
        progress: Called every fifty iterations.

    Returns:
        For each problem the best point over all restarts.
    """
    began = time.perf_counter()
    per_restart = optimisation.iterations + optimisation.polish
    total = per_restart * optimisation.restarts
    best: _Best | None = None
    taken = np.zeros(len(next(iter(problems.observed.values()))), dtype=np.int64)
    for restart in range(optimisation.restarts):
        done = restart * per_restart

        def report(number: int, before: int = done) -> None:
            if progress is not None and (number % _PROGRESS_EVERY == 0 or before + number == total):
                progress(before + number, total)

        found, steps = _descend(problems, start(restart), optimisation, report)
        taken = taken + steps
        best = found if best is None else best.merged(found)
    assert best is not None
    return Solution(
        unknowns=best.unknowns,
        objective=best.values,
        iterations=[int(number) for number in taken],
        seconds=time.perf_counter() - began,
    )


@dataclass(eq=False)
class _Best:
    """The best point per problem so far, by objective plus prior."""

    unknowns: dict[str, Tensor]
    values: Tensor
    scores: Tensor

    def merged(self, other: "_Best") -> "_Best":
        better = other.scores < self.scores
        return _Best(
            unknowns={name: _where(better, other.unknowns[name], value) for name, value in self.unknowns.items()},
            values=_where(better, other.values, self.values),
            scores=_where(better, other.scores, self.scores),
        )

    @classmethod
    def joined(cls, rows: Sequence["_Best"]) -> "_Best":
        """Return the best points of all problems, from those of each."""
        return cls(
            unknowns={name: torch.cat([row.unknowns[name] for row in rows]) for name in rows[0].unknowns},
            values=torch.cat([row.values for row in rows]),
            scores=torch.cat([row.scores for row in rows]),
        )


Report = Callable[[int], None]

Steps = NDArray[np.int64] | int
"""Number of steps taken: for each problem, or the same for all."""


def _descend(problems: Problems, start: Tensors, optimisation: Optimisation, report: Report) -> tuple[_Best, Steps]:
    if optimisation.optimiser == "l-bfgs":
        return _one_by_one(problems, start, optimisation, report)
    best, steps = _stage(problems, start, optimisation, report)
    if optimisation.polish:
        settings = Optimisation(
            iterations=optimisation.polish,
            learning_rate=optimisation.learning_rate / 10,
            total_variation=optimisation.total_variation / 10,
            objective=optimisation.polish_objective,
        )
        best, more = _stage(problems, best.unknowns, settings, lambda number: report(optimisation.iterations + number))
        steps += more
    return best, steps


def _one_by_one(problems: Problems, start: Tensors, optimisation: Optimisation, report: Report) -> tuple[_Best, Steps]:
    """Solve each problem by itself: the step length and the curvature of L-BFGS are those of one problem."""
    number = len(next(iter(start.values())))
    rows, taken = [], []
    for row in range(number):
        first = {name: value[row : row + 1] for name, value in start.items()}
        best, steps = _stage(problems.row(row), first, optimisation, lambda _: None)
        rows.append(best)
        taken.append(steps)
        report(optimisation.iterations * (row + 1) // number)
    return _Best.joined(rows), np.array(taken)


def _stage(problems: Problems, start: Tensors, optimisation: Optimisation, report: Report) -> tuple[_Best, int]:
    """Run the optimiser once; a point whose objective is not finite is never the best one.

    Returns:
        The best points, and the number of steps taken.
    """
    unknowns = {name: value.detach().clone().requires_grad_() for name, value in start.items()}
    evaluate = _evaluation(problems, optimisation)
    advance = STEPS[optimisation.optimiser](unknowns, evaluate, optimisation, problems.clamp)
    best: _Best | None = None
    number = 0
    while True:
        values, scores = evaluate(unknowns)
        point = _Best(
            unknowns={name: value.detach().clone() for name, value in unknowns.items()},
            values=values.detach(),
            scores=scores.detach().nan_to_num(nan=torch.inf),
        )
        best = point if best is None else best.merged(point)
        if number == optimisation.iterations or not advance(scores):
            return best, number
        number += 1
        report(number)


def _evaluation(problems: Problems, optimisation: Optimisation) -> Evaluate:
    """Return a function from unknowns to objective [N] and objective plus prior [N]."""
    objective = OBJECTIVES[optimisation.objective]

    def one(unknowns: Tensors, constants: Tensors, observed: Tensors) -> tuple[Tensor, Tensor]:
        unknowns = problems.with_images(unknowns)
        value = objective(problems.simulate(unknowns, {**constants, **problems.shared}), observed)
        prior = total_variation(unknowns[IMAGES]) if IMAGES in unknowns else 0.0
        return value, value + optimisation.total_variation * prior

    batched = vmap(one)

    def evaluate(unknowns: Tensors) -> tuple[Tensor, Tensor]:
        values: tuple[Tensor, Tensor] = batched(unknowns, problems.constants, problems.observed)
        return values

    return evaluate


def _where(condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(condition.reshape(-1, *[1] * (one.ndim - 1)), one, other)
