"""Summarise a node's ledger by run: messages, bytes of each group, and private groups that must not be sent."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.deploy.node_settings import FILE, read_settings
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.node.ledger import LEDGER, ArrayEntry, LedgerEntry, RecordEntry, read_ledger
from hyperfl_flwr.node.ledger_app import array_group, private_arrays
from hyperfl_flwr.protocol.queries import SEND_MODEL


@dataclass(frozen=True, kw_only=True)
class RunLedger:
    """A node's ledger of one run.

    Attributes:
        experiment: Identity of the run; empty for handshakes that no run followed.
        entries: Messages of the run, in the order in which they were received and sent.
    """

    experiment: str
    entries: list[LedgerEntry] = field(default_factory=list)

    @property
    def methods(self) -> list[str]:
        """The methods named in the server's messages; a run has one."""
        return sorted({entry.method for entry in self.entries})

    @property
    def private(self) -> tuple[str, ...]:
        """Groups of parameters that the run's method keeps private to a client; no code of a user's own is run."""
        built_in = {group for name in self.methods if name in METHODS.built_in for group in client_of(name).private}
        return tuple(sorted(built_in.union(*(entry.private or () for entry in self.entries))))

    @property
    def knows_private(self) -> bool:
        """Whether the private groups are known: not of a method of a user's own that no entry describes."""
        own = [entry for entry in self.entries if entry.method not in METHODS.built_in]
        return not own or any(entry.private is not None for entry in own)

    @property
    def leaked(self) -> list[str]:
        """Names of arrays of private groups that were sent; there must be none."""
        left = [entry for entry in self.entries if entry.direction == "out"]
        return sorted({name for entry in left for name in private_arrays(entry, self.private)})

    @property
    def sent_models(self) -> bool:
        """Whether whole models have left the node, for a cross-site matrix, which its owner allowed."""
        sent = [entry for entry in self.entries if (entry.direction, entry.kind) == ("out", SEND_MODEL)]
        return any(record.arrays for entry in sent for record in entry.records)

    @property
    def findings(self) -> list[str]:
        """What the checks of the node's owner have found in received messages."""
        return [entry.finding for entry in self.entries if entry.direction == "check"]

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return bytes sent and bytes received, by group of arrays and by record of numbers and texts.

        Arrays count with the bytes of their values. The bytes of their names and headers are in `layout`.
        """
        found: dict[str, list[int]] = {}
        for entry in self.entries:
            column = 0 if entry.direction == "out" else 1
            for name, size in _parts(entry):
                found.setdefault(name, [0, 0])[column] += size
        return {name: (left, came) for name, (left, came) in found.items()}

    def arrays(self) -> dict[tuple[str, str, ArrayEntry], int]:
        """Return how often each array was sent or received: (direction, record, array) -> times."""
        found: dict[tuple[str, str, ArrayEntry], int] = {}
        for entry in self.entries:
            for record in entry.records:
                for array in record.arrays:
                    shape = tuple(array.shape)
                    same = ArrayEntry(name=array.name, shape=shape, dtype=array.dtype, bytes=array.bytes)
                    key = (entry.direction, record.name, same)
                    found[key] = found.get(key, 0) + 1
        return found


def _parts(entry: LedgerEntry) -> Iterable[tuple[str, int]]:
    """Yield the parts of a message with their bytes, which add up to the message's size."""
    for record in entry.records:
        if not record.arrays:
            yield record.name, record.bytes
            continue
        for array in record.arrays:
            yield f"{array_group(record.name, array.name)} (parameters)", array.bytes
        yield "layout", record.bytes - sum(array.bytes for array in record.arrays)
    if entry.error:
        yield "error texts", entry.bytes


def event_of(entry: LedgerEntry) -> str:
    """Describe in one word what an entry records."""
    return {"in": "received", "out": "sent", "check": "found"}[entry.direction]


def phase_of(entry: LedgerEntry) -> str:
    """Describe the phase of a run in which a message was sent or received."""
    return f"round {entry.round}" if entry.round else "before the rounds"


def content_of(record: RecordEntry) -> str:
    """Describe the content of a message's record in one line: numbers and texts in full, arrays by group."""
    if record.values is not None:
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in record.values.items()) or "nothing"
    groups: dict[str, list[int]] = {}
    for array in record.arrays:
        groups.setdefault(array_group(record.name, array.name), []).append(array.bytes)
    return ", ".join(f"{len(sizes)} arrays of {g}, {sum(sizes)} bytes" for g, sizes in groups.items()) or "no arrays"


def ledger_folder(folder: Path) -> Path:
    """Find the folder of a ledger: a node's state-dir, the one in its `node.toml`, or `clients` of a run's folder.

    Raises:
        StateError: If there is no ledger in these folders.
        ConfigError: If `node.toml` is damaged.
    """
    named = [Path(read_settings(folder).state_dir)] if (folder / FILE).is_file() else []
    for place in (folder, *named, folder / "clients"):
        if (place / LEDGER).is_file():
            return place
    raise StateError(
        f"{folder} holds no {LEDGER}; give the state-dir of a node that has taken part in a run, or the folder of a "
        f"simulation with --set ledger=true"
    )


def runs_of(folder: Path) -> tuple[list[RunLedger], Sequence[int]]:
    """Read a node's ledger, split by run in the order of their start; also return the numbers of damaged lines.

    A handshake does not name its run. It belongs to the run of the next message with the same Flower run id, if any.

    Raises:
        StateError: If there is no ledger, or it cannot be read.
    """
    entries, damaged = read_ledger(ledger_folder(folder))
    following: dict[int, str] = {}
    experiments = []
    for entry in reversed(entries):  # backwards, so that a handshake gets the run of a later message
        if entry.experiment:
            following[entry.flower_run] = entry.experiment
        experiments.append(following.get(entry.flower_run, ""))
    runs: dict[str, RunLedger] = {}
    for entry, experiment in zip(entries, reversed(experiments), strict=True):
        runs.setdefault(experiment, RunLedger(experiment=experiment)).entries.append(entry)
    return list(runs.values()), damaged


def chosen(runs: Sequence[RunLedger], experiment: str | None) -> list[RunLedger]:
    """Return the runs with an identity that starts with `experiment`, or all runs if it is None.

    Raises:
        StateError: If there is no such run.
    """
    if experiment is None:
        return list(runs)
    if found := [run for run in runs if experiment and run.experiment.startswith(experiment)]:
        return found
    known = ", ".join(run.experiment for run in runs if run.experiment) or "none"
    raise StateError(f"the ledger has no run {experiment!r}; it has {known}")
