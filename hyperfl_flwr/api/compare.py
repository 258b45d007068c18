"""Compare runs in Python, as `hyperfl compare` does."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyperfl_flwr.api.run import Run
from hyperfl_flwr.launch.given_settings import absolute

if TYPE_CHECKING:
    from hyperfl_flwr.results.compare import Comparison


def compare(runs: Sequence[Run | Path | str]) -> "Comparison":
    """Compare runs: those that differ in their seeds only form a group, and groups of the same clients are paired.

    Args:
        runs: At least two runs, or their folders, each with a finished round.

    Returns:
        The groups with their numbers, the differences between them, and what to know before drawing conclusions.

    Raises:
        RunDirectoryError: If a folder is not a run's or is given twice, or there are fewer than two.
    """
    from hyperfl_flwr.results.compare import compare as compare_folders  # loads torch: only where it is used

    return compare_folders([absolute(run) for run in runs])
