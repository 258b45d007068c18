"""The numbers of a study's table, or of the differences between its rows: one line per row and column."""

import csv
import io
import itertools
import math
from typing import Any

from experiments.collect import Collected, Entry
from experiments.paired import Pairing
from experiments.units import shown_unit

COLUMNS = (
    "row", "column", "metric", "unit", "mean", "std", "sem", "n", "low", "high", "paper", "paper_sem", "source",
    "missing", "clients",
)  # fmt: skip
"""Columns of table.csv; `low` and `high` are the ends of the 95 % interval, `clients` is `Entry.fewer`."""

PAIRED_COLUMNS = (
    "row", "column", "metric", "unit", "difference", "low", "high", "clients", "seeds", "better", "worse", "missing",
)  # fmt: skip
"""Columns of table-against-ROW.csv."""

Value = str | int | float | None
"""A field of a table's line."""


def lines_of(collected: Collected, pairing: Pairing | None = None) -> list[dict[str, Any]]:
    """Return the table's numbers, one dictionary per row and column, with the keys `COLUMNS`.

    Those of differences have the keys `PAIRED_COLUMNS`. What is not known is None.
    """
    study = collected.study
    found: list[dict[str, Any]] = []
    for row, column in itertools.product(study.rows, study.columns):
        unit = shown_unit(study.unit_in(column), is_difference=pairing is not None)
        place = (row.name, column.name, study.metric_of(row, column), unit)
        if pairing:
            found.append(dict(zip(PAIRED_COLUMNS, (*place, *_paired_fields(pairing, *place[:2])), strict=True)))
        else:
            found.append(dict(zip(COLUMNS, (*place, *_fields(collected.entries[place[:2]])), strict=True)))
    return found


def comma_separated(collected: Collected, pairing: Pairing | None = None) -> str:
    """Return the table as CSV, one line per row and column, see `lines_of`; floats have six digits."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, PAIRED_COLUMNS if pairing else COLUMNS, lineterminator="\n")
    writer.writeheader()
    for line in lines_of(collected, pairing):
        writer.writerow({key: _digits(value) if isinstance(value, float) else value for key, value in line.items()})
    return stream.getvalue()


def _fields(entry: Entry) -> list[Value]:
    ours = [_known(number) for number in (entry.mean, entry.deviation, entry.error)]
    paper = [entry.paper.value, entry.paper.error] if entry.paper else [None, None]
    source = entry.paper.source if entry.paper else ""
    return [*ours, len(entry.values), *(entry.interval or (None, None)), *paper, source, entry.missing, entry.fewer]


def _paired_fields(pairing: Pairing, row: str, column: str) -> list[Value]:
    found, reason = pairing.differences[row, column], pairing.reasons[row, column]
    if found is None:
        return [*[None] * (len(PAIRED_COLUMNS) - 5), reason]
    return [found.mean, found.low, found.high, found.clients, found.seeds, found.better, found.worse, reason]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _digits(value: float) -> str:
    """Return a number with six digits, or all digits of an integer."""
    return f"{value:.15g}" if value.is_integer() else f"{value:.6g}"
