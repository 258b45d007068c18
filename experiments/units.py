"""The units in which numbers of summary.json are shown, and which of several values is the best."""

import re
from collections.abc import Iterable
from typing import Protocol

from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.runs.target_accuracy import counts_rounds

_ERRORS = frozenset({"rmse", "mae", "mse"})
_SCORES = frozenset(name for task in TASKS.values() for name in (task.score, *task.all_scores, task.deciding)) - _ERRORS


def _of_models(names: Iterable[str]) -> str:
    """Return a pattern of how good the clients' models or the aggregate are; not of spreads and numbers of clients."""
    return rf"(global_test|test|validation|best)_({'|'.join(sorted(names))})(_aggregate|_worst|_worst_decile)?"


_COSTS = r"(unmask_)?seconds_per_round|peak_memory_mb|.*bytes.*|novel_.*_models|.*_loss"

_HIGHEST = re.compile(rf"{_of_models(_SCORES)}|novel_.+(?<!_sem)")
_LOWEST = re.compile(rf"{_of_models(_ERRORS)}|{_COSTS}")

_BOTH = re.compile(
    rf"((global_test|test|validation|best)_({'|'.join(sorted(_SCORES | _ERRORS))})|backdoor_success|best_round|"
    rf"best_validation_round)_aggregate"
)


class Choice(Protocol):
    """`max` or `min`."""

    def __call__(self, values: Iterable[float], /) -> float:
        """Return the best of some values."""


def best_of(metric: str) -> Choice | None:
    """Return how the best value of a number of summary.json is found.

    None for numbers of which none is better, or for whom depends: spreads, counts, and what an attacker finds.
    """
    if _LOWEST.fullmatch(metric) or counts_rounds(metric):
        return min
    return max if _HIGHEST.fullmatch(metric) else None


def has_aggregate(metric: str) -> bool:
    """Return whether a number of summary.json is of the clients' models, and another one of the models as received."""
    other = f"{metric}_aggregate"
    return bool(_BOTH.fullmatch(other)) or counts_rounds(other)


def unit_of(metric: str) -> str:
    """Return the unit in which a number of summary.json is shown."""
    if "bytes" in metric:
        return "bytes"
    if metric.endswith(("_models", "_num_clients")):
        return ""
    if "accuracy" in metric or "_tpr_" in metric or metric == "labels_found" or metric.startswith("novel_"):
        return "%"
    return "dB" if "psnr" in metric else "s" if "seconds" in metric else ""


def shown_unit(unit: str, *, is_difference: bool) -> str:
    """Return the unit of numbers, or of the differences between them."""
    return "percentage points" if is_difference and unit == "%" else unit
