"""Collect the results of a study's finished cells, and the paper's numbers to compare them with, for tables."""

import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.alike import require_alike
from experiments.finished import Finished, fewer_text, in_unit
from experiments.study import Cell, Place, Study
from experiments.study_axes import Expected, Line
from experiments.study_folder import StudyManifest, seeds_in
from experiments.units import best_of
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.packages.code_version import code_versions
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.core.tasks import REGRESSION
from hyperfl_flwr.metrics.intervals import Interval
from hyperfl_flwr.results.differences import Scores, interval_over_clients
from hyperfl_flwr.results.same_clients import Division
from hyperfl_flwr.runs.failures import has_diverged
from hyperfl_flwr.runs.run_directory import read_manifest
from hyperfl_flwr.runs.summary import NOT_KNOWN, OF_SINGLE_CLIENTS
from hyperfl_flwr.runs.target_accuracy import PLAIN, counts_rounds

FAILED = "failed"

OUT_OF_DATE = "out of date"
"""Text in the place of numbers of which all records are stale, see `experiments.records.stale_cells`."""

NOT_REACHED = "not reached"
"""Beginning of the text in the place of a number of rounds to a target accuracy that not all seeds have reached."""

NOT_MEASURED = "not measured"
"""Text in the place of a number that a row's runs do not have, but another row's."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The contents of a table's cell for one row and column.

    Attributes:
        values: Our numbers, one per seed, in the study's unit.
        paper: The paper's number; None if it reports none.
        missing: Reason why there are no numbers of ours, or none of some seeds; empty if there are all.
        is_best: Whether the mean is the best of the rows that a grid has made from one row, see `best_of`.
        error: Standard error of a single seed's number; NaN if the study reports none.
        scores: The numbers of single clients by seed and client, in the study's unit; empty if they are not known.
        no_scores: Reason why `scores` is empty, if there are runs.
        divisions: What determines the clients and their test data, one per run.
        fewer: Over how many clients the means are, see `fewer_text`; empty if each is over all clients of its run.
    """

    values: Sequence[float]
    paper: Expected | None
    missing: str
    is_best: bool = False
    error: float = float("nan")
    scores: Scores = field(default_factory=dict)
    no_scores: str = ""
    divisions: Sequence[Division] = ()
    fewer: str = ""

    @property
    def mean(self) -> float:
        """Mean over the seeds; NaN if there are none."""
        return statistics.fmean(self.values) if self.values else float("nan")

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds (n - 1); NaN with fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else float("nan")

    @property
    def spread(self) -> float:
        """Number after the plus-minus sign: the deviation over seeds, or a single seed's standard error, or NaN."""
        return self.deviation if len(self.values) > 1 else self.error

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval over clients of the mean; `deviation` is about seeds.

        None if it is not known, also of one of the seeds: it would not be the interval of this mean.
        """
        if not self.scores or len({seed for seed, _ in self.scores}) < len(self.values):
            return None
        return interval_over_clients(self.scores)


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The results of a study's finished cells.

    Attributes:
        study: The study.
        study_manifest: The settings that its folder was created with.
        entries: Entries by (row, column).
        commits: Versions of the code that ran the cells, see `code_versions`.
        rounds: Numbers of rounds of the runs.
    """

    study: Study
    study_manifest: StudyManifest
    entries: Mapping[tuple[str, str], Entry]
    commits: Sequence[str]
    rounds: Sequence[int]


def collect(
    study: Study, study_manifest: StudyManifest, folder: Path, *, mix: bool = False, stale: Collection[Place] = ()
) -> Collected:
    """Read the finished cells of a study's folder.

    Args:
        study: The study; see `with_metric` for another metric than its default.
        study_manifest: The settings that the folder was created with.
        folder: The study's folder.
        mix: Whether to accept cells of other settings than the study's, or that `require_alike` refuses otherwise.
        stale: Cells of which the record is out of date.

    Raises:
        RunDirectoryError: If there are no finished cells, they must not be mixed, or none has the study's number.
    """
    runs: dict[tuple[str, str], list[Finished]] = {}
    commits: set[str] = set()
    rounds: set[int] = set()
    results: list[Cell] = []
    reasons: dict[tuple[str, str], str] = {}
    seeds = max(seeds_in(folder), *(seed + 1 for _, _, seed in stale), 0)
    for cell in study.cells(quick=study_manifest.quick, seeds=seeds, changes=study_manifest.changes):
        path = cell.folder(folder)
        if not (path / "manifest.json").is_file():
            if cell.place in stale:
                reasons[cell.row, cell.column] = OUT_OF_DATE
            continue
        manifest = read_manifest(path)
        if not (path / "summary.json").is_file():
            if manifest["status"] == "failed":
                reasons[cell.row, cell.column] = FAILED
            if has_diverged(manifest):
                results.append(cell)
                commits.update(code_versions(manifest))
            continue
        results.append(cell)
        commits.update(code_versions(manifest))
        runs.setdefault((cell.row, cell.column), []).append(Finished.read(cell.seed, path, manifest))
        rounds.add(int(runs[cell.row, cell.column][-1].summary.get("rounds", cell.config.num_rounds)))
    if not results:
        raise RunDirectoryError(f"{folder} holds no finished cell; run `hyperfl study {study.name}`")
    if not mix:
        require_alike(results, folder)
    return Collected(
        study=study,
        study_manifest=study_manifest,
        entries=_entries(study, runs, reasons),
        commits=sorted(commits),
        rounds=sorted(rounds),
    )


