"""Read a table of numbers from a CSV file, with a header and a row per sample.

==========================  ===========================================================================================
column                      content
==========================  ===========================================================================================
`label`                     the class: any text; not needed where labels are not read
`client` (optional)         the client of each sample
`group` (optional)          the group of each sample, such as a patient; a group is in one part only
`sample_weight` (optional)  the weight of each training sample, a number of at least 0
`split` (optional)          `train` or `test`; without it a quarter becomes the test data, as in an `.npz` file
all others                  the features, finite numbers, in the order of the columns
==========================  ===========================================================================================

Fields are separated by commas, semicolons or tabs, whichever the header has. The rules are those of an `.npz` file with
features, see `hyperfl_flwr.data.sources.npz`.
"""

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.files.checked_files import MalformedFileError, refuse_excess
from hyperfl_flwr.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, Task
from hyperfl_flwr.data.dataset import Dataset, IntArray
from hyperfl_flwr.data.sample_format import SampleFormat
from hyperfl_flwr.data.sources.csv_header import CLIENT, GROUP, LABEL, LABELS, SPLIT, WEIGHT, check_header, is_reserved
from hyperfl_flwr.data.sources.npz import dataset_of
from hyperfl_flwr.data.sources.npz_columns import wrong

SUFFIX = ".csv"

LONGEST_NAME = 256
"""Most characters of a client's or group's name: numpy gives all names of a column the width of the longest."""

LONGEST_QUOTE = 60
"""Most characters of a field in an error."""

_SEPARATORS = (";", "\t", ",")


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """The content of a CSV file.

    Attributes:
        features: Numbers [n, D], float32, finite.
        names: Names of the features [D].
        columns: The n texts of the other columns, by name, without blanks around them.
    """

    features: npt.NDArray[np.float32]
    names: tuple[str, ...]
    columns: dict[str, list[str]]

    @property
    def outputs(self) -> list[str]:
        """Names of the columns of labels or targets, for other tasks than classification."""
        several = [name for name in self.columns if name.startswith(LABELS)]
        return [*([LABEL] if LABEL in self.columns else []), *several]


def read_table(path: Path) -> Table:
    """Read a CSV file.

    Raises:
        DataError: If it cannot be read, its rows differ in length, `check_header` refuses its header, or a feature is
            not a finite number.
    """
    rows = _rows(path)
    if len(rows) < 2:
        raise wrong(path, f"must have a header and a row per sample, got {len(rows)} lines", "add them")
    header = [name.strip() for name in rows[0]]
    check_header(header, path)
    if short := next((number for number, row in enumerate(rows) if len(row) != len(header)), None):
        raise wrong(path, f"row {short} has {len(rows[short])} fields, the header {len(header)}", "repair it")
    reserved = [name for name in header if is_reserved(name)]
    features = [number for number, name in enumerate(header) if name not in reserved]
    if not features:
        raise wrong(path, f"must have columns of numbers besides {', '.join(header)}", "add the features")
    names, texts = [header[number] for number in features], [_texts(rows, number) for number in features]
    return Table(
        features=_numbers(texts, names, path).astype(np.float32),
        names=tuple(names),
        columns={name: [text.strip() for text in _texts(rows, header.index(name))] for name in reserved},
    )


