"""Pair a study's rows with one of them: differences between the same clients with the same seeds.

Clients differ far more from each other than methods do, so that the intervals of two means overlap where one method is
better for almost every client. The interval of the paired differences does not contain what the clients differ in.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.collect import Collected, Entry
from experiments.study_axes import Line
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.results.differences import Difference, Scores
from hyperfl_flwr.results.same_clients import differing

NO_COMMON = "no client and seed in common"

REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """The differences of a study's rows from one of them.

    Attributes:
        reference: The row that the others are compared with.
        differences: Differences by (row, column), in the column's unit; None where there is none.
        reasons: Texts in the place of these, by (row, column); empty where nothing was run.
    """

    reference: Line
    differences: Mapping[tuple[str, str], Difference | None]
    reasons: Mapping[tuple[str, str], str]

    def has(self, row: str) -> bool:
        """Return whether a row has differences, or texts in the place of these."""
        return any(
            found is not None or self.reasons[place] for place, found in self.differences.items() if place[0] == row
        )

    @property
    def seeds(self) -> set[int]:
        """Numbers of seeds that the intervals are over; empty if there is no interval, as of a single client."""
        return {found.seeds for found in self.differences.values() if found is not None and found.low is not None}


def pair(collected: Collected, name: str) -> Pairing:
    """Return the differences of all rows from one of them.

    Args:
        collected: The results of a study's cells.
        name: Name of the row that the others are compared with.

    Raises:
        ConfigError: If the study has no such row.
        RunDirectoryError: If a row and that one do not have the same clients with the same test data in a column.
    """
    study = collected.study
    lines = {line.name: line for line in study.rows}
    if name not in lines:
        raise ConfigError(
            f"--against must be a row of the study, got {name!r}; known: {', '.join(lines)}{nearest(name, lines)}"
        )
    differences: dict[tuple[str, str], Difference | None] = {}
    reasons: dict[tuple[str, str], str] = {}
    for (row, column), entry in collected.entries.items():
        reference = collected.entries[name, column]
        place = row, column
        differences[place], reasons[place] = None, _reason(entry, reference, lines[name])
        if not reasons[place] and entry.scores and reference.scores:
            _require_same_clients(place, entry, name, reference)
            differences[place] = _difference(entry.scores, reference.scores)
            reasons[place] = "" if differences[place] else NO_COMMON
    return Pairing(reference=lines[name], differences=differences, reasons=reasons)


def _reason(entry: Entry, reference: Entry, line: Line) -> str:
    """Return why there is no difference; empty if there can be one, or the row has no run."""
    if not entry.values:
        return entry.missing
    if entry is reference:
        return REFERENCE
    if not reference.values:
        return f"{line.label}: {reference.missing}" if reference.missing else f"no run of {line.label}"
    return next((each.no_scores for each in (entry, reference) if not each.scores), "")


def _difference(ours: Scores, reference: Scores) -> Difference | None:
    """Return the difference over the seeds that both have."""
    seeds = {seed for seed, _ in ours} & {seed for seed, _ in reference}
    common = [{place: score for place, score in scores.items() if place[0] in seeds} for scores in (ours, reference)]
    return Difference.of(*common)


def _require_same_clients(place: tuple[str, str], entry: Entry, name: str, reference: Entry) -> None:
    """Raise a RunDirectoryError unless two entries divide the same data in the same way."""
    # All seeds have the same clients, too, unless runs with other settings were accepted.
    if found := differing([*entry.divisions, *reference.divisions]):
        row, column = place
        texts = [f"{key} {' and '.join(dict.fromkeys(map(repr, values)))}" for key, values in found.items()]
        raise RunDirectoryError(
            f"{row} and {name} do not have the same clients in the column {column}, which their differences need: "
            f"{'; '.join(texts)}; choose another row for --against"
        )
