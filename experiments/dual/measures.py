"""How fast PRIV-HFL's dual averaging converges on toy problems, and what is predicted: `experiments.dual.convergence`.

All clients have the same second derivatives here, since the limits are those of directions that do not mix. With
sigma = 0 only the product of the dual step and an eigenvalue of C^T C counts, so that the limit of a chain of N clients
follows from that of a long one.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from experiments.dual.toy_problems import Array, Federation, LeastSquares, Logistic, Problem, distance, incidence
from hyperfl_flwr.core.setting_types import Order, Realisation
from hyperfl_flwr.training.dual_averaging import KAPPA, DualRule
from hyperfl_flwr.training.dual_stability import LARGEST_EIGENVALUE, is_stable

RATE = 0.1
STEPS = 5
"""Local steps of the convergence curves."""

FORMS: tuple[tuple[Realisation, bool], ...] = (("mean", False), ("chain", False), ("chain", True))
ORDERS: tuple[Order, ...] = ("alternating", "published")
BELOW, ABOVE = 0.9, 1.1
"""Dual steps of the curves, as shares of the limit."""

BIAS_WEIGHT = 20.0
"""kappa / (sigma beta) of the curves with sigma > 0, the weight of |C theta|^2 / 2 at their end, unprojected."""

DIVERGED = 1e6

CURVATURES = (1.0, 0.1, 0.01, 0.0)
SHARES = tuple(np.linspace(0.2, 2.0, 37).tolist())
"""Dual steps of the rates, as shares of the limit."""

RATES_LEARNING_RATE = 0.05
RATES_STEPS = (1, 20)
RATES_ROUNDS = 24


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A run on a toy problem.

    Attributes:
        problem: Its name.
        realisation: `mean` or `chain`.
        order: `alternating` or `published`.
        projection: As in the paper, see `DualRule`.
        sigma: The regulariser.
        step: The dual step.
        share: The step as a share of the predicted limit with sigma = 0.
        predicted: Where the largest distance must end; infinity above the limit. None where nothing is predicted: with
            the projection the limit is safe, since one of the two multipliers may be 0, but not sharp.
        distances: The largest distance of a client from the optimum after each round, round 0 first; shorter if it
            diverged.
    """

    problem: str
    realisation: Realisation
    order: Order
    projection: bool
    sigma: float
    step: float
    share: float
    predicted: float | None
    distances: list[float]

    @property
    def envelope(self) -> dict[int, float]:
        """The largest distance in each of some intervals of rounds, ten per decade, by their last round."""
        last = len(self.distances) - 1
        ends = sorted({min(last, round(10 ** (exponent / 10))) for exponent in range(10 * len(str(last)) + 1)})
        return {end: max(self.distances[begin + 1 : end + 1]) for begin, end in zip([0, *ends], ends, strict=False)}


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How an error of one curvature grows.

    Attributes:
        order: `alternating` or `published`.
        local_steps: K.
        curvature: h.
        limit: The predicted limit of the dual step; 0 if no step is stable.
        step: The dual step.
        share: The step as a share of the limit, or of the alternating order's if that is 0.
        predicted: Logarithm of the spectral radius, per round.
        measured: The same of the recursion of second order that the clients' models follow.
    """

    order: Order
    local_steps: int
    curvature: float
    limit: float
    step: float
    share: float
    predicted: float
    measured: float


def largest_stable_step(rule: DualRule, rate: float, steps: int, curvature: float) -> float:
    """Return the dual step up to which `is_stable` holds, by bisection to a relative 1e-9; 0 if no step is stable.

    Args:
        rule: Its order and realisation count; sigma must be 0.
        rate: alpha.
        steps: K.
        curvature: h.
    """
    low, high = 0.0, 1e3 / (rate * steps)
    while high - low > 1e-9 * high and high > 1e-12:
        middle = (low + high) / 2
        stable = is_stable(dataclasses.replace(rule, step=middle), rate, steps, curvature)
        low, high = (middle, high) if stable else (low, middle)
    return low if high > 1e-12 else 0.0


def spectral_radius(rule: DualRule, rate: float, steps: int, curvature: float) -> float:
    """Return by what a round multiplies an error in the end, on the largest eigenvalue of C^T C.

    The matrix of a round on (theta, mu) is that of `hyperfl_flwr.training.dual_stability`.
    """
    rho = (1 - rate * curvature) ** steps
    reach = (1 - rho) / curvature if curvature else rate * steps
    gain = KAPPA * rule.step * LARGEST_EIGENVALUE[rule.realisation]
    if rule.order == "alternating":
        matrix = [[rho - reach * gain, -reach * rule.decay], [gain, rule.decay]]
    else:
        matrix = [[rho, -reach], [gain, rule.decay]]
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def toy_problems() -> dict[str, Problem]:
    """Return the problems by name."""
    return {"least squares": LeastSquares.random(alike=True), "logistic regression": Logistic(alike=True)}


def limit_on(problem: Problem, rule: DualRule) -> float:
    """Return the largest dual step with which all errors near a problem's optimum shrink; sigma must be 0."""
    curvatures = np.linalg.eigvalsh(problem.hessian(0, problem.optimum()))
    matrix = incidence(rule.realisation, problem.num_clients)
    eigenvalue = np.linalg.eigvalsh(matrix.T @ matrix).max()
    smallest = min(largest_stable_step(rule, RATE, STEPS, float(each)) for each in curvatures)
    return float(smallest * LARGEST_EIGENVALUE[rule.realisation] / eigenvalue)


