"""Tables and figures of the documentation, from the records of studies."""

import hashlib
import json
import statistics
import tempfile
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from experiments.collect import collect
from experiments.figures.curves import draw
from experiments.number_formats import Format, in_percent
from experiments.paired import pair
from experiments.records import Records, find_records, read_records, restore, stale_cells
from experiments.study import Place, Study, load_study
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.results.differences import Difference
from scripts.page_numbers import (
    NOT_RUN,
    OUT_OF_DATE,
    fewer_seeds,
    fewer_than_all,
    nothing_text,
    numbers_of,
    source_of,
    value_of,
)

TITLE_WIDTH = 80
"""Number of characters in a line of a figure's title."""


class Generated(Protocol):
    """Something that a page shows between marks."""

    def lines(self) -> list[str]:
        """Return it in Markdown."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of one column of a study, with a line for each row that has records.

    Attributes:
        records: Name of the file of records.
        column: The study's column.
        numbers: For each heading the number's place and its format. A place is a key of summary.json, or two with a dot
            for one inside another one, `settings:KEY`, `interval:KEY` for a number with its 95 % interval,
            `round:N:KEY` for one of metrics.jsonl after round N, or `clients:0,3:KEY` for the mean over some clients.
        rows: The study's rows that are shown, with that of `against`; empty for all.
        against: Row that the others are compared with: a further number is the mean difference in the accuracy after
            local training, of the same clients with the same seeds, with its 95 % interval. Empty for none.
        papers: For each heading of the last numbers, a paper's, the study's column that they are of.
    """

    records: str
    column: str
    numbers: Mapping[str, tuple[str, Format]]
    rows: Sequence[str] = ()
    against: str = ""
    papers: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the table in Markdown, and a line on where its numbers come from."""
        records = read_records(find_records(self.records)).only(self.rows, [self.column])
        study = load_study(records.study_manifest.study)
        stale = stale_cells(study, records)
        labels = {row.name: row.label for row in study.rows}
        differences = _differences(study, records, self.against) if self.against else {}
        against = [f"against {labels[self.against]}, points"] if self.against else []
        headings = [*self.numbers, *against, *self.papers]
        lines = ["| | " + " | ".join(headings) + " |", "|---|" + "---:|" * len(headings)]
        shown = []
        seeds = {seed for *_, seed in records.cells}
        for row in study.rows:
            cells = [place for place in records.cells if place[0] == row.name]
            if not cells:
                continue
            mark = fewer_seeds(cells, seeds) + (OUT_OF_DATE if any(place in stale for place in cells) else "")
            values = [value_of(records, cells, key, text) for key, text in self.numbers.values()]
            if self.against:
                values.append(differences[row.name, self.column])
            papers = [study.paper.get((row.name, column)) for column in self.papers.values()]
            values += ["" if found is None else f"{found.value:.2f}" for found in papers]
            lines.append(f"| {row.label}{mark} | {' | '.join(values)} |")
            shown += cells
        return [*lines, "", _source(self, study, records, shown)]


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """A table of one row of a study, with a line for each column that has records of it.

    Attributes:
        records: Name of the file of records.
        row: The study's row.
        numbers: As those of a `Table`.
        against: As that of a `Table`; of the row itself it is no number.
    """

    records: str
    row: str
    numbers: Mapping[str, tuple[str, Format]]
    against: str

    def lines(self) -> list[str]:
        """Return the table in Markdown, and a line on where its numbers come from."""
        records = read_records(find_records(self.records)).only([self.row, self.against], [])
        study = load_study(records.study_manifest.study)
        stale = stale_cells(study, records)
        label = next(row.label for row in study.rows if row.name == self.against)
        is_other = self.row != self.against
        differences = _differences(study, records, self.against) if is_other else {}
        headings = ["seeds", *self.numbers, *([f"against {label}, points"] if is_other else [])]
        lines = ["| | " + " | ".join(headings) + " |", "|---|" + "---:|" * len(headings)]
        shown = []
        for column in study.columns:
            cells = [place for place in records.cells if place[:2] == (self.row, column.name)]
            if not cells:
                continue
            mark = OUT_OF_DATE if any(place in stale for place in cells) else ""
            values = [str(len(cells)), *(value_of(records, cells, key, text) for key, text in self.numbers.values())]
            values += [differences[self.row, column.name]] if is_other else []
            lines.append(f"| {column.label}{mark} | {' | '.join(values)} |")
            shown += cells
        return [*lines, "", source_of(records, shown, f"hyperfl study {study.name} --rows {self.row}")]


@dataclass(frozen=True, kw_only=True)
class GridTable:
    """A table of one column of a study with a grid: a line for each row, a number for each of the grid's values.

    Shown are rows and values with records. The best numbers of a line are bold, of those that are over all clients and
    seeds; a second number is in brackets, and a dash stands for a run without a record.

    Attributes:
        records: Name of the file of records.
        column: The study's column.
        setting: The setting of the grid.
        number: Key of summary.json; the largest is the best.
        second: Key of the number in brackets.
        text: Format of both numbers.
        rows: Rows that are shown, without the grid's values, in this order; empty for all.
    """

    records: str
    column: str
    setting: str
    number: str
    second: str
    text: Format = in_percent
    rows: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Return the table in Markdown, and a line on where its numbers come from."""
        records = read_records(find_records(self.records))
        study = load_study(records.study_manifest.study)
        named = [row.name for row in study.rows if not self.rows or row.family in self.rows]
        records = records.only(named, [self.column])
        stale = stale_cells(study, records)
        cells = {row.name: [place for place in records.cells if place[0] == row.name] for row in study.rows}
        recorded = [row for row in study.rows if cells[row.name]]
        values = sorted({row.settings[self.setting] for row in recorded}, key=lambda value: (str(type(value)), value))
        lines = [f"| | {' | '.join(map(str, values))} |", "|---|" + "---:|" * len(values)]
        for family in self.rows or dict.fromkeys(row.family for row in recorded):
            rows = [row for row in recorded if row.family == family]
            found = {row.settings[self.setting]: cells[row.name] for row in rows}
            label = rows[0].label.removesuffix(f", {self.setting} {rows[0].settings[self.setting]}")
            mark = OUT_OF_DATE if any(place in stale for places in found.values() for place in places) else ""
            lines.append(f"| {label}{mark} | {' | '.join(self._texts(records, values, found))} |")
        return [*lines, "", _source(self, study, records, [place for row in recorded for place in cells[row.name]])]

    def _texts(self, records: Records, values: Sequence[Scalar], found: Mapping[Scalar, Sequence[Place]]) -> list[str]:
        """Return a line's numbers, means over the seeds, in the order of the grid's values."""
        firsts, seconds = (
            {
                value: self.text(statistics.fmean(known))
                for value in found
                if (known := numbers_of(records, found[value], key))
            }
            for key in (self.number, self.second)
        )
        fewer = {
            value: fewer_than_all(
                records, found[value], self.number, len(numbers_of(records, found[value], self.number))
            )
            for value in firsts
        }
        best = max((first for value, first in firsts.items() if not fewer[value]), key=float, default="")
        shown = {
            value: f"**{first}**" if first == best and not fewer[value] else first for value, first in firsts.items()
        }
        texts = {value: f"{text} ({seconds[value]})" if value in seconds else text for value, text in shown.items()}
        nothing = {value: nothing_text(records, places) for value, places in found.items()} | dict.fromkeys(
            set(values) - set(found), NOT_RUN
        )
        return [texts[value] + fewer[value] if value in texts else nothing[value] for value in values]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A study's figure, as `hyperfl figure` draws it.

    Attributes:
        records: Name of the file of records.
        kind: The figure's name.
        rows, columns: Those of the study that are shown; empty for all.
    """

    records: str
    kind: str
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()

    def write(self, picture: Path) -> None:
        """Draw the figure and write it with the hash of its records; stale ones are drawn, too, and marked."""
        study, shown = self._shown()
        stale = stale_cells(study, shown)
        with tempfile.TemporaryDirectory() as folder:
            restore(study, shown, Path(folder), with_stale=True)
            marked = _marked(study, shown, stale)
            (drawn,) = draw(marked, shown.study_manifest, Path(folder), self.kind, mix=True)
            picture.write_bytes(drawn.read_bytes())
        picture.with_suffix(".sha256").write_text(self.fingerprint() + "\n")

    def fingerprint(self) -> str:
        """Return the hash of the records that the picture shows some of, and of which of these are stale."""
        stale = sorted(stale_cells(*self._shown()))
        marks = json.dumps(stale).encode() if stale else b""
        return hashlib.sha256(find_records(self.records).read_bytes() + marks).hexdigest()

    def _shown(self) -> tuple[Study, Records]:
        """Return the study, and those of its records that the picture shows."""
        records = read_records(find_records(self.records)).only(self.rows, self.columns)
        return load_study(records.study_manifest.study), records


def _marked(study: Study, records: Records, stale: Collection[Place]) -> Study:
    """Return the study with a mark in the labels of rows with stale records, and their labels in its title.

    Some figures have no labels of rows: only the title can say it there.
    """
    recorded, old = ({row for row, *_ in places} for places in (records.cells, stale))
    labels = [row.label for row in study.rows if row.name in old]
    if not labels:
        return study
    which = "all rows" if old == recorded and len(old) > 1 else "; ".join(labels)
    return replace(
        study,
        title=f"{study.title}\n{textwrap.fill(f'out of date: {which}', TITLE_WIDTH)}",
        rows=[replace(row, label=row.label + OUT_OF_DATE * (row.name in old)) for row in study.rows],
    )


def _differences(study: Study, records: Records, against: str) -> dict[tuple[str, str], str]:
    """Return the differences of `hyperfl table --against` by row and column, such as `-8.9 (-11.2 to -6.6)`."""
    with tempfile.TemporaryDirectory() as folder:
        restore(study, records, Path(folder), with_stale=True)
        collected = collect(study, records.study_manifest, Path(folder), mix=True)
    pairing = pair(collected, against)
    seeds = {
        name: len({seed for _, column, seed in records.cells if column == name}) for _, name in pairing.differences
    }
    return {
        (row, column): _difference(found, seeds[column]) or pairing.reasons[row, column] or "not known"
        for (row, column), found in pairing.differences.items()
    }


def _difference(found: Difference | None, seeds: int) -> str:
    """Return a difference with its interval, and over how many seeds it is if there are more; empty if it has none."""
    if found is None or found.low is None or found.high is None:
        return ""
    fewer = f", {counted(found.seeds, 'seed')}" if found.seeds < seeds else ""
    return f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f}{fewer})"


def _source(table: Table | GridTable, study: Study, records: Records, cells: Sequence[Place]) -> str:
    methods = f" --rows {','.join(table.rows)}" if table.rows else ""
    return source_of(records, cells, f"hyperfl study {study.name} --columns {table.column}{methods}")
