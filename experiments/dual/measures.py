"""Measured and predicted convergence of PRIV-HFL's dual averaging on toy problems, for `experiments.dual.convergence`.

All clients have the same second derivatives here, since the predicted limits hold for directions that do not mix. With
sigma = 0 only the product of the dual step and an eigenvalue of C^T C matters, so that the limit for a chain of N
clients follows from that for a long chain.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from experiments.dual.toy_problems import Array, LeastSquares, Logistic, Problem, ToyFederation, distance, incidence
from hyperfl_flwr.core.setting_types import Order, Realisation
from hyperfl_flwr.training.dual_averaging import KAPPA, DualRule
from hyperfl_flwr.training.dual_stability import LARGEST_EIGENVALUE, is_stable

RATE = 0.1
"""Learning rate of the convergence curves."""

STEPS = 5
"""Number of local steps of the convergence curves."""

FORMS: tuple[tuple[Realisation, bool], ...] = (("mean", False), ("chain", False), ("chain", True))
ORDERS: tuple[Order, ...] = ("alternating", "published")
BELOW, ABOVE = 0.9, 1.1
"""Dual steps of the curves, relative to the limit."""

BIAS_WEIGHT = 20.0
"""kappa / (sigma beta) of the curves with sigma > 0: the weight of |C theta|^2 / 2 in their limit, unprojected."""

DIVERGED = 1e6
"""Distance from the optimum at which a run is stopped."""

CURVATURES = (1.0, 0.1, 0.01, 0.0)
SHARES = tuple(np.linspace(0.2, 2.0, 37).tolist())
"""Dual steps of the rates, relative to the limit."""

RATES_LEARNING_RATE = 0.05
RATES_STEPS = (1, 20)
RATES_ROUNDS = 24


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The convergence of a run on a toy problem.

    Attributes:
        problem: Name of the problem.
        realisation: `mean` or `chain`.
        order: `alternating` or `published`.
        projection: Whether multipliers are projected, see `DualRule`.
        sigma: The regularisation coefficient.
        step: The dual step.
        share: The dual step relative to the predicted limit with sigma = 0.
        predicted: Predicted limit of the largest distance; infinity above the limit of the step. None if there is no
            prediction: with the projection the limit is sufficient but not sharp, since one of the two multipliers may
            be 0.
        distances: The largest distance of a client from the optimum after each round, from round 0 on; shorter if the
            run diverged.
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
        """The largest distance in each interval of rounds, ten intervals per decade, by the interval's last round."""
        last = len(self.distances) - 1
        ends = sorted({min(last, round(10 ** (exponent / 10))) for exponent in range(10 * len(str(last)) + 1)})
        return {end: max(self.distances[begin + 1 : end + 1]) for begin, end in zip([0, *ends], ends, strict=False)}


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The growth of an error in a direction of one curvature.

    Attributes:
        order: `alternating` or `published`.
        local_steps: Number of local steps K.
        curvature: Curvature h.
        limit: The predicted limit of the dual step; 0 if no step is stable.
        step: The dual step.
        share: The step relative to the limit, or to the limit of the alternating order if that is 0.
        predicted: Predicted logarithm of the growth per round, from the spectral radius.
        measured: Measured logarithm of the growth per round, from the clients' models.
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
    """Return the largest stable dual step, by bisection to a relative error of 1e-9; 0 if no step is stable.

    Args:
        rule: The update rule, of which order and realisation are used; sigma must be 0.
        rate: Rate alpha of the local steps.
        steps: Number of local steps K.
        curvature: Curvature h.
    """
    low, high = 0.0, 1e3 / (rate * steps)
    while high - low > 1e-9 * high and high > 1e-12:
        middle = (low + high) / 2
        stable = is_stable(dataclasses.replace(rule, step=middle), rate, steps, curvature)
        low, high = (middle, high) if stable else (low, middle)
    return low if high > 1e-12 else 0.0


def spectral_radius(rule: DualRule, rate: float, steps: int, curvature: float) -> float:
    """Return the asymptotic factor of an error per round, for the largest eigenvalue of C^T C.

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
    """Return the toy problems by name."""
    return {"least squares": LeastSquares.random(alike=True), "logistic regression": Logistic(alike=True)}


def limit_on(problem: Problem, rule: DualRule) -> float:
    """Return the largest dual step for which all errors near a problem's optimum shrink; sigma must be 0."""
    curvatures = np.linalg.eigvalsh(problem.hessian(0, problem.optimum()))
    matrix = incidence(rule.realisation, problem.num_clients)
    eigenvalue = np.linalg.eigvalsh(matrix.T @ matrix).max()
    smallest = min(largest_stable_step(rule, RATE, STEPS, float(curvature)) for curvature in curvatures)
    return float(smallest * LARGEST_EIGENVALUE[rule.realisation] / eigenvalue)


def curves(rounds: int) -> Iterator[Curve]:
    """Run all forms on all problems: with both orders below and above the limit, and once with sigma > 0."""
    for name, problem in toy_problems().items():
        for realisation, projection in FORMS:
            for order in ORDERS:
                plain = DualRule(realisation=realisation, order=order, step=1.0, projection=projection)
                limit = limit_on(problem, plain)
                for share in (BELOW, ABOVE):
                    rule = dataclasses.replace(plain, step=share * limit)
                    yield _curve(name, problem, rule, share, rounds)
                if order == "alternating":
                    step = limit / 4  # as the default step
                    rule = dataclasses.replace(plain, step=step, sigma=KAPPA / (BIAS_WEIGHT * step))
                    yield _curve(name, problem, rule, 1 / 4, rounds)


def _curve(name: str, problem: Problem, rule: DualRule, share: float, rounds: int) -> Curve:
    optimum, federation = problem.optimum(), ToyFederation(problem, rule, RATE, STEPS)
    distances = [distance(federation.theta, optimum)]
    while len(distances) <= rounds and distances[-1] < DIVERGED:
        federation.round()
        distances.append(distance(federation.theta, optimum))
    predicted: float | None = 0.0
    if share > 1:
        predicted = None if rule.projection else math.inf
    elif rule.sigma:
        # At the fixed point one of the two projected multipliers is 0, so that the other acts alone.
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
    """Measure all growth rates in the realisation `mean`: two clients with opposite slopes and one curvature."""
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

    The models' difference d_t is purely an error, as both start equal and agree at the optimum. The recursion
    d_{t+2} = a d_{t+1} + b d_t is fitted to it (Prony's method); its largest root is the asymptotic growth of d_t.
    """
    hessian = np.array([[curvature]])
    slopes = [np.array([1.0]), np.array([-1.0])]
    federation = ToyFederation(LeastSquares(np.zeros(1), [hessian, hessian], slopes), rule, rate, steps)
    differences = [0.0]
    for _ in range(RATES_ROUNDS):
        federation.round()
        differences.append(float(federation.theta[0, 0] - federation.theta[1, 0]))
    path: Array = np.array(differences)
    (first, second), *_ = np.linalg.lstsq(np.stack([path[1:-1], path[:-2]], axis=1), path[2:], rcond=None)
    return math.log(float(np.abs(np.roots([1, -first, -second])).max()))