def curves(rounds: int) -> Iterator[Curve]:
    """Run all forms on all problems: both orders below and above the limit, and once with sigma > 0."""
    for name, problem in toy_problems().items():
        for realisation, projection in FORMS:
            for order in ORDERS:
                plain = DualRule(realisation=realisation, order=order, step=1.0, projection=projection)
                limit = limit_on(problem, plain)
                for share in (BELOW, ABOVE):
                    rule = dataclasses.replace(plain, step=share * limit)
                    yield _curve(name, problem, rule, share, rounds)
                if order == "alternating":
                    step = limit / 4
                    rule = dataclasses.replace(plain, step=step, sigma=KAPPA / (BIAS_WEIGHT * step))
                    yield _curve(name, problem, rule, 1 / 4, rounds)


def _curve(name: str, problem: Problem, rule: DualRule, share: float, rounds: int) -> Curve:
    optimum, federation = problem.optimum(), Federation(problem, rule, RATE, STEPS)
    distances = [distance(federation.theta, optimum)]
    while len(distances) <= rounds and distances[-1] < DIVERGED:
        federation.round()
        distances.append(distance(federation.theta, optimum))
    predicted: float | None = 0.0
    if share > 1:
        predicted = None if rule.projection else math.inf
    elif rule.sigma:
        weight = (1 if rule.projection else KAPPA) / (rule.sigma * rule.step)
        predicted = distance(problem.biased(incidence(rule.realisation, problem.num_clients), weight), optimum)
    return Curve(
        problem=name,
        realisation=rule.realisation,
        order=rule.order,
        projection=rule.projection,
        sigma=rule.sigma,
        step=rule.step,
        share=share,
        predicted=predicted,
        distances=distances,
    )


def rates() -> Iterator[Growth]:
    """Measure all growth rates, in the mean form: two clients with opposite slopes on one curvature."""
    for order in ORDERS:
        for steps in RATES_STEPS:
            for curvature in CURVATURES:
                rule = DualRule(realisation="mean", order=order, step=1.0)
                limit = largest_stable_step(rule, RATES_LEARNING_RATE, steps, curvature)
                alternating = dataclasses.replace(rule, order="alternating")
                unit = limit or largest_stable_step(alternating, RATES_LEARNING_RATE, steps, curvature)
                for share in SHARES:
                    found = dataclasses.replace(rule, step=share * unit)
                    yield Growth(
                        order=order,
                        local_steps=steps,
                        curvature=curvature,
                        limit=limit,
                        step=found.step,
                        share=share,
                        predicted=math.log(spectral_radius(found, RATES_LEARNING_RATE, steps, curvature)),
                        measured=measured_growth(found, RATES_LEARNING_RATE, steps, curvature),
                    )


def measured_growth(rule: DualRule, rate: float, steps: int, curvature: float) -> float:
    """Return the logarithm of an error's growth per round, from the paths of two clients' models.

    Their difference d_t is an error alone: both start equal, and agree at the optimum. It is fitted with
    d_{t+2} = a d_{t+1} + b d_t (Prony's method), whose largest root is what d_t grows by in the end.
    """
    hessian = np.array([[curvature]])
    slopes = [np.array([1.0]), np.array([-1.0])]
    federation = Federation(LeastSquares(np.zeros(1), [hessian, hessian], slopes), rule, rate, steps)
    differences = [0.0]
    for _ in range(RATES_ROUNDS):
        federation.round()
        differences.append(float(federation.theta[0, 0] - federation.theta[1, 0]))
    path: Array = np.array(differences)
    (first, second), *_ = np.linalg.lstsq(np.stack([path[1:-1], path[:-2]], axis=1), path[2:], rcond=None)
    return math.log(float(np.abs(np.roots([1, -first, -second])).max()))
