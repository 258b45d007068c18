"""The node's own book of what came in and what left: names, shapes and bytes of every message, never the arrays.

One line of JSON per message in `ledger.jsonl` of the node's state folder, on disk before the message goes on its way.
Nothing is ever taken out of it; a resumed run repeats rounds, and its ledger tells both times.
"""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.protocol.messages import CONFIG, MAX_REASON, printable
from hyperfl_flwr.protocol.sizes import record_bytes

LEDGER = "ledger.jsonl"

Direction = Literal["in", "out"]

LONGEST_VALUE = MAX_REASON
"""Characters of JSON up to which a value is written down in full: reasons always are."""

BEGINNING = 5
"""Elements that are kept of a longer one."""


class LedgerError(StateError):
    """The ledger cannot be written: its disk is full, or its folder may not be written to."""


@dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """An array of a message.

    Attributes:
        name: Its key, `group/name`, in `own-arrays` `client/group/name`, in `outlier-sums` `level/group/name`.
        shape: Its shape.
        dtype: Type of its numbers.
        bytes: Size of its numbers.
    """

    name: str
    shape: Sequence[int]
    dtype: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class RecordEntry:
    """A record of a message.

    Attributes:
        name: Its name, see `hyperfl_flwr.protocol.messages`.
        bytes: Its size as the server counts it: what it holds and the names of it.
        arrays: The arrays of an ArrayRecord.
        values: The values of a ConfigRecord or a MetricRecord, long ones by their length and beginning.
    """

    name: str
    bytes: int
    arrays: Sequence[ArrayEntry] = ()
    values: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A message.

    Attributes:
        time: When it was written down, UTC, ISO 8601.
        direction: `in` or `out`.
        kind: Flower's type of the message: `query.hello`, `train`, `evaluate`, ...
        flower_run: Flower's number of the run.
        node: Number of the node; -1 where its owner has set none.
        method: The run's method, as the server says.
        experiment: Identity of the run; empty in the handshake, which does not tell it.
        round: The federated round; 0 in the handshake.
        records: What the message holds.
        error: The text that leaves instead if the node could not answer.
    """

    time: str
    direction: Direction
    kind: str
    flower_run: int
    node: int
    method: str
    experiment: str
    round: int
    records: Sequence[RecordEntry] = ()
    error: str = ""

    @property
    def bytes(self) -> int:
        """Size of the message's content (`hyperfl_flwr.protocol.sizes.content_bytes`), or of an error's text."""
        return sum(record.bytes for record in self.records) + len(self.error.encode())


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a node knows of a message beside its content.

    Attributes:
        kind: See `Entry`.
        flower_run: See `Entry`.
        node: See `Entry`.
        method: See `Entry`.
        request: The content that came in, which tells experiment and round, for the reply, too.
    """

    kind: str
    flower_run: int
    node: int
    method: str
    request: RecordDict

    def entry(self, direction: Direction, content: RecordDict | None, error: str = "") -> Entry:
        """Return what is written down of a message's content, or of the error that it holds instead.

        Whatever is in it, there is something to write.
        """
        request = self.request.get(CONFIG)
        asked: Mapping[str, Any] = request if isinstance(request, ConfigRecord) else {}
        number = asked.get("round")
        return Entry(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            direction=direction,
            kind=printable(self.kind),
            flower_run=self.flower_run,
            node=self.node,
            method=printable(self.method),
            experiment=printable(str(asked.get("experiment", ""))),
            round=number if isinstance(number, int) else 0,
            records=[_record(name, record) for name, record in (content or {}).items()],
            error=error,
        )


class Ledger:
    """A node's ledger, open for more; several processes may write to one.

    Args:
        folder: The node's state folder; made if it is not there, readable by its owner alone.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER

    def append(self, entry: Entry) -> None:
        """Write a message down; it is on disk when this returns.

        Raises:
            LedgerError: If that fails; the ledger is as it was.
        """
        line = (json.dumps(asdict(entry)) + "\n").encode()
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self.path) as file:
                _append(file, line)
        except OSError as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be written: {error.strerror}; make room, or let the node's user write"
            ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _append(file: int, line: bytes) -> None:
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        line = b"\n" + line  # a machine that went down left a line without an end; it stays as it is
    try:
        written = 0
        while written < len(line):
            written += os.write(file, line[written:])
        os.fsync(file)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)  # what was not written in full has not left
        raise


def read_ledger(folder: Path) -> tuple[list[Entry], list[int]]:
    """Return what a node has written down, in its order, and the numbers of lines that cannot be read.

    Raises:
        StateError: If there is no ledger, or it may not be read.
    """
    path = folder / LEDGER
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror}; give a node's state folder, in which {LEDGER} lies"
        ) from None
    entries, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_entry(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            damaged.append(number)
    return entries, damaged


def _entry(found: dict[str, Any]) -> Entry:
    records = [
        RecordEntry(**(record | {"arrays": [ArrayEntry(**array) for array in record["arrays"]]}))
        for record in found["records"]
    ]
    return Entry(**(found | {"records": records}))


def _record(name: str, record: ArrayRecord | ConfigRecord | MetricRecord) -> RecordEntry:
    if isinstance(record, ArrayRecord):
        arrays = [_array(key, value) for key, value in record.items()]
        return RecordEntry(name=name, bytes=record_bytes(record), arrays=arrays)
    values = {key: _written(value) for key, value in record.items()}
    return RecordEntry(name=name, bytes=record_bytes(record), values=values)


def _array(name: str, array: Array) -> ArrayEntry:
    try:
        size = math.prod(array.shape) * np.dtype(array.dtype).itemsize
    except (TypeError, ValueError, SyntaxError):  # a server that sends a type which numpy does not know
        size = len(array.data)
    return ArrayEntry(name=name, shape=list(array.shape), dtype=array.dtype, bytes=size)


def _written(value: Any) -> Any:  # noqa: ANN401 - what JSON can hold
    """Return a value as it is written down: finite numbers and short texts as they are."""
    if isinstance(value, list):
        elements = [_written(element) for element in value[: LONGEST_VALUE // 2]]
        if len(elements) == len(value) and len(json.dumps(elements)) <= LONGEST_VALUE:
            return elements
        return {"length": len(value), "beginning": elements[:BEGINNING]}
    if isinstance(value, bytes):
        return {"length": len(value), "bytes": True}
    if isinstance(value, str) and len(value) > LONGEST_VALUE:
        return {"length": len(value), "beginning": value[:LONGEST_VALUE]}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    return value
