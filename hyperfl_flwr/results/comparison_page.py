"""Render a comparison of runs: rows of text for tables, and the HTML page."""

from pathlib import Path

from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.tasks import CLASSIFICATION, REGRESSION, Task
from hyperfl_flwr.metrics.intervals import CONFIDENCE
from hyperfl_flwr.pages.figures import captioned
from hyperfl_flwr.pages.render import NOTHING, moment, plain, write_page
from hyperfl_flwr.results.compare import Comparison
from hyperfl_flwr.results.compared_runs import Run
from hyperfl_flwr.results.differences import Difference, Spread
from hyperfl_flwr.runs.figures.plots import comparison_panels

MOST_NAMED = 3
"""Largest number of groups that the page's title names."""


def row_headers(task: Task) -> tuple[str, ...]:
    """Return the headers of `rows_of`: bytes are a client's in a round, differences those of personalized scores."""
    unit = "%" if task.has_shares else task.score_title
    kinds = (f"{kind} {unit}" for kind in ("personalized", "aggregate", "worst client"))
    return "", "runs", *kinds, "MB up", "MB down", "s/round", "difference", "better/worse"


def score_headers(task: Task) -> tuple[str, ...]:
    """Return the headers of `score_rows`; the first numbers are those of the personalized models."""
    unit = " %" if task.has_shares else ""
    names = [title.partition(" (")[0] + unit for title in task.score_titles]
    usual = {CLASSIFICATION: ["most common class %"], REGRESSION: []}.get(task, ["most common values %"])
    return "", *names, f"aggregate: {names[0]}", *names[1:], *usual


def rows_of(found: Comparison) -> list[tuple[str, ...]]:
    """Return a row of text for each group; see `row_headers`."""
    rows, task = [], found.task
    for group in found.groups:
        numbers = group.numbers
        up, down = (numbers[f"bytes_{way}_per_client_round"].mean for way in ("up", "down"))
        is_reference = group.label in found.references
        rows.append(
            (
                group.label,
                str(len(group.runs)),
                *(_value(numbers[task.key(f"test_accuracy{part}")], task) for part in ("", "_aggregate", "_worst")),
                *(NOTHING if size is None else f"{size / 1e6:.2f}" for size in (up, down)),
                f"{numbers['seconds_per_round'].mean or 0.0:.2f}",
                "reference" if is_reference else _points(group.difference, task),
                "" if is_reference else _counts(group.difference),
            )
        )
    return rows


def score_rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return a row for each group; see `score_headers`."""
    task = found.task
    names = [
        *(f"test_{name}" for name in task.all_scores),
        *(f"test_{name}_aggregate" for name in task.all_scores),
        *(("test_majority_share",) if task.has_shares else ()),
    ]
    return [(group.label, *(_value(group.numbers[name], task) for name in names)) for group in found.groups]


def settings_rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return a row for each setting that differs between the groups: its name, and its value in each group."""
    return [(key, *map(plain, values)) for key, values in found.differing.items()]


def write_comparison(found: Comparison, file: Path) -> Path:
    """Write a comparison as one HTML page, and return its path."""
    labels, runs = [group.label for group in found.groups], [run for group in found.groups for run in group.runs]
    figures = comparison_panels({group.label: [run.path for run in group.runs] for group in found.groups})
    write_page(
        file,
        "comparison.html",
        found=found,
        title=" and ".join(labels) if len(labels) <= MOST_NAMED else f"{len(labels)} settings compared",
        data="; ".join(dict.fromkeys(map(_data, runs))),
        headers=row_headers(found.task),
        rows=rows_of(found),
        score_headers=score_headers(found.task),
        scores=score_rows(found),
        confidence=f"{100 * CONFIDENCE:.0f} %",
        settings=settings_rows(found),
        figures=captioned(figures),
        runs=[
            (
                group.label,
                str(run.path),
                plain(run.settings["seed"]),
                moment(run.manifest["start"]),
                run.manifest["status"],
            )
            for group in found.groups
            for run in group.runs
        ],
    )
    return file


def _data(run: Run) -> str:
    return f"{run.summary['dataset']}, {counted(run.summary['num_clients'], 'client')}"


def _value(spread: Spread, task: Task) -> str:
    if spread.mean is None:
        return NOTHING
    values = [spread.mean, *([] if spread.deviation is None else [spread.deviation])]
    return " ± ".join(f"{100 * value:.1f}" if task.has_shares else f"{value:.3f}" for value in values)


def _points(difference: Difference | None, task: Task) -> str:
    if difference is None:
        return NOTHING
    mean = task.difference(difference.mean)
    if difference.low is None or difference.high is None:
        return mean
    return f"{mean} ({task.difference(difference.low)} to {task.difference(difference.high)})"


def _counts(difference: Difference | None) -> str:
    return NOTHING if difference is None else f"{difference.better}/{difference.worse} of {difference.clients}"
