"""Numbers of a group of runs, and paired differences between the clients of two groups."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import Task
from hyperfl_flwr.metrics.intervals import Interval, of_crossed_means, of_weighted_mean

Seeds = tuple[Scalar, Scalar]
"""Seed of a run, and of the division of its data. Clients of one federation are trained together."""

Client = tuple[Scalar, int]
"""What tells clients with the same number in several runs apart, see `same_clients.namespace`, and the number."""

EQUAL = 1e-5
"""Relative difference up to which means of two clients are equal: records have six digits of each number."""

Scores = Mapping[tuple[Seeds, Client], float]
"""Numbers of single clients, by the run's seeds and the client."""


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


def scores_of(summary: Mapping[str, Any], metric: str, seeds: Seeds, namespace: Scalar) -> Scores:
    """Return a number of each client of a run that has one; nothing if summary.json has no list of them.

    Args:
        summary: Contents of summary.json.
        metric: Name in it of the mean over the clients; the list is `METRIC_per_client`.
        seeds: The run's seeds.
        namespace: The first part of its clients, see `same_clients.namespace`.
    """
    values = summary.get(f"{metric}_per_client") or ()
    return {(seeds, (namespace, client)): value for client, value in enumerate(values) if value is not None}


def interval_of(scores: Scores) -> Interval | None:
    """Return the 95 % interval of the mean over clients and seeds, see `of_crossed_means`; None with one client."""
    seeds, clients = (dict.fromkeys(place[part] for place in scores) for part in (0, 1))
    rows, columns = ({name: place for place, name in enumerate(names)} for names in (seeds, clients))
    values = np.full((len(rows), len(columns)), np.nan)
    for (seed, client), score in scores.items():
        values[rows[seed], columns[client]] = score
    if len(columns) < 2:  # a single client has no spread
        return None
    low, high = map(float, of_crossed_means(values))
    return low, high


def interval_over_clients(scores: Scores) -> Interval | None:
    """Return the 95 % interval over clients of the mean of the seeds' means; None with one client.

    Each seed counts as much, also one with fewer clients, and a client as much as it does in the seeds that have it.
    """
    of_seeds = Counter(seed for seed, _ in scores)
    parts: dict[Client, list[tuple[float, float]]] = {}
    for (seed, client), score in scores.items():
        weight = 1 / (len(of_seeds) * of_seeds[seed])
        parts.setdefault(client, []).append((weight, score))
    weights = [math.fsum(weight for weight, _ in part) for part in parts.values()]
    sums = [math.fsum(weight * score for weight, score in part) for part in parts.values()]
    return of_weighted_mean([total / weight for total, weight in zip(sums, weights, strict=True)], weights)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Scores of a group's clients minus those of the same clients in the reference group.

    If both groups have the same seeds, each pair is of one client and one run's seeds, and the interval covers other
    clients and other seeds, also of the data's division (`of_crossed_means`). Otherwise a pair is of the client's means
    over the seeds of each group, and the interval covers other clients only.

    Attributes:
        mean: Mean over the pairs, in the unit of the scores.
        low: Lower end of the 95 % interval of the mean; None with one client.
        high: Upper end of the interval.
        clients: Number of clients that are in both groups.
        seeds: Number of seeds that the interval is over; 1 if it does not cover other seeds.
        better: Number of clients of which the mean over the seeds is higher than in the reference group.
        worse: Number of clients of which it is lower.
    """

    mean: float
    low: float | None
    high: float | None
    clients: int
    seeds: int
    better: int
    worse: int

    @classmethod
    def of(cls, ours: Scores, reference: Scores) -> "Difference | None":
        """Return the difference between two groups; None if they have no client in common."""
        if {seeds for seeds, _ in ours} != {seeds for seeds, _ in reference}:
            ours, reference = means_over_seeds(ours), means_over_seeds(reference)
        found = {pair: score - reference[pair] for pair, score in ours.items() if pair in reference}
        if not found:
            return None
        one, other = (means_over_seeds({pair: scores[pair] for pair in found}) for scores in (ours, reference))
        low, high = interval_of(found) or (None, None)
        return cls(
            mean=statistics.fmean(found.values()),
            low=low,
            high=high,
            clients=len(one),
            seeds=len({seeds for seeds, _ in found}),
            better=sum(_is_higher(score, other[client]) for client, score in one.items()),
            worse=sum(_is_higher(other[client], score) for client, score in one.items()),
        )


def _is_higher(one: float, other: float) -> bool:
    return one > other and not math.isclose(one, other, rel_tol=EQUAL)


def means_over_seeds(scores: Scores) -> dict[tuple[Seeds, Client], float]:
    """Return each client's mean over the seeds, as of a single one."""
    found: dict[Client, list[float]] = {}
    for (_, client), score in scores.items():
        found.setdefault(client, []).append(score)
    return {(("", ""), client): statistics.fmean(values) for client, values in found.items()}
