"""What a node's ledger says of each run: who sent what, how much of which group, and which groups stayed."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.deploy.node_settings import FILE, read_settings
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.node.ledger import LEDGER, ArrayEntry, Entry, RecordEntry, read_ledger
from hyperfl_flwr.node.ledger_app import array_group, private_arrays


@dataclass(frozen=True, kw_only=True)
class RunLedger:
    """What a node has written down of one run.

    Attributes:
        experiment: Identity of the run; empty of handshakes that nothing came of.
        entries: Its messages, in the order in which they came and went.
    """

    experiment: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def methods(self) -> list[str]:
        """The methods that the server has named; a run has one."""
        return sorted({entry.method for entry in self.entries})

    @property
    def private(self) -> tuple[str, ...]:
        """Groups of parameters that stay with a client of the run's method."""
        return tuple(sorted({g for name in self.methods if name in METHODS for g in client_of(name).private}))

    @property
    def leaked(self) -> list[str]:
        """Names of arrays of private groups that have left; there must be none."""
        left = [entry for entry in self.entries if entry.direction == "out"]
        return sorted({name for entry in left for name in private_arrays(entry, self.private)})

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return bytes that left and bytes that came in, by group of arrays and by record of numbers and texts.

        Arrays count with the bytes of their numbers. What the names and headers of all arrays take is `layout`.
        """
        found: dict[str, list[int]] = {}
        for entry in self.entries:
            column = 0 if entry.direction == "out" else 1
            for name, size in _parts(entry):
                found.setdefault(name, [0, 0])[column] += size
        return {name: (left, came) for name, (left, came) in found.items()}

    def arrays(self) -> dict[tuple[str, str, ArrayEntry], int]:
        """Return how often each array has passed: (direction, record, array) -> times."""
        found: dict[tuple[str, str, ArrayEntry], int] = {}
        for entry in self.entries:
            for record in entry.records:
                for array in record.arrays:
                    shape = tuple(array.shape)
                    same = ArrayEntry(name=array.name, shape=shape, dtype=array.dtype, bytes=array.bytes)
                    key = (entry.direction, record.name, same)
                    found[key] = found.get(key, 0) + 1
        return found


def _parts(entry: Entry) -> Iterable[tuple[str, int]]:
    """Yield the parts of a message and their bytes, which add up to the message's."""
    for record in entry.records:
        if not record.arrays:
            yield record.name, record.bytes
            continue
        for array in record.arrays:
            yield f"{array_group(record.name, array.name)} (parameters)", array.bytes
        yield "layout", record.bytes - sum(array.bytes for array in record.arrays)
    if entry.error:
        yield "error texts", entry.bytes


def phase_of(entry: Entry) -> str:
    """Return when in a run a message has passed, in words."""
    return f"round {entry.round}" if entry.round else "before the rounds"


def content_of(record: RecordEntry) -> str:
    """Return what a record of a message holds in one line: numbers and texts in full, arrays by group."""
    if record.values is not None:
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in record.values.items()) or "nothing"
    groups: dict[str, list[int]] = {}
    for array in record.arrays:
        groups.setdefault(array_group(record.name, array.name), []).append(array.bytes)
    return ", ".join(f"{len(sizes)} arrays of {g}, {sum(sizes)} bytes" for g, sizes in groups.items()) or "no arrays"


def ledger_folder(folder: Path) -> Path:
    """Return where the ledger of a node lies: its state folder, that of its `node.toml`, or a run's `clients`.

    Raises:
        StateError: If it is in none of these.
        ConfigError: If `node.toml` is damaged.
    """
    named = [Path(read_settings(folder).state_dir)] if (folder / FILE).is_file() else []
    for place in (folder, *named, folder / "clients"):
        if (place / LEDGER).is_file():
            return place
    raise StateError(
        f"{folder} holds no {LEDGER}; give the state folder of a node that has been in a run, or the folder of a "
        f"simulation with --set ledger=true"
    )


def runs_of(folder: Path) -> tuple[list[RunLedger], Sequence[int]]:
    """Return what a node has written down, by run in the order of their beginning, and the numbers of damaged lines.

    A handshake does not tell its run; it is that of the next message under Flower's same number, if one came.

    Raises:
        StateError: If there is no ledger, or it may not be read.
    """
    entries, damaged = read_ledger(ledger_folder(folder))
    following: dict[int, str] = {}
    experiments = []
    for entry in reversed(entries):
        if entry.experiment:
            following[entry.flower_run] = entry.experiment
        experiments.append(following.get(entry.flower_run, ""))
    runs: dict[str, RunLedger] = {}
    for entry, experiment in zip(entries, reversed(experiments), strict=True):
        runs.setdefault(experiment, RunLedger(experiment=experiment)).entries.append(entry)
    return list(runs.values()), damaged


def chosen(runs: Sequence[RunLedger], experiment: str | None) -> list[RunLedger]:
    """Return the runs whose identity begins as asked for, or all.

    Raises:
        StateError: If there is none.
    """
    if experiment is None:
        return list(runs)
    if found := [run for run in runs if experiment and run.experiment.startswith(experiment)]:
        return found
    known = ", ".join(run.experiment for run in runs if run.experiment) or "none"
    raise StateError(f"the ledger has no run {experiment!r}; it has {known}")
