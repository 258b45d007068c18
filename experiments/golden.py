"""Recognise results of code that has changed since: fingerprints of golden numbers.

`experiments/expected/golden.json` has the numbers that short runs compute with this version's code, one run for each
method, and some for what else determines results: partitions, noise, attacks. Tests compute them again and allow for
other processors and versions of torch. The file changes only where results are meant to change. A record has the
fingerprints of the file that belonged to the code of its run, and is out of date if they are no longer those of the
file. Nothing is run for that: the last digits of another machine would differ.

There is no golden run for the larger networks and for data sets, for robust reductions and malicious nodes, for novel
clients, for `membership` and `property`, which train federations of methods that have one, and for `ig-prior`, which
needs a second data set. A record can be an old one without a change of a fingerprint (docs/how-to/compare.md).
"""

import functools
import hashlib
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.study import FINGERPRINTS, FOLDER, Cell
from hyperfl_flwr import ROOT
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.runs.run_directory import read_manifest

FILE = FOLDER / "expected" / "golden.json"
"""The golden numbers: `defaults`, the settings of all runs, and `runs`, by name `where` and `numbers`."""


@functools.cache
def _runs() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())["runs"]
    return found


def fingerprint(numbers: Mapping[str, Any]) -> str:
    """Return the start of the SHA-256 of a golden run's numbers."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:12]


def fingerprints(settings: Mapping[str, Scalar]) -> dict[str, str]:
    """Return the fingerprint of each golden run that stands for a cell, by the run's name.

    Args:
        settings: The cell's settings, with those of its attack. No run stands for a method of the user's own, whose
            source the manifest has.
    """
    return {name: fingerprint(run["numbers"]) for name, run in _runs().items() if _stands_for(run["where"], settings)}


def write_fingerprints(folder: Path, current: Mapping[str, str]) -> None:
    """Write the fingerprints of the code that has run a cell to the cell's folder, for its record.

    Of a cell that was begun by other code and resumed, only those that are the same at all of its commits, as this
    checkout's history has them: none where a commit is unknown here or had uncommitted changes.

    Args:
        folder: The cell's folder, with its manifest.
        current: The fingerprints of the code that has finished it.
    """
    manifest = read_manifest(folder)
    parts = [manifest, *manifest.get("resumed", ())]
    codes = {(part["code"]["commit"], part["versions"]["hyperfl-flwr"]) for part in parts}
    kept = dict(current)
    if len(codes) > 1:
        for part in parts:
            earlier = {} if part["code"]["dirty"] else _fingerprints_at(part["code"]["commit"] or "")
            kept = {name: value for name, value in kept.items() if earlier.get(name) == value}
    write_atomically(folder / FINGERPRINTS, json.dumps(kept).encode())


def outdated(cell: Cell, folder: Path) -> list[str]:
    """Return why a finished cell's numbers may not be those of the current code; empty if they are, or it is unknown.

    Args:
        cell: The cell.
        folder: The study's folder.
    """
    file = cell.folder(folder) / FINGERPRINTS
    return changes(cell.settings, json.loads(file.read_text())) if file.is_file() else []


def _fingerprints_at(commit: str) -> dict[str, str]:
    """Return the fingerprint of each golden run at a commit of this checkout; empty if that cannot be found."""
    if not re.fullmatch("[0-9a-f]{40}", commit):  # the manifest of an installed version has none
        return {}
    command = ["git", "-C", str(ROOT), "show", f"{commit}:./{FILE.relative_to(ROOT)}"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {name: fingerprint(run["numbers"]) for name, run in json.loads(text)["runs"].items()}
    except (OSError, subprocess.CalledProcessError, ValueError, KeyError):
        return {}


def _stands_for(where: Mapping[str, Any], settings: Mapping[str, Scalar]) -> bool:
    def has(key: str, value: object) -> bool:
        if key == "attack.name":  # a cell may have several attacks
            return value in str(settings.get(key, "")).split(",")
        return settings.get(key) != value["not"] if isinstance(value, dict) else settings.get(key) == value

    return all(has(key, value) for key, value in where.items())


def changes(settings: Mapping[str, Scalar], recorded: Mapping[str, str]) -> list[str]:
    """Return why a record's numbers may not be those of the current code; empty if they are.

    Args:
        settings: The cell's settings.
        recorded: The record's fingerprints.
    """
    return [
        f"the golden run of {name} has other numbers by now"
        if name in recorded
        else f"no golden run of {name} is recorded"
        for name, current in fingerprints(settings).items()
        if recorded.get(name) != current
    ]
