"""Parse the rows and columns of a study, and the numbers that its results are compared with."""

import csv
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.study_file import LineTable, Settings
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.methods import METHODS


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row or a column of a study.

    Attributes:
        name: Name on the command line and of folders.
        label: Title in tables and figures.
        settings: Settings that the line changes.
        missing: Reason why it cannot be run; empty if it can.
        on: Settings that a row changes in one column only, by the column's name.
        missing_on: Reasons why a row cannot be run in one column only, by the column's name.
        metric: Number of summary.json that a column shows instead of the study's; empty for the study's.
        way: Text that replaces `{way}` in the name of the number that a row shows.
        prepare: Command that makes the file of the column's data; empty if none is needed.
        run: Name of the line that provides the runs: this line's name, or that of another line with the same settings.
        family: Name of the row that a grid has expanded to this one; its own name without a grid.
    """

    name: str
    label: str
    settings: Settings
    family: str
    run: str
    missing: str = ""
    metric: str = ""
    way: str = ""
    prepare: str = ""
    on: Mapping[str, Settings] = field(default_factory=dict)
    missing_on: Mapping[str, str] = field(default_factory=dict)

    def why_missing(self, column: "Line") -> str:
        """Return the reason why this row cannot be run in a column; empty if it can."""
        own = self.missing_on.get(column.name) or self.missing_on.get(column.run, "")
        return self.missing or column.missing or own


def names_in(texts: Iterable[str], known: Container[str] = ()) -> list[str]:
    """Return the names in the values of an option that can be repeated, each with one name or several after commas.

    Args:
        texts: The values. One that is a comma only is returned as it is, for an error to name it.
        known: Names that may contain a comma themselves, such as that of a row or a file.
    """
    names = []
    for text in texts:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        names += [text] if text in known or not parts else parts
    return names


def of_method(settings: Mapping[str, Scalar], lines: Sequence[Line]) -> Settings:
    """Return settings without those of methods of the user's own that other rows train; they have no effect here.

    Args:
        settings: Settings of a run.
        lines: The rows and columns of the study.

    Raises:
        ConfigError: If one of the methods cannot be imported, or its declaration is wrong.
    """
    methods = {str(line.settings.get("method", "")) for line in lines} | {str(settings.get("method", ""))}
    sections = {name: {kind.key for kind in METHODS[name].settings} for name in methods if is_user_code(name)}
    others = set().union(*sections.values()) - sections.get(str(settings.get("method", "")), set())
    return {key: value for key, value in settings.items() if key.partition(".")[0] not in others}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A number to compare ours with, mostly a paper's.

    Attributes:
        value: The number, in our unit.
        source: Table and page of the number.
        error: Its standard error; None if it is not reported.
    """

    value: float
    source: str
    error: float | None = None


def read_lines(tables: Mapping[str, LineTable]) -> list[Line]:
    """Return the rows or columns of a study's file.

    Raises:
        ConfigError: If a line shows the runs of a line without runs, or has settings for them.
    """
    lines = []
    for name, table in tables.items():
        on = {column: dict(settings) for column, settings in table.on.items()}
        missing_on = {column: str(settings.pop("missing")) for column, settings in on.items() if "missing" in settings}
        lines.append(
            Line(
                name=name,
                label=table.label or name,
                settings=table.settings,
                family=name,
                run=table.run or name,
                missing=table.missing,
                metric=table.metric,
                way=table.way,
                prepare=table.prepare,
                on=on,
                missing_on=missing_on,
            )
        )
    owners = {line.name for line in lines if line.run == line.name}
    for line in lines:
        if line.run not in owners or (line.run != line.name and (line.settings or line.on)):
            raise ConfigError(
                f"{line.name} must show the runs of a line that has runs, and have no settings; it shows {line.run}; "
                f"with runs are {', '.join(sorted(owners))}"
            )
    return lines


def refuse_unknown_columns(rows: Sequence[Line], columns: Sequence[Line]) -> None:
    """Refuse a row's settings in a column that the study does not have: they would have no effect.

    Raises:
        ConfigError: If there are some.
    """
    known = [column.name for column in columns]
    for row in rows:
        for name in {**row.on, **row.missing_on}:
            if name not in known:
                raise ConfigError(
                    f"rows.{row.name}.on.{name} is for a column that the study does not have; it has "
                    f"{', '.join(known)}{nearest(name, known)}"
                )


def with_grid(rows: Sequence[Line], grid: Mapping[str, Any]) -> Sequence[Line]:
    """Expand each row to one row per value of the grid.

    Raises:
        ConfigError: If a value is given twice: one run would count as several.
    """
    for key, values in grid.items():
        # A row that shows another row's runs has no settings: it follows the grid of that row by name.
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
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the grid has a value twice: {', '.join(twice)}; give each value once")
    return rows


def runs_of(chosen: Sequence[Line], lines: Sequence[Line]) -> list[Line]:
    """Return the lines that provide the runs of the chosen lines, each once."""
    run_lines = {line.run for line in chosen}
    return [line for line in lines if line.name in run_lines]


def chosen(lines: Sequence[Line], given: Iterable[str], kind: str, called: Callable[[Line], set[str]]) -> list[Line]:
    """Return the lines that provide the runs of those that a user has chosen.

    Args:
        lines: The rows or the columns of a study.
        given: What the user has given, see `names_in`; empty for all lines.
        kind: What the lines are, for an error.
        called: Returns the names that a line can be given by.

    Raises:
        ConfigError: If there is no line of a name.
    """
    known = {name for line in lines for name in called(line)}
    names = names_in(given, known)
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no {kind} {name!r}; known: {', '.join(sorted(known))}{nearest(name, known)}")
    return runs_of([line for line in lines if not names or called(line) & set(names)], lines)


def read_expected(file: Path, metric_of: Callable[[str, str], str]) -> dict[tuple[str, str, str], Expected]:
    """Read the numbers to compare with, by (row, column, metric).

    Args:
        file: CSV file with the columns row, column, value and source, and optionally metric and error.
        metric_of: Returns the metric that a row shows in a column, for lines without `metric`.

    Raises:
        ConfigError: If the file cannot be read, or is not such a file.
    """
    try:
        with file.open(newline="") as stream:
            return {
                (line["row"], line["column"], line.get("metric") or metric_of(line["row"], line["column"])): Expected(
                    value=float(line["value"]),
                    source=line["source"],
                    error=float(line["error"]) if line.get("error") else None,
                )
                for line in csv.DictReader(stream)
            }
    except OSError as error:
        raise ConfigError(f"cannot read the paper's numbers, {file}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        wanted = "each line needs a row and a column of the study, a value (a number) and a source"
        raise ConfigError(f"{file}: {wanted} ({type(error).__name__}: {error})") from None
