"""The result of a finished cell of a study."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.restored import is_restored
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import REGRESSION
from hyperfl_flwr.results.differences import Scores, Seeds, scores_of
from hyperfl_flwr.results.same_clients import Division, division_of, namespace
from hyperfl_flwr.runs.run_directory import has_secure_sums, settings_of
from hyperfl_flwr.runs.summary import NOT_KNOWN, OF_SINGLE_CLIENTS
from hyperfl_flwr.runs.target_accuracy import targets_of

NO_SCORES = "no values of single clients"
"""Text in the place of a number that needs them, where summary.json or a record has the mean over the clients only."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The result of a finished cell.

    Attributes:
        seed: The cell's seed.
        seeds: The run's seed, and that of the data's division.
        namespace: What tells its clients from those of other runs, see `same_clients.namespace`.
        division: What determines the clients and their test data.
        summary: Contents of summary.json.
        has_secure_sums: Whether the numbers of single clients are not known.
        targets: The target accuracies whose rounds the run counts, ascending.
        is_restored: Whether the cell was restored from its record.
    """

    seed: int
    seeds: Seeds
    namespace: Scalar
    division: Division
    summary: Mapping[str, Any]
    has_secure_sums: bool
    targets: Sequence[float]
    is_restored: bool

    @classmethod
    def read(cls, seed: int, path: Path, manifest: Mapping[str, Any]) -> "Finished":
        """Read the folder of a cell."""
        settings = settings_of(path)
        return cls(
            seed=seed,
            seeds=(seed, settings["data.seed"]),
            namespace=namespace(settings, manifest),
            division={**division_of(settings, manifest), "data.seed": settings["data.seed"]},
            summary=json.loads((path / "summary.json").read_text()),
            has_secure_sums=has_secure_sums(manifest),
            targets=targets_of(settings),
            is_restored=is_restored(path),
        )

    def scores(self, metric: str, unit: str) -> Scores:
        """Return a number of each client that has one, in a unit."""
        found = scores_of(self.summary, metric, self.seeds, self.namespace)
        return {place: in_unit(value, unit) for place, value in found.items()}

    def error(self, metric: str, unit: str) -> float:
        """Return the standard error of a number, in a unit; NaN if there is none."""
        error = self.summary.get(f"{metric}_sem")
        return float("nan") if error is None else in_unit(error, unit)

    def num_clients(self, metric: str) -> tuple[int, int] | None:
        """Return over how many clients a mean score is, and of how many; None for other numbers."""
        if not metric.startswith("test_"):
            return None
        kind = "_aggregate" * ("_aggregate" in metric)
        names = [f"{metric}_num_clients"] + [
            f"test_{score}{kind}_num_clients" for score in ("accuracy", REGRESSION.score)
        ]
        known = next((self.summary[name] for name in names if name in self.summary), None)
        return None if known is None else (known, self.summary["num_clients"])

    def no_scores(self, metric: str) -> str:
        """Return the text in the place of a number of single clients, if there is none."""
        if f"{metric}_per_client".replace(REGRESSION.score, "accuracy") not in OF_SINGLE_CLIENTS:
            return NO_SCORES
        return NOT_KNOWN if self.has_secure_sums else NO_SCORES + " in this record" * self.is_restored


def fewer_text(counts: Sequence[tuple[int, int] | None]) -> str:
    """Return over how many clients means of several runs are, as `8 of 10`; empty if all are over all of their run's.

    Args:
        counts: For each run the number of clients that a mean is over, and of all; None for numbers that are no means.
    """
    known = [count for count in counts if count]
    if all(some == of for some, of in known):
        return ""
    return " and ".join(dict.fromkeys(f"{some} of {of}" for some, of in known))


def in_unit(value: float, unit: str) -> float:
    """Return a number of summary.json in the unit in which it is shown: `%` multiplies by 100."""
    return float(value) * (100 if unit == "%" else 1)
