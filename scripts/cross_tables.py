"""Tables of the documentation whose lines and columns are any rows, columns, seeds and numbers of a study."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.number_formats import Format, short
from experiments.records import Records, find_records, read_records, stale_cells
from experiments.study import Place, Study, load_study
from scripts.page_numbers import NOT_RUN, OUT_OF_DATE, source_of, value_of


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a line or a column of a table says about the cells that it shows; the other of the two says the rest.

    Attributes:
        row: Name of the study's row; empty if it is said elsewhere.
        column: Name of the study's column, likewise.
        seed: The seed; None for the mean over all seeds.
        numbers: Keys of summary.json, of which a slash separates the values, likewise.
        says: Returns the text of a single cell from its summary.json, likewise; in the place of `numbers`.
    """

    row: str = ""
    column: str = ""
    seed: int | None = None
    numbers: Sequence[str] = ()
    says: Callable[[Mapping[str, Any]], str] | None = None

    def with_rest(self, other: "Part") -> "Part":
        """Return this part with what only the other one says."""
        return Part(
            row=self.row or other.row,
            column=self.column or other.column,
            seed=other.seed if self.seed is None else self.seed,
            numbers=self.numbers or other.numbers,
            says=self.says or other.says,
        )


@dataclass(frozen=True, kw_only=True)
class CrossTable:
    """A table of several rows and columns of a study.

    Attributes:
        records: Name of the file of records.
        headings: What each column of the table shows.
        shown: What each of its lines shows.
        text: Format of the numbers.
        corner: Heading of the names of the lines.
    """

    records: str
    headings: Mapping[str, Part]
    shown: Mapping[str, Part]
    text: Format = short
    corner: str = ""

    def lines(self) -> list[str]:
        """Return the table in Markdown, and a line on where its numbers come from."""
        shown = [heading.with_rest(line) for line in self.shown.values() for heading in self.headings.values()]
        whole = read_records(find_records(self.records))
        records = whole.only({part.row for part in shown}, {part.column for part in shown})
        study = load_study(records.study_manifest.study)
        stale, known = stale_cells(study, records), set[Place]()
        lines = [f"| {self.corner} | {' | '.join(self.headings)} |", "|---|" + "---:|" * len(self.headings)]
        for label, line in self.shown.items():
            parts = [heading.with_rest(line) for heading in self.headings.values()]
            cells = [_cells(study, records, part) for part in parts]
            values = [self._value(records, *pair) for pair in zip(cells, parts, strict=True)]
            used = {place for places in cells for place in places}
            lines.append(f"| {label}{OUT_OF_DATE if used & set(stale) else ''} | {' | '.join(values)} |")
            known |= used
        return [*lines, "", source_of(records, known, self._command(study, known))]

    def _value(self, records: Records, cells: Sequence[Place], part: Part) -> str:
        if not cells:
            return NOT_RUN
        if part.says is not None:
            (place,) = cells
            return part.says(records.cells[place]["summary"])
        return " / ".join(value_of(records, cells, key, self.text) for key in part.numbers)

    def _command(self, study: Study, known: set[Place]) -> str:
        rows, columns = (
            ",".join(line.name for line in lines if line.name in {place[axis] for place in known})
            for axis, lines in enumerate((study.rows, study.columns))
        )
        return f"hyperfl study {study.name} --rows {rows} --columns {columns}"


def _cells(study: Study, records: Records, part: Part) -> list[Place]:
    """Return the recorded cells of a part."""
    if part.row not in {row.name for row in study.rows} or part.column not in {each.name for each in study.columns}:
        raise ValueError(f"the study {study.name} has no row {part.row!r} with a column {part.column!r}")
    return [place for place in records.cells if place[:2] == (part.row, part.column) and part.seed in (None, place[2])]
