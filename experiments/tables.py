"""Tables of a study's finished cells, the paper's number beside ours; nothing is trained here."""

import csv
import io
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.cells import Begun, differences, seeds_in
from experiments.studies import Cell, Expected, Study
from hyperfl_flwr.errors import RunDirectoryError
from hyperfl_flwr.recording import read_manifest

NOTHING = "–"
FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a table says of a row and a column.

    Attributes:
        values: Our numbers, one per seed, in the study's unit.
        paper: The paper's number, if it has one.
        missing: Why there is none of ours.
        is_best: Whether it is the highest of the rows that a grid made of one.
    """

    values: Sequence[float]
    paper: Expected | None
    missing: str
    is_best: bool = False

    @property
    def mean(self) -> float:
        """Mean over the seeds; NaN without any."""
        return statistics.fmean(self.values) if self.values else float("nan")

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds (n - 1); NaN with fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else float("nan")


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A study's finished cells.

    Attributes:
        study: The study.
        begun: What its folder was begun with.
        entries: By (row, column).
        commits: Of the code that made them.
        rounds: Of the runs.
    """

    study: Study
    begun: Begun
    entries: Mapping[tuple[str, str], Entry]
    commits: Sequence[str]
    rounds: Sequence[int]


def collect(study: Study, begun: Begun, folder: Path, *, mix: bool = False) -> Collected:
    """Read the finished cells of a study's folder.

    Args:
        study: The study; see `showing` for another number than its own.
        begun: What the folder was begun with.
        folder: The study's.
        mix: Accept cells of different commits, and cells whose settings are not the study's.

    Raises:
        RunDirectoryError: If there are none, or they must not be mixed.
    """
    metrics = {column.name: column.metric or study.metric for column in study.columns}
    values: dict[tuple[str, str], list[float]] = {}
    commits: set[str] = set()
    rounds: set[int] = set()
    problems: list[str] = []
    failed: dict[tuple[str, str], str] = {}
    for cell in study.cells(quick=begun.quick, seeds=seeds_in(folder), changes=begun.changes):
        path = cell.folder(folder)
        if not (path / "manifest.json").is_file():
            continue
        manifest = read_manifest(path)
        if not (path / "summary.json").is_file():
            if manifest["status"] == "failed":
                failed[cell.row, cell.column] = FAILED
            continue
        problems += [f"{cell}: {text}" for text in differences(cell, manifest)]
        commits.update(map(_commit, [manifest["code"], *(each["code"] for each in manifest["resumed"])]))
        summary = json.loads((path / "summary.json").read_text())
        values.setdefault((cell.row, cell.column), []).append(_value(metrics[cell.column], cell, summary))
        rounds.add(cell.config.num_rounds)
    if not values:
        raise RunDirectoryError(f"{folder} holds no finished cell; run `hyperfl study {study.name}`")
    if len(commits) > 1:
        problems.append(f"the cells are of {len(commits)} commits: {', '.join(sorted(commits))}")
    if problems and not mix:
        raise RunDirectoryError("\n  - ".join(["cells do not belong together; accept it with --mix:", *problems]))
    best, paper = _best(study, values), study.paper
    return Collected(
        study=study,
        begun=begun,
        entries={
            (row.name, column.name): Entry(
                values=values.get((row.name, column.name), ()),
                paper=paper.get((row.name, column.name)),
                missing=row.missing or column.missing or failed.get((row.name, column.name), ""),
                is_best=(row.name, column.name) in best,
            )
            for row in study.rows
            for column in study.columns
        },
        commits=sorted(commits),
        rounds=sorted(rounds),
    )


def _best(study: Study, values: Mapping[tuple[str, str], Sequence[float]]) -> set[tuple[str, str]]:
    """Return, for each row that a grid was made of and each column, the pair with the highest mean."""
    means = {pair: statistics.fmean(each) for pair, each in values.items()}
    best = set()
    for column in study.columns:
        for family in {row.family for row in study.rows if row.family != row.name}:
            pairs = [(row.name, column.name) for row in study.rows if row.family == family]
            if done := [pair for pair in pairs if pair in means]:
                best.add(max(done, key=lambda pair: means[pair]))
    return best


def _value(metric: str, cell: Cell, summary: Mapping[str, Any]) -> float:
    value = summary.get(metric)
    if value is None:
        raise RunDirectoryError(f"the run of {cell} has no {metric}")
    return float(value) * (100 if unit_of(metric) == "%" else 1)


