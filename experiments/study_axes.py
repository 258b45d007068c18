"""The rows and columns of a study, and the numbers that stand beside ours, as its files hold them."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.toml_files import flatten

Settings = dict[str, Scalar]

WORDS = ("label", "missing", "metric", "run", "way")
"""Keys of a row or column that are no settings."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row or a column of a study.

    Attributes:
        name: As on the command line and in folders.
        label: For people.
        settings: What it changes.
        missing: Why it cannot be run; empty if it can.
        on: What it changes in one column only, by the column's name.
        metric: A number of summary.json that a column shows in the place of the study's.
        way: What takes the place of `{way}` in the name of a number that a row shows.
        run: The line whose runs it shows: its own name, or another line's, whose settings it then has.
        family: The row that a grid made it from; itself without a grid.
    """

    name: str
    label: str
    settings: Settings
    family: str
    run: str
    missing: str = ""
    metric: str = ""
    way: str = ""
    on: Mapping[str, Settings] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A number that stands beside ours, mostly a paper's.

    Attributes:
        value: In our unit.
        source: Its table and page.
        error: Its standard error, where one is given.
    """

    value: float
    source: str
    error: float | None = None


def read_lines(tables: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Return the rows or columns of a study's document.

    Raises:
        ConfigError: If a line shows the runs of one that has none, or would change their settings.
    """
    lines = []
    for name, table in tables.items():
        words = {key: str(table.get(key, "")) for key in WORDS}
        on = {column: flatten(each) for column, each in table.get("on", {}).items()}
        settings = flatten({key: value for key, value in table.items() if key not in (*WORDS, "on")})
        texts = words | {"label": words["label"] or name, "run": words["run"] or name}
        lines.append(Line(name=name, settings=settings, family=name, on=on, **texts))
    owners = {line.name for line in lines if line.run == line.name}
    for line in lines:
        if line.run not in owners or (line.run != line.name and (line.settings or line.on)):
            raise ConfigError(f"{line.name} must show the runs of a line that has some, and change no setting of them")
    return lines


def with_grid(rows: Sequence[Line], grid: Mapping[str, Any]) -> Sequence[Line]:
    """Return a row for each of the grid's values in the place of each row."""
    for key, values in grid.items():
        rows = [
            replace(
                row,
                name=f"{row.name}@{value}",
                run=f"{row.run}@{value}",
                label=f"{row.label}, {key} {value}",
                settings={**row.settings, key: value} if row.run == row.name else {},
            )
            for row in rows
            for value in values
        ]
    return rows


def runs_of(chosen: Sequence[Line], lines: Sequence[Line]) -> list[Line]:
    """Return the lines whose runs the chosen ones show, each once."""
    wanted = {line.run for line in chosen}
    return [line for line in lines if line.name in wanted]


def read_expected(file: Path, metric_of: Callable[[str, str], str]) -> dict[tuple[str, str, str], Expected]:
    """Read numbers by (row, column, metric).

    Args:
        file: CSV with row, column, value, source, and perhaps metric and error.
        metric_of: The number that a row shows in a column, for lines without `metric`.
    """
    with file.open(newline="") as stream:
        return {
            (line["row"], line["column"], line.get("metric") or metric_of(line["row"], line["column"])): Expected(
                value=float(line["value"]),
                source=line["source"],
                error=float(line["error"]) if line.get("error") else None,
            )
            for line in csv.DictReader(stream)
        }
