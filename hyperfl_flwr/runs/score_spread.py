"""How the main score spreads over the clients of a run: its mean, deviation, interval and lowest values."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from hyperfl_flwr.metrics.intervals import Interval, of_mean
from hyperfl_flwr.runs.run_directory import Record


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Main scores of the clients after the last round; None where they are not known."""

    mean: float | None
    std: float | None
    num_clients: int
    worst: float | None = None
    worst_decile: float | None = None
    interval: Interval | None = None
    per_client: Sequence[float | None] | None = None

    @classmethod
    def of(cls, per_client: Sequence[float | None]) -> Self:
        """Return the numbers of clients that are known one by one."""
        known = sorted(accuracy for accuracy in per_client if accuracy is not None)
        # Minus the floor of the negated quotient is the ceiling: the lowest tenth has at least one client.
        lowest = known[: -(-len(known) // 10)]
        return cls(
            mean=statistics.fmean(known) if known else None,
            std=statistics.pstdev(known) if known else None,
            num_clients=len(known),
            worst=min(known, default=None),
            worst_decile=statistics.fmean(lowest) if lowest else None,
            interval=_interval(statistics.fmean(known), statistics.pstdev(known), len(known)) if known else None,
            per_client=per_client,
        )

    @classmethod
    def opened(cls, record: Record, name: str) -> Self:
        """Return the numbers of a score of which only the sums over the clients were opened."""
        mean, std = (record.get(f"{name}{part}") for part in ("", "_std"))
        number = record["measured"] if "measured" in record else record["clients"]
        interval = None if mean is None or std is None else _interval(mean, std, number)
        return cls(mean=mean, std=std, num_clients=number, interval=interval)


def _interval(mean: float, std: float, number: int) -> Interval | None:
    """Return the 95 % interval of a mean, from the standard deviation that is divided by the number of values."""
    return of_mean(mean, std * math.sqrt(number / (number - 1)), number) if number > 1 else None