def unit_of(metric: str) -> str:
    """Return the unit in which a number of summary.json is shown."""
    if "accuracy" in metric or metric == "labels_found":
        return "%"
    if "bytes" in metric:
        return "bytes"
    return "dB" if "psnr" in metric else "s" if "seconds" in metric else ""


def showing(study: Study, metric: str) -> Study:
    """Return a study whose tables show another number of its cells."""
    columns = [replace(column, metric="") for column in study.columns]
    return replace(study, metric=metric, unit=unit_of(metric), columns=columns)


def markdown(collected: Collected) -> str:
    """Return a Markdown page: ours as mean ± standard deviation (n), the paper's number after a slash."""
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
    """Return a line for each row and column: our mean, standard deviation and n, the paper's number and its source."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["row", "column", "metric", "unit", "mean", "std", "n", "paper", "source", "missing"])
    for (row, column), entry in collected.entries.items():
        ours = [_digits(entry.mean) if entry.values else "", _digits(entry.deviation) if len(entry.values) > 1 else ""]
        paper = [_digits(entry.paper.value), entry.paper.source] if entry.paper else ["", ""]
        study = collected.study
        writer.writerow([row, column, study.metric, study.unit, *ours, len(entry.values), *paper, entry.missing])
    return stream.getvalue()


def _digits(value: float) -> str:
    """Return a number with six digits, a whole one with all."""
    return f"{value:.15g}" if value.is_integer() else f"{value:.6g}"


def write_tables(collected: Collected, folder: Path) -> list[Path]:
    """Write table.md, table.csv and table.tex to a folder; returns their paths."""
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
        "ours as mean ± standard deviation (number of seeds)",
        f"after {' and '.join(map(str, collected.rounds))} rounds",
    ]
    if any(entry.is_best for entry in collected.entries.values()):
        parts.append("the best of each grid in bold")
    if sources:
        parts.append(f"after the slash {study.beside} ({'; '.join(sources)})")
    if collected.begun.quick:
        parts.append("QUICK settings, which say nothing about the methods")
    if collected.begun.changes:
        parts.append("with " + ", ".join(f"{key} = {value}" for key, value in collected.begun.changes.items()))
    return "; ".join([*parts, f"commit {', '.join(collected.commits)}"]) + "."


def _headings(collected: Collected) -> list[str]:
    study = collected.study
    own = {column.name: f" ({unit_of(column.metric)})" if column.metric else "" for column in study.columns}
    return [study.heading(column, quick=collected.begun.quick) + own[column.name] for column in study.columns]


def _commit(code: Mapping[str, Any]) -> str:
    """Return the commit that a manifest tells, short, with a mark of uncommitted changes."""
    return str(code["commit"] or "unknown")[:12] + ("-dirty" if code["dirty"] else "")


def _is_shown(collected: Collected, row: str) -> bool:
    """Say whether a row has a number of ours or of the paper's, or was tried in vain."""
    entries = [entry for (name, _), entry in collected.entries.items() if name == row]
    return any(entry.values or entry.paper or entry.missing == FAILED for entry in entries)


def _cells(collected: Collected, row: str) -> list[str]:
    study = collected.study
    units = [unit_of(column.metric) if column.metric else study.unit for column in study.columns]
    entries = [collected.entries[row, column.name] for column in study.columns]
    return [_cell(entry, unit) for entry, unit in zip(entries, units, strict=True)]


def _cell(entry: Entry, unit: str) -> str:
    ours = entry.missing or NOTHING
    if entry.values:
        spread = f" ± {_number(entry.deviation, unit, 1)}" if len(entry.values) > 1 else ""
        ours = f"{_number(entry.mean, unit, 1 if abs(entry.mean) >= 2 else 2)}{spread} ({len(entry.values)})"
        ours = f"**{ours}**" if entry.is_best else ours
    return f"{ours} / {_number(entry.paper.value, unit, 2)}" if entry.paper else ours


def _number(value: float, unit: str, digits: int) -> str:
    return f"{value:,.0f}" if unit == "bytes" else f"{value:.{digits}f}"


def _latex_cell(text: str) -> str:
    bold = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", _escaped(text))
    return bold.replace("±", r"$\pm$").replace(NOTHING, "--")


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "&%$#_{}" else letter for letter in text)