def _entries(
    study: Study, runs: Mapping[tuple[str, str], Sequence[Finished]], reasons: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], Entry]:
    """Return the table's entries from the runs of each row and column, one per seed."""
    pairs = list(itertools.product(study.rows, study.columns))
    numbers = {
        (row.name, column.name): _numbers(study, row, column, runs.get((row.run, column.run), ()))
        for row, column in pairs
    }
    values = {pair: found for pair, (found, _) in numbers.items() if found}
    whole = _whole(study, values, reasons)
    best, paper, entries = _best(study, whole), study.paper, {}
    for row, column in pairs:
        pair, metric, unit = (row.name, column.name), study.metric_of(row, column), study.unit_in(column)
        of_pair = runs.get((row.run, column.run), ())
        found, reason = numbers[pair]
        entries[pair] = Entry(
            values=found,
            paper=paper.get(pair),
            missing=row.why_missing(column) or reasons.get((row.run, column.run), "") or ("" if found else reason),
            is_best=pair in best,
            error=_error(metric, unit, of_pair) if study.standard_error and len(found) == 1 else float("nan"),
            scores={place: score for run in of_pair for place, score in run.scores(metric, unit).items()},
            no_scores=of_pair[0].no_scores(metric) if of_pair else "",
            divisions=[run.division for run in of_pair],
            fewer=fewer_text([run.num_clients(metric) for run in of_pair]),
        )
    if runs and not values and all(reason in ("", NOT_MEASURED) for _, reason in numbers.values()):
        _refuse_unknown(study, [run.summary for several in runs.values() for run in several])
    return entries


def _whole(
    study: Study, values: Mapping[tuple[str, str], Sequence[float]], reasons: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], Sequence[float]]:
    """Return the values of the pairs that have as many seeds as the others of their grid: a mean over fewer is another.

    Pairs of which a seed has failed are left out.
    """
    family = {row.name: row.family for row in study.rows}
    most = Counter[tuple[str, str]]()
    for (row, column), found in values.items():
        most[family[row], column] = max(most[family[row], column], len(found))
    return {
        (row, column): found
        for (row, column), found in values.items()
        if reasons.get((row, column)) != FAILED and len(found) == most[family[row], column]
    }


def _numbers(study: Study, row: Line, column: Line, runs: Sequence[Finished]) -> tuple[list[float], str]:
    """Return the numbers of a row's runs in a column, in its unit, and the text in their place if there are none.

    Raises:
        RunDirectoryError: If what the row shows is no number.
    """
    metric, unit = study.metric_of(row, column), study.unit_in(column)
    found = [run.summary.get(metric) for run in runs]
    known = [value for value in found if value is not None]
    with_target = [run for run in runs if run.targets and metric in run.summary]
    if len(highest := {run.targets[-1] for run in with_target}) > 1 and metric in PLAIN:
        texts = " and ".join(f"{target:g}" for target in sorted(highest))
        raise RunDirectoryError(
            f"the seeds of {row.name}, {column.name} have different targets, {texts}; name one, as in "
            f"rounds_to_target_{min(highest)}"
        )
    if late := sum(run.summary[metric] is None for run in with_target) if counts_rounds(metric) else 0:
        # A mean over the seeds that have reached the target would be too small.
        return [], f"{NOT_REACHED} ({late} of {len(found)})"
    if wrong := [value for value in known if isinstance(value, bool) or not isinstance(value, int | float)]:
        raise RunDirectoryError(f"{metric} of {row.name}, {column.name} is no number: {str(wrong[0])[:40]!r}")
    of_single_clients = metric.replace(REGRESSION.score, "accuracy") in OF_SINGLE_CLIENTS
    if of_single_clients and any(run.has_secure_sums for run in runs):
        return [in_unit(value, unit) for value in known], NOT_KNOWN
    is_shown_only = (row.run, column.run) != (row.name, column.name)  # the runs need not have the number
    return [in_unit(value, unit) for value in known], "" if is_shown_only or not runs else NOT_MEASURED


def _error(metric: str, unit: str, runs: Sequence[Finished]) -> float:
    """Return the standard error of the number that only one of some runs has."""
    return next(run.error(metric, unit) for run in runs if run.summary.get(metric) is not None)


def _refuse_unknown(study: Study, summaries: Sequence[Mapping[str, Any]]) -> None:
    """Raise a RunDirectoryError for a number that no run has."""
    wanted = {study.metric_of(row, column) for row in study.rows for column in study.columns}
    known = sorted({name for summary in summaries for name, value in summary.items() if isinstance(value, int | float)})
    names = ", ".join(sorted(wanted))
    if all(map(counts_rounds, wanted)) and not any(map(counts_rounds, known)):
        raise RunDirectoryError(f"no run has the metric {names}; run the study with target-accuracy")
    raise RunDirectoryError(
        f"no run has the metric {names}; the keys of summary.json are {', '.join(known)}{nearest(names, known)}"
    )


def _best(study: Study, values: Mapping[tuple[str, str], Sequence[float]]) -> set[tuple[str, str]]:
    """Return the pairs with the best mean, for each column and each expanded row; all that have it, if several do."""
    means = {pair: statistics.fmean(numbers) for pair, numbers in values.items()}
    best = set()
    for column in study.columns:
        for family in {row.family for row in study.rows if row.family != row.name}:
            rows = [row for row in study.rows if row.family == family]
            choose = best_of(study.metric_of(rows[0], column))
            found = [means[row.name, column.name] for row in rows if (row.name, column.name) in means]
            if choose and found:
                chosen = choose(found)
                best |= {(row.name, column.name) for row in rows if means.get((row.name, column.name)) == chosen}
    return best
