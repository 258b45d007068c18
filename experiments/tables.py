"""Render a study's results, or the differences between its rows, as tables in Markdown, CSV and LaTeX."""

import math
import re
from collections.abc import Collection
from dataclasses import replace

from experiments.collect import FAILED, NOT_MEASURED, NOT_REACHED, OUT_OF_DATE, Collected, Entry
from experiments.paired import Pairing
from experiments.study import Study
from experiments.study_axes import Line
from experiments.units import has_aggregate, shown_unit, unit_of
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.metrics.intervals import Interval
from hyperfl_flwr.runs.summary import NOT_KNOWN

NOTHING = "–"
"""Text of an entry without numbers."""

AGGREGATE = "_aggregate"
"""Ending of the numbers of the model as received."""

_KIND = re.compile(", (personalized|aggregate)$")
"""Which models' numbers a column shows, in the labels of `experiments.sweep`."""


def with_metric(study: Study, metric: str) -> Study:
    """Return a copy of a study with tables of another number of summary.json.

    A column of the model as received shows the same number of that model; of a number that is not of models it would
    repeat another column, and is left out. Labels that name the study's number name the other one.
    """
    aggregate, is_of_both = f"{study.metric}{AGGREGATE}", has_aggregate(metric)
    columns = []
    for column in study.columns:
        is_aggregate = column.metric == aggregate
        if is_aggregate and not is_of_both and column.run != column.name:
            continue
        label = metric if column.label == study.metric else column.label
        if not is_of_both:
            label = f"{label}, {metric}" if is_aggregate else _KIND.sub(f", {metric}", label)
        own = f"{metric}{AGGREGATE}" if is_aggregate and is_of_both else ""
        columns.append(replace(column, metric=own, label=label))
    return replace(study, metric=metric, unit=unit_of(metric), columns=columns)


