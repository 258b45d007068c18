"""Tables of the documentation that are computed, from formulas or on toy problems, without data and runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from experiments.dual.cost import Form, computed_cost
from experiments.dual.measures import DIVERGED, FORMS, RATE, STEPS
from experiments.dual.toy_problems import LeastSquares, Logistic, Problem, ToyFederation, distance
from hyperfl_flwr.core.setting_types import Order
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.secure_sums.thresholds import USUAL_CROWD, crowd, smallest_threshold, usual_colluding
from hyperfl_flwr.training.dual_averaging import DualRule

Amount = Literal["bytes_up_per_client_round", "server_state_bytes", "client_state_bytes"]

SMALL_COHORTS = (2, 3)
"""Numbers of nodes that are shown with `min-cohort = 2`."""

COHORTS = (3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30, 50, 75, 100)
"""Numbers of nodes that are shown with the usual `min-cohort`."""

MODELS: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "digits, `cnn`": ("cnn", (1, 8, 8), (5, 20, 100)),
    "28x28, `cnn`": ("cnn", (1, 28, 28), (5, 20, 100)),
    "32x32, `lenet`": ("lenet", (3, 32, 32), (5, 20, 100)),
    "ResNet-18": ("resnet18", (3, 32, 32), (100,)),
}
"""Models whose costs are shown: target, shape of a sample, and numbers of clients N; the last is not in the study."""

DUAL_STEPS: Mapping[str, float] = {"mean": 0.4, "chain": 0.1}
"""Dual steps beta of the two realisations with the same product with the largest eigenvalue of C^T C."""

SLOWER: tuple[tuple[Order, int], ...] = (("alternating", 1), ("published", 1), ("published", 10))
"""Orders of the updates, with the numbers by which the dual step is divided."""

DISTANCES = ("1e-3", "1e-9")
"""Distances from the optimum, as they are shown."""

MOST_ROUNDS = 1500


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The thresholds of secure sums that are used if nobody has chosen one, see `secure_sums.thresholds`."""

    def lines(self) -> list[str]:
        """Return the table in Markdown, with a column for each number of nodes."""
        cohorts = [(nodes, 2, "*") for nodes in SMALL_COHORTS] + [(nodes, USUAL_CROWD, "") for nodes in COHORTS]
        columns: list[tuple[str, ...]] = [
            ("n", "c auto", "**t**", "honest nodes in a sum, G", "nodes that may drop out, n − t")
        ]
        for nodes, least, mark in cohorts:
            colluding = usual_colluding(nodes)
            threshold = smallest_threshold(nodes, colluding, least)
            numbers = (colluding, threshold, crowd(nodes, threshold, colluding), nodes - threshold)
            columns.append((f"{nodes}{mark}", *map(str, numbers)))
        heading, *rows = (f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True))
        return [heading, "|---|" + "---:|" * len(cohorts), *rows]


@dataclass(frozen=True, kw_only=True)
class DualCosts:
    """Costs of PRIV-HFL's forms in MB (10^6 bytes), with a row for each model and number of clients.

    Attributes:
        amount: What is shown; what a client receives is what it sends.
        forms: For each heading the form of which it shows the cost; forms that cost the same share a heading.
        with_size: Whether a model's number of parameters m is shown.
    """

    amount: Amount
    forms: Mapping[str, Form]
    with_size: bool = False

    def lines(self) -> list[str]:
        """Return the table in Markdown."""
        headings = ["model (m)" if self.with_size else "model", "N", *self.forms]
        return [f"| {' | '.join(headings)} |", "|---|---:|" + "---:|" * len(self.forms), *self._rows()]

    def _rows(self) -> Iterator[str]:
        for model, (target, shape, numbers) in MODELS.items():
            size = sum(parameter.numel() for parameter in build_target(target, shape, 10).parameters())
            label = (f"{model} ({size:,})" if self.with_size else model) + ", computed only" * (model == "ResNet-18")
            for number in numbers:
                costs = [getattr(computed_cost(form, number, size), self.amount) for form in self.forms.values()]
                yield f"| {' | '.join([label, str(number), *map(_megabytes, costs)])} |"


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Rounds until PRIV-HFL's dual averaging is near the optimum of toy problems, see `experiments.dual`."""

    def lines(self) -> list[str]:
        """Return the table in Markdown, with a row for each form and order."""
        problems = {"least squares": LeastSquares.random(), "logistic regression": Logistic()}
        headings = [f"{name}, to {least}" for name in problems for least in DISTANCES]
        lines = ["| | β | " + " | ".join(headings) + " |", "|---|---:|" + "---:|" * len(headings)]
        for realisation, projection in FORMS:
            for order, slower in SLOWER:
                step = DUAL_STEPS[realisation] / slower
                rule = DualRule(realisation=realisation, order=order, step=step, projection=projection)
                label = f"{realisation}, {order}" + ", projected" * projection
                found = [text for problem in problems.values() for text in _rounds_to(problem, rule)]
                lines.append(f"| {' | '.join([label, f'{step:g}', *found])} |")
        return lines


def _rounds_to(problem: Problem, rule: DualRule) -> list[str]:
    """Return after which round all clients are within each of `DISTANCES` of the optimum."""
    optimum, federation = problem.optimum(), ToyFederation(problem, rule, RATE, STEPS)
    found: list[str] = []
    for number in range(1, MOST_ROUNDS + 1):
        federation.round()
        away = distance(federation.theta, optimum)
        while len(found) < len(DISTANCES) and away <= float(DISTANCES[len(found)]):
            found.append(str(number))
        if len(found) == len(DISTANCES) or away > DIVERGED:
            break
    missing = "diverges" if away > DIVERGED else f"over {MOST_ROUNDS}"
    return found + [missing] * (len(DISTANCES) - len(found))


def _megabytes(size: int) -> str:
    """Format a number of bytes in MB with three digits or more."""
    megabytes = size / 1e6
    return f"{megabytes:,.{2 if megabytes < 10 else 1 if megabytes < 1000 else 0}f}"
