"""Numbers of records in tables of the documentation, and where they come from."""

import statistics
from collections.abc import Collection, Sequence
from typing import Any

from experiments.collect import FAILED
from experiments.number_formats import Format, short_version
from experiments.records import Records, manifest_of
from experiments.study import Place
from hyperfl_flwr.core.packages.code_version import code_versions
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.runs.failures import has_diverged

OUT_OF_DATE = " (out of date)"
"""Mark of a line of which a cell is stale."""

NOT_RUN = "–"
"""Text in the place of numbers of a cell without a record."""

SENT = "bytes_up_per_client_round"
"""Number of summary.json that is 0 if clients send nothing."""


def fewer_seeds(cells: Collection[Place], seeds: Collection[int]) -> str:
    """Return that a line has fewer seeds than others of its table; empty if it has all."""
    own = {seed for *_, seed in cells}
    return f" ({len(own)} of {counted(len(seeds), 'seed')})" if len(own) < len(seeds) else ""


def value_of(records: Records, cells: Sequence[Place], key: str, text: Format) -> str:
    """Return a number's mean over cells that differ in their seeds, with its deviation, and what it is not over.

    Args:
        records: The records.
        cells: The cells, of one row and column.
        key: Where the number is, see `Table.numbers`.
        text: Format of the number.
    """
    if key == "privacy.epsilon" and (sent := numbers_of(records, cells, SENT)) and not any(sent):
        return "sends nothing"
    if key.startswith("interval:"):
        return _with_interval(records, cells, key.removeprefix("interval:"), text)
    known = numbers_of(records, cells, key)
    if not known:
        return nothing_text(records, cells)
    deviation = f" ± {text(statistics.stdev(known))}" if len(set(known)) > 1 else ""
    return f"{text(statistics.fmean(known))}{deviation}{fewer_than_all(records, cells, key, len(known))}"


def nothing_text(records: Records, cells: Sequence[Place]) -> str:
    """Return the text in the place of a number that none of some cells has."""
    return FAILED if all(has_diverged(records.cells[place]["manifest"]) for place in cells) else "none"


def number_of(records: Records, place: Place, key: str) -> float | None:
    """Return a number of a cell, see `value_of`; None if it has none."""
    recorded = records.cells[place]
    if key.startswith("settings:"):
        value: Any = manifest_of(recorded, records)["settings"][key.removeprefix("settings:")]
    elif key.startswith("round:"):
        _, number, name = key.split(":")
        value = next((line[name] for line in recorded["rounds"] if line["round"] == int(number) and name in line), None)
    elif key.startswith("clients:"):
        _, clients, name = key.split(":")
        found = [recorded["summary"][f"{name}_per_client"][int(client)] for client in clients.split(",")]
        value = None if None in found else statistics.fmean(found)
    else:
        value = recorded["summary"]
        for part in [key] if key in value else key.split("."):
            value = value.get(part) if value is not None else None
    return None if value is None else float(value)


def numbers_of(records: Records, cells: Sequence[Place], key: str) -> list[float]:
    """Return the numbers of those cells that have one."""
    return [value for place in cells if (value := number_of(records, place, key)) is not None]


def _honest(records: Records, place: Place) -> int:
    """Return the number of a run's clients, without malicious nodes' if each node has one: these never count."""
    summary = records.cells[place]["summary"]
    num_clients = int(summary.get("num_clients", 0))  # attacks and runs that failed have none
    malicious = str(records.cells[place]["manifest"]["resolved"].get("adversary.nodes", "none"))
    if malicious == "none" or summary.get("num_nodes") != num_clients:
        return num_clients
    return num_clients - len(malicious.split(","))


def fewer_than_all(records: Records, cells: Sequence[Place], key: str, known: int) -> str:
    """Say which seeds and clients a mean is not over; empty if it is over all."""
    parts = [f"{known} of {len(cells)} seeds"] if known < len(cells) else []
    if key in ("test_accuracy", "test_accuracy_aggregate"):
        counts = [count for count in numbers_of(records, cells, f"{key}_num_clients") if count]
        everyone = max((_honest(records, place) for place in cells), default=0)
        parts += [f"{min(counts):g} of {everyone:g} clients"] if counts and min(counts) < everyone else []
    return f" ({', '.join(parts)})" if parts else ""


def _with_interval(records: Records, cells: Sequence[Place], key: str, text: Format) -> str:
    """Return a number of the only cell with its interval, such as `0.71 (0.69 to 0.73)`."""
    (place,) = cells
    value, low, high = (number_of(records, place, key + end) for end in ("", "_low", "_high"))
    if value is None or low is None or high is None:
        return nothing_text(records, cells)
    return f"{text(value)} ({text(low)} to {text(high)})"


def source_of(records: Records, cells: Collection[Place], command: str) -> str:
    """Return the line on where the numbers of some cells come from: a command, commits and machines."""
    manifests = [records.cells[place]["manifest"] for place in cells]
    commits = sorted({short_version(version) for manifest in manifests for version in code_versions(manifest)})
    hardware = [manifest["hardware"] for manifest in manifests]
    machines = {" with ".join([each["processor"], *dict.fromkeys(each.get("gpus", []))]) for each in hardware}
    changes = "".join(f" --set {key}={value}" for key, value in records.study_manifest.changes.items())
    seeds = len({seed for *_, seed in cells})
    return f"`{command} --seeds {seeds}{changes}`; commit {', '.join(commits)}; {', '.join(sorted(machines))}."
