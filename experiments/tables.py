"""Render a study's results as tables in Markdown, CSV and LaTeX, with the paper's numbers."""

import csv
import io
import itertools
import math
import re
from pathlib import Path

from experiments.collect import FAILED, NOT_REACHED, Collected, Entry
from experiments.study import Study
from experiments.units import unit_of
from hyperfl_flwr.runs.summary import NOT_KNOWN

NOTHING = "–"
"""Text of an entry without numbers."""

COLUMNS = (
    "row", "column", "metric", "unit", "mean", "std", "sem", "n", "paper", "paper_sem", "source", "missing",
)  # fmt: skip
"""Columns of table.csv."""


def markdown(collected: Collected) -> str:
    """Return the table as a Markdown page: our mean ± spread (n), and the paper's number after a slash."""
    study = collected.study
    rows = [row for row in study.rows if _is_shown(collected, row.name)]
    lines = [
        f"# {study.title}",
        "",
        _caption(collected),
        "",
        "| | " + " | ".join(_headings(collected)) + " |",
        "|---|" + "---:|" * len(study.columns),
    ]
    for row in rows:
        cells = _cells(collected, row.name)
        lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def latex(collected: Collected) -> str:
    """Return the table as a LaTeX tabular for the package booktabs."""
    study = collected.study
    lines = [
        f"% {_caption(collected)}",
        r"\begin{tabular}{l" + "r" * len(study.columns) + "}",
        r"\toprule",
        " & ".join(["", *map(_escaped, _headings(collected))]) + r" \\",
        r"\midrule",
    ]
    for row in study.rows:
        if _is_shown(collected, row.name):
            cells = _cells(collected, row.name)
            texts = [_latex_cell(text) for text in cells]
            lines.append(" & ".join([_escaped(row.label), *texts]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def comma_separated(collected: Collected) -> str:
    """Return the table as CSV, one line per row and column: our mean, spread and n, the paper's number and source."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["row", "column", "metric", "unit", "mean", "std", "sem", "n", "paper", "paper_sem", "source", "missing"]
    )
    study = collected.study
    for row, column in itertools.product(study.rows, study.columns):
        entry, metric = collected.entries[row.name, column.name], study.metric_of(row, column)
        ours = [_digits(number) for number in (entry.mean, entry.deviation, entry.error)]
        paper = [_digits(entry.paper.value), _digits(entry.paper.error)] if entry.paper else ["", ""]
        source, unit = entry.paper.source if entry.paper else "", unit_of(metric) if column.metric else study.unit
        writer.writerow([row.name, column.name, metric, unit, *ours, len(entry.values), *paper, source, entry.missing])
    return stream.getvalue()


def _digits(value: float | None) -> str:
    """Return a number with six digits, or all digits of an integer; an empty text for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.15g}" if value.is_integer() else f"{value:.6g}"


def write_tables(collected: Collected, folder: Path) -> list[Path]:
    """Write table.md, table.csv and table.tex to a folder, and return their paths."""
    texts = {
        "table.md": markdown(collected), "table.csv": comma_separated(collected), "table.tex": latex(collected),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def _caption(collected: Collected) -> str:
    study = collected.study
    sources = sorted({entry.paper.source for entry in collected.entries.values() if entry.paper})
    parts = [
        f"{study.metric} in {study.unit}" if study.unit else study.metric,
        _spread(study),
        f"after {' and '.join(map(str, collected.rounds))} rounds",
    ]
    if any(entry.is_best for entry in collected.entries.values()):
        parts.append("the best of each grid in bold")
    if sources:
        parts.append(f"after the slash {study.reference} ({'; '.join(sources)})")
    if collected.study_manifest.quick:
        parts.append("QUICK settings, which do not allow conclusions about the methods")
    if collected.study_manifest.changes:
        parts.append("with " + ", ".join(f"{key} = {value}" for key, value in collected.study_manifest.changes.items()))
    return "; ".join([*parts, f"commit {', '.join(collected.commits)}"]) + "."


def _spread(study: Study) -> str:
    if study.standard_error:
        return (
            f"ours as mean ± standard error over the {study.standard_error} (one seed), or ± standard deviation over "
            "seeds (their number, if several)"
        )
    return "ours as mean ± standard deviation (number of seeds)"


def _headings(collected: Collected) -> list[str]:
    study = collected.study
    own = {column.name: unit_of(column.metric) if column.metric else "" for column in study.columns}
    return [
        study.heading(column, quick=collected.study_manifest.quick)
        + (f" ({unit})" if (unit := own[column.name]) else "")
        for column in study.columns
    ]


def _is_shown(collected: Collected, row: str) -> bool:
    """Return whether a row has numbers of ours or of the paper's, or runs without such a number."""
    entries = [entry for (name, _), entry in collected.entries.items() if name == row]
    reasons = (FAILED, NOT_KNOWN, NOT_REACHED)
    return any(entry.values or entry.paper or entry.missing.startswith(reasons) for entry in entries)


def _cells(collected: Collected, row: str) -> list[str]:
    study = collected.study
    units = [unit_of(column.metric) if column.metric else study.unit for column in study.columns]
    entries = [collected.entries[row, column.name] for column in study.columns]
    return [_cell(entry, unit) for entry, unit in zip(entries, units, strict=True)]


def _cell(entry: Entry, unit: str) -> str:
    ours = entry.missing or NOTHING
    if entry.values:
        spread = "" if math.isnan(entry.spread) else f" ± {_number(entry.spread, unit, 1)}"
        ours = f"{_number(entry.mean, unit, 1 if abs(entry.mean) >= 2 else 2)}{spread} ({len(entry.values)})"
        ours = f"**{ours}**" if entry.is_best else ours
    if not entry.paper:
        return ours
    error = "" if entry.paper.error is None else f" ± {_number(entry.paper.error, unit, 2)}"
    return f"{ours} / {_number(entry.paper.value, unit, 2)}{error}"


def _number(value: float, unit: str, digits: int) -> str:
    return f"{value:,.0f}" if unit == "bytes" else f"{value:.{digits}f}"


def _latex_cell(text: str) -> str:
    bold = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", _escaped(text))
    return bold.replace("±", r"$\pm$").replace(NOTHING, "--")


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "&%$#_{}" else letter for letter in text)
