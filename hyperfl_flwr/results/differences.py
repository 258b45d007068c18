"""Numbers of a group of runs, and paired differences between the clients of two groups."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import Task
from hyperfl_flwr.metrics.intervals import of_mean

Client = tuple[Scalar, int]
"""Seed of the data's division, and the client's number in it."""


def numbers_of(task: Task) -> list[str]:
    """Return the names of the numbers of summary.json that are compared."""
    main = ("test_accuracy", "test_accuracy_aggregate", "test_accuracy_worst", "test_accuracy_worst_decile")
    return [
        *map(task.key, main),
        *(f"test_{name}" for name in task.all_scores),
        *(f"test_{name}_aggregate" for name in task.all_scores),
        *(("test_majority_share",) if task.has_shares else ()),
        "bytes_up_per_client_round",
        "bytes_down_per_client_round",
        "seconds_per_round",
    ]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A number of a group: mean and standard deviation (n - 1) over its runs; None if it is not known."""

    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread":
        """Return the spread of the known values."""
        known = [value for value in values if value is not None]
        return cls(
            mean=statistics.fmean(known) if known else None,
            deviation=statistics.stdev(known) if len(known) > 1 else None,
        )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Personalized scores of a group's clients minus those of the same clients in the reference group.

    Attributes:
        mean: Mean over the clients, of the task's main score.
        low: Lower end of the 95 % interval of the mean (Student's t over the clients); None with one client.
        high: Upper end of the interval.
        clients: Number of clients that are in both groups.
        better: Number of clients with a higher score than in the reference group.
        worse: Number of clients with a lower score.
    """

    mean: float
    low: float | None
    high: float | None
    clients: int
    better: int
    worse: int

    @classmethod
    def of(cls, ours: Mapping[Client, float], reference: Mapping[Client, float]) -> "Difference | None":
        """Return the difference between two groups; None if they have no client in common."""
        found = [score - reference[client] for client, score in ours.items() if client in reference]
        if not found:
            return None
        mean = statistics.fmean(found)
        interval = of_mean(mean, statistics.stdev(found), len(found)) if len(found) > 1 else None
        low, high = interval or (None, None)
        return cls(
            mean=mean,
            low=low,
            high=high,
            clients=len(found),
            better=sum(value > 0 for value in found),
            worse=sum(value < 0 for value in found),
        )