def markdown(collected: Collected, pairing: Pairing | None = None) -> str:
    """Return the table as a Markdown page.

    Args:
        collected: The results.
        pairing: Differences between rows, which the cells then have. Without it a cell is our mean ± spread (n) [95 %
            interval], and the paper's number after a slash.
    """
    study = collected.study
    lines = [
        f"# {study.title}" + (f": differences from {pairing.reference.label}" if pairing else ""),
        "",
        _caption(collected, pairing),
        "",
        "| | " + " | ".join(_headings(collected, pairing)) + " |",
        "|---|" + "---:|" * len(study.columns),
    ]
    for row in _rows(collected, pairing):
        cells = _cells(collected, row.name, pairing)
        lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def latex(collected: Collected, pairing: Pairing | None = None) -> str:
    """Return the table, or that of the differences, as a LaTeX tabular for the package booktabs."""
    study = collected.study
    lines = [
        f"% {_caption(collected, pairing)}",
        r"\begin{tabular}{l" + "r" * len(study.columns) + "}",
        r"\toprule",
        " & ".join(["", *map(_escaped, _headings(collected, pairing))]) + r" \\",
        r"\midrule",
    ]
    for row in _rows(collected, pairing):
        texts = [_latex_cell(text) for text in _cells(collected, row.name, pairing)]
        lines.append(" & ".join([_escaped(row.label), *texts]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _caption(collected: Collected, pairing: Pairing | None) -> str:
    study = collected.study
    unit = shown_unit(study.unit, is_difference=pairing is not None)
    metric = f"{study.metric} in {unit}" if unit else study.metric
    rounds = [f"after {' and '.join(map(str, collected.rounds))} rounds"] if collected.rounds else []
    parts = (
        [metric, *rounds, *_paired_parts(pairing)] if pairing else [metric, _spread(study), *rounds, *_parts(collected)]
    )
    if any(
        division["data.validation-fraction"] for entry in collected.entries.values() for division in entry.divisions
    ):
        parts.append("on validation data in the place of test data (data.validation-fraction)")
    if collected.study_manifest.quick:
        parts.append("QUICK settings, which do not allow conclusions about the methods")
    if collected.study_manifest.changes:
        parts.append("with " + ", ".join(f"{key} = {value}" for key, value in collected.study_manifest.changes.items()))
    return "; ".join([*parts, f"commit {', '.join(collected.commits)}"]) + "."


def _parts(collected: Collected) -> list[str]:
    """Return what the caption says of intervals, bold numbers and the paper's."""
    entries, parts = collected.entries.values(), []
    if any(_shown_interval(collected, entry) for entry in entries):
        parts.append("in brackets the 95 % interval of the mean over clients")
    if any(entry.values and entry.fewer for entry in entries):
        parts.append("N of M clients where a mean is not over all clients of its runs")
    if any(entry.is_best for entry in entries):
        parts.append("the best of each grid in bold")
    if sources := sorted({entry.paper.source for entry in entries if entry.paper}):
        parts.append(f"after the slash {collected.study.reference} ({'; '.join(sources)})")
    return parts


def _paired_parts(pairing: Pairing) -> list[str]:
    parts = [f"mean difference from {pairing.reference.label} of the same clients with the same seeds"]
    if pairing.seeds:
        parts.append(f"in brackets its 95 % interval {_over(pairing.seeds)}")
    if any(pairing.differences.values()):
        parts.append("then the number of clients that are better and worse")
    return parts


def _over(seeds: Collection[int]) -> str:
    """Return what intervals are over, for the numbers of seeds of the cells."""
    several = sorted(number for number in seeds if number > 1)
    if not several:
        return "over the clients, with one seed: it does not cover other seeds"
    known = f"over clients and seeds ({' or '.join(map(str, several))})"
    return known + (", over the clients alone where there is one seed" if 1 in seeds else "")


def _shown_interval(collected: Collected, entry: Entry) -> Interval | None:
    """Return the interval that a cell shows: where a table compares rows by numbers of single clients."""
    return entry.interval if len(collected.study.rows) > 1 and entry.values else None


def _spread(study: Study) -> str:
    if study.standard_error:
        return (
            f"ours as mean ± standard error over the {study.standard_error} (one seed), or ± standard deviation over "
            "seeds (their number, if several)"
        )
    return "ours as mean ± standard deviation (number of seeds)"


def _headings(collected: Collected, pairing: Pairing | None) -> list[str]:
    study = collected.study
    own = {
        column.name: shown_unit(study.unit_in(column), is_difference=pairing is not None) if column.metric else ""
        for column in study.columns
    }
    return [
        study.heading(column, quick=collected.study_manifest.quick)
        + (f" ({unit})" if (unit := own[column.name]) else "")
        for column in study.columns
    ]


def _rows(collected: Collected, pairing: Pairing | None) -> list[Line]:
    """Return the rows that have something to show."""
    rows = collected.study.rows
    return [row for row in rows if (pairing.has(row.name) if pairing else _is_shown(collected, row.name))]


def _is_shown(collected: Collected, row: str) -> bool:
    """Return whether a row has numbers of ours or of the paper's, or runs without such a number."""
    entries = [entry for (name, _), entry in collected.entries.items() if name == row]
    reasons = (FAILED, NOT_KNOWN, NOT_MEASURED, NOT_REACHED, OUT_OF_DATE)
    return any(entry.values or entry.paper or entry.missing.startswith(reasons) for entry in entries)


def _cells(collected: Collected, row: str, pairing: Pairing | None) -> list[str]:
    study = collected.study
    units = {column.name: study.unit_in(column) for column in study.columns}
    if pairing:
        return [_paired_cell(pairing, row, column, unit) for column, unit in units.items()]
    entries = {column: collected.entries[row, column] for column in units}
    return [_cell(entry, _shown_interval(collected, entry), units[column]) for column, entry in entries.items()]


def _cell(entry: Entry, interval: Interval | None, unit: str) -> str:
    ours = entry.missing or NOTHING
    if entry.values:
        digits = 1 if abs(entry.mean) >= 2 else 2
        spread = "" if math.isnan(entry.spread) else f" ± {_number(entry.spread, unit, digits)}"
        others = f"; others {entry.missing}" if entry.missing else ""
        fewer = f"; {entry.fewer} clients" if entry.fewer else ""
        ours = f"{_number(entry.mean, unit, digits)}{spread} ({len(entry.values)}{others}{fewer})"
        ours += f" [{', '.join(_number(end, unit, digits) for end in interval)}]" if interval else ""
        ours = f"**{ours}**" if entry.is_best else ours
    if not entry.paper:
        return ours
    error = "" if entry.paper.error is None else f" ± {_number(entry.paper.error, unit, 2)}"
    return f"{ours} / {_number(entry.paper.value, unit, 2)}{error}"


def _paired_cell(pairing: Pairing, row: str, column: str, unit: str) -> str:
    found = pairing.differences[row, column]
    if found is None:
        return pairing.reasons[row, column] or NOTHING
    numbers = [value for value in (found.mean, found.low, found.high) if value is not None]
    mean, *ends = [f"{value:+.{1 if unit == '%' else 3}f}" for value in numbers]
    interval = f" [{', '.join(ends)}]" if ends else ""
    fewer = f" ({counted(found.seeds, 'seed')})" if found.seeds < max(pairing.seeds, default=1) else ""
    return f"{mean}{interval}{fewer}, {found.better}/{found.worse} of {found.clients}"


def _number(value: float, unit: str, digits: int) -> str:
    return f"{value:,.0f}" if unit == "bytes" else f"{value:.{digits}f}"


_SPECIAL = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
}  # fmt: skip
"""Characters with a meaning in LaTeX -> what prints them."""


def _latex_cell(text: str) -> str:
    bold = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", _escaped(text))
    return bold.replace("±", r"$\pm$").replace(NOTHING, "--")


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
