"""The node's ledger: a record of every incoming and outgoing message with names, shapes and sizes, but no arrays.

`ledger.jsonl` in the node's state folder has one line of JSON per message. The line is on disk before the message is
processed or sent. No line is ever removed; a resumed run repeats rounds, and its ledger holds both passes. Between a
message and its reply there is a line for each finding of the owner's checks (`clients.engine.node_checks`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.append_only import append, locked
from hyperfl_flwr.protocol.messages import CONFIG, MAX_REASON, printable
from hyperfl_flwr.protocol.packing import unpack_arrays
from hyperfl_flwr.protocol.sizes import record_bytes

LEDGER = "ledger.jsonl"

Direction = Literal["in", "out", "check"]
"""Whether a message came in or left, or a check has found something in one that came in."""

LONGEST_VALUE = MAX_REASON
"""Maximum length of a value that is recorded in full, in characters of JSON; reasons always fit."""

BEGINNING = 5
"""Number of elements recorded of a longer list."""


class LedgerError(StateError):
    """The ledger cannot be written: its disk is full, or its folder is not writable."""


@dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """Ledger entry of one array of a message.

    Attributes:
        name: Key of the array: `group/name`, in `per-client-arrays` `client/group/name`, in `outlier-sums`
            `level/group/name`.
        shape: Shape of the array.
        dtype: Type of its elements.
        bytes: Total size of its elements in bytes.
    """

    name: str
    shape: Sequence[int]
    dtype: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class RecordEntry:
    """Ledger entry of one record of a message.

    Attributes:
        name: Name of the record, see `hyperfl_flwr.protocol.messages`.
        bytes: Size of the record as the server counts it: values and names, in bytes.
        arrays: The arrays of an ArrayRecord.
        values: The values of a ConfigRecord or a MetricRecord; of long values only length and beginning.
    """

    name: str
    bytes: int
    arrays: Sequence[ArrayEntry] = ()
    values: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """Ledger entry of one message, or of what a check of the node's owner has found in it.

    Attributes:
        time: Time of the entry, UTC, ISO 8601.
        direction: `in`, `out` or `check`.
        kind: Flower's type of the message: `query.hello`, `train`, `evaluate`, ...
        flower_run: Flower's number of the run.
        node: Number of the node; -1 if its owner has not set one.
        method: The run's method, as reported by the server.
        experiment: Identity of the run; empty in the handshake, which does not contain it.
        round: The federated round; 0 in the handshake.
        records: The records of the message.
        error: Text of an error reply; empty for other messages.
        private: Groups of parameters that must not leave the node, of a method of the user's own; None where the
            method's name says it, or if its code could not be imported.
        finding: What a check has found; it is in no message.
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
    private: Sequence[str] | None = None
    finding: str = ""

    @property
    def bytes(self) -> int:
        """Size of the message's content (`hyperfl_flwr.protocol.sizes.content_bytes`), or of an error's text."""
        return sum(record.bytes for record in self.records) + len(self.error.encode())


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Facts about a message and its reply that are not in their content.

    Attributes:
        kind: See `LedgerEntry`.
        flower_run: See `LedgerEntry`.
        node: See `LedgerEntry`.
        method: See `LedgerEntry`.
        private: See `LedgerEntry`.
        request: Content of the incoming message; it has the experiment and the round of both messages.
    """

    kind: str
    flower_run: int
    node: int
    method: str
    private: Sequence[str] | None
    request: RecordDict

    def entry(
        self, direction: Direction, content: RecordDict | None, error: str = "", finding: str = ""
    ) -> LedgerEntry:
        """Return the ledger entry of a message with the given content or error, or of a check's finding.

        The content is untrusted: missing or invalid fields are recorded with default values, never refused.
        """
        request = self.request.get(CONFIG)
        fields: Mapping[str, Any] = request if isinstance(request, ConfigRecord) else {}
        number = fields.get("round")
        return LedgerEntry(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            direction=direction,
            kind=printable(self.kind),
            flower_run=self.flower_run,
            node=self.node,
            method=printable(self.method),
            experiment=printable(str(fields.get("experiment", ""))),
            round=number if isinstance(number, int) else 0,
            records=[_record(name, record) for name, record in (content or {}).items()],
            error=error,
            private=self.private,
            finding=finding,
        )


class Ledger:
    """Append to a node's ledger; several processes may write to the same ledger.

    Args:
        folder: The node's state folder; created if missing, with access for its owner only.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER

    def append(self, entry: LedgerEntry) -> None:
        """Append an entry; it is on disk when this returns.

        Raises:
            LedgerError: If the entry cannot be written; the ledger is unchanged.
        """
        line = (json.dumps(asdict(entry)) + "\n").encode()
        try:
            with locked(self.path) as file:
                append(file, line)
        except OSError as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be written: {error.strerror}; free disk space, or give the node's user "
                f"write permission"
            ) from error


def read_ledger(folder: Path) -> tuple[list[LedgerEntry], list[int]]:
    """Return the entries of a node's ledger in order, and the numbers (from 1) of lines that cannot be read.

    Raises:
        StateError: If the ledger is missing or cannot be read.
    """
    path = folder / LEDGER
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror}; give the state folder of a node, which contains {LEDGER}"
        ) from None
    entries, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_entry(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            damaged.append(number)
    return entries, damaged


def _entry(found: dict[str, Any]) -> LedgerEntry:
    records = [
        RecordEntry(**(record | {"arrays": [ArrayEntry(**array) for array in record["arrays"]]}))
        for record in found["records"]
    ]
    return LedgerEntry(**(found | {"records": records}))


def _record(name: str, record: ArrayRecord | ConfigRecord | MetricRecord) -> RecordEntry:
    if isinstance(record, ArrayRecord):
        return RecordEntry(name=name, bytes=record_bytes(record), arrays=_arrays(record))
    values = {key: _written(value) for key, value in record.items()}
    return RecordEntry(name=name, bytes=record_bytes(record), values=values)


def _arrays(record: ArrayRecord) -> list[ArrayEntry]:
    """Return the arrays of a record; of one that cannot be read, which only a server can send, Flower's description."""
    try:
        return [
            ArrayEntry(name=name, shape=list(array.shape), dtype=str(array.dtype), bytes=array.nbytes)
            for name, array in unpack_arrays(record).items()
        ]
    except Exception:  # noqa: BLE001 - whatever comes in must be recorded
        return [
            ArrayEntry(name=name, shape=list(array.shape), dtype=array.dtype, bytes=len(array.data))
            for name, array in record.items()
        ]


def _written(value: Any) -> Any:  # noqa: ANN401 - what JSON can hold
    """Return the JSON form of a value: finite numbers and short values unchanged, long values abbreviated."""
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
        return str(value)  # JSON cannot represent NaN and infinities
    return value