def read_csv(name: str, path: Path, sample_format: SampleFormat) -> Dataset:
    """Read a data set of feature vectors from a CSV file.

    Args:
        name: The data set's name.
        path: The file; see the module's docstring for its contents.
        sample_format: The task, agreed classes, and `auto` or `none` for the groups.

    Returns:
        The data set, without recommended sizes, normalised by its training samples. The classes are those agreed on, or
        the texts in `label`: in the order of their numbers if all are whole numbers, otherwise as texts.

    Raises:
        DataError: If the file is missing or has invalid content, or a class that was not agreed on.
    """
    table = read_table(path)
    task = sample_format.task
    if task is not CLASSIFICATION and not table.outputs:
        raise wrong(path, f"must have columns {LABELS}NAME, got {_columns(table)}", "add them")
    if task is CLASSIFICATION and LABEL not in table.columns:
        others = f", or set task to {MULTI_LABEL.name} or {REGRESSION.name}" if table.outputs else ""
        raise wrong(path, f"must have a column {LABEL}, got {_columns(table)}", f"add it{others}")
    if task is CLASSIFICATION and table.outputs != [LABEL]:
        raise wrong(path, f"{table.outputs[1]} is for another task, beside {LABEL}", "rename it, or drop one of them")
    for column in (*table.outputs, CLIENT, GROUP):
        if empty := [number for number, text in enumerate(table.columns.get(column, ())) if not text]:
            raise wrong(path, f"{column} is empty in {len(empty)} samples, the first is {empty[0] + 1}", "fill it")
    arrays: dict[str, npt.NDArray[np.generic]] = {"features": table.features}
    if task is CLASSIFICATION:
        classes = sample_format.classes or _classes(table.columns[LABEL])
        if len(classes) < 2:
            text = f"must have two or more classes in {LABEL}, got only {classes[0]}"
            raise wrong(path, text, "add some, or list them in data.classes")
        arrays["labels"] = class_numbers_of(path, table, classes)
    else:
        classes = sample_format.classes or tuple(name.removeprefix(LABELS) for name in table.outputs)
        arrays["labels"] = target_columns_of(path, table, classes, task)
    for column, key in ((CLIENT, "clients"), (GROUP, "groups")):
        if column in table.columns:
            arrays[key] = _names(table.columns[column], column, path)
    if WEIGHT in table.columns:
        arrays["weights"] = _numbers([table.columns[WEIGHT]], [WEIGHT], path)[:, 0]
    if SPLIT in table.columns:
        arrays = _divided(arrays, table.columns[SPLIT], path)
    dataset = dataset_of(arrays, name, path, sample_format.grouping, len(classes), task)
    return replace(dataset, classes=classes, features=table.names)


def _columns(table: Table) -> str:
    return ", ".join((*table.names, *table.columns))


def target_columns_of(path: Path, table: Table, names: Sequence[str], task: Task) -> npt.NDArray[np.generic]:
    """Return the columns of labels or targets [n, K] in the order of their names.

    Args:
        path: The file, for errors.
        table: Its content.
        names: Names of the labels or targets 0..K-1; the column `label` is that of a single one.
        task: `MULTI_LABEL` or `REGRESSION`.

    Raises:
        DataError: If a column is missing, there are others, or a field is no number; with `MULTI_LABEL` not 0 or 1.
    """
    columns = {name.removeprefix(LABELS): name for name in table.outputs}
    if set(columns) == {LABEL} and len(names) == 1:
        columns = {names[0]: LABEL}
    if set(columns) != set(names):
        raise DataError(
            f"{path}: must have the columns {', '.join(f'{LABELS}{name}' for name in names)} for task={task.name}, got "
            f"{', '.join(table.outputs)}; rename them, or change data.classes for the whole federation",
            public=f"its {task.outputs} are not those of data.classes, see the node's log",
        )
    ordered = [columns[name] for name in names]
    found = _numbers([table.columns[name] for name in ordered], ordered, path)
    if task is MULTI_LABEL:
        if other := np.setdiff1d(found, (0, 1)).tolist():
            raise wrong(path, f"columns of labels must be 0 or 1 with task={task.name}, got {other[0]:g}", "fix them")
        return found.astype(np.int64)
    return found


