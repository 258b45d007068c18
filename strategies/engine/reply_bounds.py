"""Sanity bounds on the counts, metrics and update norms that nodes report.

A reply with valid names and shapes may still be wrong. The bounds do not detect a careful attacker, who stays within
them. They prevent one node's mistake or crude manipulation from dominating the mean over all clients: a weight of 10^12
samples, an update a thousand times too long, an accuracy of 7.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.tasks import CLASSIFICATION, REGRESSION, TASKS
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import LABEL_COUNTS, ClientResult, Reduction, Report, group_of
from hyperfl_flwr.protocol.update_norms import noise_norms, norms_of_change, reference_norms, refuse_long
from strategies.engine.replies import TrainingReply

LIMITS = {
    **dict.fromkeys(("accuracy", "macro-f1", "auc", "majority-share", "backdoor-success"), (0.0, 1.0)),
    REGRESSION.score: (REGRESSION.lowest, 1.0),
    **dict.fromkeys(("mse", "mae", "personalized-loss", "aggregate-loss", "kept-loss", "seconds"), (0.0, math.inf)),
}
"""Smallest and largest value of a metric, by the end of its name (`mse` of `rmse`, too).

The losses are those of evaluations, which are the tasks'. A method's own loss in training may be negative, as FedDyn's.
"""

_WHOLE = ("private-steps", "test-examples")
"""Metrics that are counts."""

_OF_SETTINGS = re.compile(
    r"(?:aggregate|personalized|kept)-(?P<what>validation|global|backdoor)-(?P<score>accuracy|r2|mse|success)"
)
"""Names of the evaluations that only some runs have."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds on the replies to a round's TRAIN messages.

    Attributes:
        max_ratio: Largest norm of a group's change, relative to the norm of the group that was sent; 0 for no bound.
        num_examples: Number of training samples that nodes announced in the handshake, by client.
        shared: The arrays that all clients received, of groups that are summed.
        per_client: The arrays that each client received and sends back alone, by client.
        reductions: Reduction of each shared group.
        noise: Standard deviation of the noise in each element of a mean change; it does not count as change.
        score: Name of the main score of the run's task, which every client reports.
    """

    max_ratio: float
    num_examples: Mapping[int, int]
    shared: SharedArrays
    per_client: Mapping[int, SharedArrays]
    reductions: Mapping[str, Reduction]
    noise: float = 0.0
    score: str = CLASSIFICATION.score

    def check(self, reply: TrainingReply) -> None:
        """Check a reply that has the right layout, see `strategies.engine.replies`.

        Raises:
            ValueError: If a number is out of bounds; the message names the client or the group.
        """
        refuse_impossible_numbers(reply.report, self.num_examples, required=f"personalized-{self.score}")
        for result in reply.report.results:
            if (counts := reply.per_client.get(result.client, {}).get(LABEL_COUNTS)) is not None:
                refuse_wrong_counts(counts, result)
        if not self.max_ratio:
            return
        if reply.arrays:
            divisors = _divisors(reply, self.reductions)
            self._refuse_long(norms_of_change(_with_outliers(reply), self.shared, self.reductions, divisors))
        for client, arrays in reply.per_client.items():
            sent, trained = self.per_client[client], {key: arrays[key] for key in arrays if key != LABEL_COUNTS}
            noise = noise_norms(sent, self.noise) if self.noise else None
            refuse_long(norms_of_change(trained, sent, self.reductions), reference_norms(sent), self.max_ratio, noise)

    def check_means(self, means: SharedArrays, num_clients: int) -> None:
        """Check the opened means of a secure sum, of which single replies cannot be checked.

        Raises:
            ValueError: If a group is out of bounds; the message names the group.
        """
        if self.max_ratio:
            sums = {key: self.reductions[group_of(key)] is Reduction.SUM for key in means}
            divisors = {key: float(num_clients) if is_sum else 1.0 for key, is_sum in sums.items()}
            self._refuse_long(norms_of_change(means, self.shared, self.reductions, divisors))

    def _refuse_long(self, changes: Mapping[str, float]) -> None:
        noise = noise_norms(self.shared, self.noise) if self.noise else None
        refuse_long(changes, self._references, self.max_ratio, noise)

    @cached_property
    def _references(self) -> Mapping[str, float]:
        """The reference norms of the shared groups, computed once for all replies."""
        return reference_norms(self.shared)


def refuse_impossible_numbers(report: Report, num_examples: Mapping[int, int], required: str = "") -> None:
    """Check a report's shares and counts.

    Args:
        report: A node's report.
        num_examples: Number of training samples that nodes announced in the handshake, by client; other clients may
            report any number above 0. Empty if the report is not about training samples.
        required: Name of a metric that every client with metrics must have; empty for none. Clients of a node with
            `max-epsilon` have no metrics.

    Raises:
        ValueError: If a number is impossible; the message names the client.
    """
    for result in report.results:
        client = f"client {result.client}"
        announced = num_examples.get(result.client)
        if announced is not None and result.num_examples != announced:
            raise ValueError(f"{client} reports {result.num_examples} training samples but announced {announced}")
        if required and result.metrics and required not in result.metrics:
            raise ValueError(f"{client} reports no {required}, or one that is not a number")
        for name, value in result.metrics.items():
            if name in _WHOLE and not (0 <= value < math.inf and float(value).is_integer()):
                raise ValueError(f"the {name} of {client} must be a whole number of at least 0, got {value:g}")
            if (limits := limits_of(name)) and not limits[0] <= value <= limits[1]:
                raise ValueError(f"the {name} of {client} must be {range_text(limits)}, got {value:g}")


def refuse_unasked(report: Report, config: RunConfig) -> None:
    """Refuse evaluations that the run's settings do not ask for: their mean would be that of one node.

    Raises:
        ValueError: If there are such metrics; the message names one.
    """
    task = TASKS[config.task]
    asked = {
        "validation": task.deciding if config.selects_rounds else "",
        "global": task.score if config.data.global_test else "",
        "backdoor": "success" if config.adversary.attack == "backdoor" else "",
    }
    for result in report.results:
        for name in result.metrics:
            found = _OF_SETTINGS.fullmatch(name)
            if found and found["score"] != asked[found["what"]]:
                raise ValueError(f"client {result.client} reports {name}, which the run's settings do not ask for")


def range_text(limits: tuple[float, float]) -> str:
    """Return the limits of a metric for people."""
    low, high = limits
    return f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"


def limits_of(metric: str) -> tuple[float, float] | None:
    """Return the smallest and largest value of a metric by its name; None for one without limits."""
    return next((limits for end, limits in LIMITS.items() if metric.endswith(end)), None)


def refuse_wrong_counts(counts: NDArray[Any], result: ClientResult) -> None:
    """Check how many samples of each class a client reports.

    Args:
        counts: The numbers, finite floats [K].
        result: The client's result, with its number of training samples.

    Raises:
        ValueError: If they are no numbers of samples, or do not add up to the number of training samples.
    """
    is_count = (counts >= 0) & (np.rint(counts) == counts)
    if not is_count.all() or counts.sum(dtype=np.float64) != result.num_examples:
        raise ValueError(
            f"the label counts of client {result.client} must be whole numbers from 0 on that add up to its "
            f"{result.num_examples} training samples"
        )


def _divisors(reply: TrainingReply, reductions: Mapping[str, Reduction]) -> dict[str, float]:
    """Return the divisors, by key, that turn a node's arrays into means over its clients."""
    if not reply.is_sum:
        return dict.fromkeys(reply.arrays, 1.0)
    num_clients = len(reply.report.results)
    divisors = {}
    for key in reply.arrays:
        # The server does not divide SUM groups, but the bound is on the mean change of one client.
        reduction = reductions[group_of(key)]
        divisors[key] = (
            num_clients if reduction is Reduction.SUM else reduction.divisor(reply.num_examples, num_clients)
        )
    return divisors


def _with_outliers(reply: TrainingReply) -> SharedArrays:
    """Return a node's arrays with all levels added; only arrays with several levels are copied."""
    arrays = dict(reply.arrays)
    for sums in reply.outliers.values():
        arrays |= {key: arrays[key] + value for key, value in sums.items()}
    return arrays
