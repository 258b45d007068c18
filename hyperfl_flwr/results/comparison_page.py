"""Render a comparison of runs: rows of text for tables, and the HTML page."""

from pathlib import Path

from hyperfl_flwr.metrics.intervals import CONFIDENCE
from hyperfl_flwr.pages.figures import captioned
from hyperfl_flwr.pages.render import NOTHING, counted, plain, write_page
from hyperfl_flwr.results.compare import Comparison, Run
from hyperfl_flwr.results.differences import Difference, Spread
from hyperfl_flwr.runs.plots import comparison_panels
from hyperfl_flwr.runs.summary import SCORES

ROW_HEADERS = (
    "", "runs", "personalized %", "aggregate %", "worst client %", "MB up", "MB down", "s/round", "difference",
    "better/worse",
)  # fmt: skip
"""Headers of `rows_of`: bytes are a client's in a round, differences those of personalized accuracy in points."""

SCORE_HEADERS = (
    "", "balanced accuracy %", "macro F1 %", "AUC %", "aggregate: balanced accuracy %", "macro F1 %", "AUC %",
    "most common class %",
)  # fmt: skip
"""Headers of `score_rows`; the first three numbers are those of the personalized models."""

MOST_NAMED = 3
"""Largest number of groups that the page's title names."""


def rows_of(found: Comparison) -> list[tuple[str, ...]]:
    """Return a row of text for each group; see `ROW_HEADERS`."""
    rows = []
    for group in found.groups:
        numbers = group.numbers
        up, down = (numbers[f"bytes_{way}_per_client_round"].mean for way in ("up", "down"))
        is_reference = group is found.reference
        rows.append(
            (
                group.label,
                str(len(group.runs)),
                *(_percent(numbers[f"test_accuracy{part}"]) for part in ("", "_aggregate", "_worst")),
                *(NOTHING if size is None else f"{size / 1e6:.2f}" for size in (up, down)),
                f"{numbers['seconds_per_round'].mean or 0.0:.2f}",
                "reference" if is_reference else _points(group.difference),
                "" if is_reference else _counts(group.difference),
            )
        )
    return rows


def score_rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return a row for each group; see `SCORE_HEADERS`."""
    names = [
        *(f"test_{name}" for name in SCORES),
        *(f"test_{name}_aggregate" for name in SCORES),
        "test_majority_share",
    ]
    return [(group.label, *(_percent(group.numbers[name]) for name in names)) for group in found.groups]


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
        headers=ROW_HEADERS,
        rows=rows_of(found),
        score_headers=SCORE_HEADERS,
        scores=score_rows(found),
        confidence=f"{100 * CONFIDENCE:.0f} %",
        settings=settings_rows(found),
        figures=captioned(figures),
        runs=[
            (group.label, str(run.path), plain(run.settings["seed"]), run.manifest["start"], run.manifest["status"])
            for group in found.groups
            for run in group.runs
        ],
    )
    return file


def _data(run: Run) -> str:
    return f"{run.summary['dataset']}, {counted(run.summary['num_clients'], 'client')}"


def _percent(spread: Spread) -> str:
    if spread.mean is None:
        return NOTHING
    deviation = "" if spread.deviation is None else f" ± {100 * spread.deviation:.1f}"
    return f"{100 * spread.mean:.1f}{deviation}"


def _points(difference: Difference | None) -> str:
    if difference is None:
        return NOTHING
    if difference.low is None or difference.high is None:
        return f"{100 * difference.mean:+.1f}"
    return f"{100 * difference.mean:+.1f} ({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"


def _counts(difference: Difference | None) -> str:
    return NOTHING if difference is None else f"{difference.better}/{difference.worse} of {difference.clients}"