def class_numbers_of(path: Path, table: Table, classes: Sequence[str]) -> IntArray:
    """Return the numbers of the classes in the column `label` [n].

    Args:
        path: The file, for errors.
        table: Its content.
        classes: Names of the classes 0..K-1.

    Raises:
        DataError: If a label is none of them.
    """
    known = {name: number for number, name in enumerate(classes)}
    if unknown := sorted(set(table.columns[LABEL]) - set(known)):
        raise DataError(
            f"{path}: {LABEL} must be one of {', '.join(classes)}, but {len(unknown)} others occur, such as "
            f"{unknown[0]!r}; rename or remove them, or add the classes for the whole federation",
            public="some of its classes are not in data.classes, see the node's log",
        )
    return np.array([known[label] for label in table.columns[LABEL]], dtype=np.int64)


def _rows(path: Path) -> list[list[str]]:
    """Return the fields of all lines that are not empty."""
    if not path.is_file():
        raise wrong(path, "must be an existing CSV file", "check the path after csv:")
    try:
        refuse_excess(20 * path.stat().st_size)  # of Python's texts
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            separator = max(_SEPARATORS, key=first.count)
            return [row for row in csv.reader(file, delimiter=separator, strict=True) if row]
    except (OSError, UnicodeDecodeError, csv.Error, MalformedFileError) as error:
        raise wrong(path, f"must be a CSV file in UTF-8, but {error}", "save it as one") from error


def _texts(rows: Sequence[Sequence[str]], column: int) -> list[str]:
    """Return a column of the rows after the header, as Python's texts: in an array all would be as wide as one."""
    return [row[column] for row in itertools.islice(rows, 1, None)]


def _names(texts: Sequence[str], column: str, path: Path) -> npt.NDArray[np.str_]:
    """Return the names of clients or groups [n] as an array."""
    longest = max(range(len(texts)), key=lambda number: len(texts[number]))
    if (length := len(texts[longest])) > LONGEST_NAME:
        raise wrong(
            path,
            f"the column {column} must have names of at most {LONGEST_NAME} characters, got one of {length} in sample "
            f"{longest + 1}",
            "shorten it",
        )
    return np.array(texts, dtype=str)


def _numbers(columns: Sequence[Sequence[str]], names: Sequence[str], path: Path) -> npt.NDArray[np.float64]:
    """Convert the texts of D columns to finite numbers [n, D]."""
    count = len(columns[0])
    found = np.empty((count, len(columns)))
    for column, texts in enumerate(columns):
        try:
            found[:, column] = np.fromiter(map(float, texts), np.float64, count)
        except ValueError:
            found[:, column] = np.fromiter(map(_number, texts), np.float64, count)
    with np.errstate(over="ignore"):  # values too large for float32 become infinite and are reported
        broken = np.argwhere(~np.isfinite(found.astype(np.float32)))
    if len(broken):
        row, column = broken[0]
        text = columns[column][row]
        quoted = repr(text) if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]!r}... ({len(text)} characters)"
        raise wrong(
            path,
            f"the column {names[column]} must have finite numbers, but {len(broken)} of the file's fields are not, the "
            f"first is {quoted} in sample {row + 1}",
            "write numbers with a decimal point and fill empty fields, or drop the column; texts become numbers by a "
            "column for each value",
        )
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _classes(labels: Sequence[str]) -> tuple[str, ...]:
    names = sorted(set(labels))
    try:
        return tuple(sorted(names, key=int))
    except ValueError:
        return tuple(names)


def _divided(
    arrays: dict[str, npt.NDArray[np.generic]], split: Sequence[str], path: Path
) -> dict[str, npt.NDArray[np.generic]]:
    """Divide arrays by the column `split`, into the keys of an `.npz` file with test data."""
    kinds = set(split)
    if kinds != {"train", "test"}:
        raise wrong(
            path, f"{SPLIT} must be train or test, both at least once, got {', '.join(sorted(kinds))}", "fix it"
        )
    training = np.array([text == "train" for text in split])
    parts = {"": training, "test_": ~training}
    return {
        f"{prefix}{key}": array[chosen]
        for prefix, chosen in parts.items()
        for key, array in arrays.items()
        if not (prefix and key == "weights")
    }
