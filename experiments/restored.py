"""Write recorded cells to a study's folder as finished cells, or as failed ones if they have diverged."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.study import FINGERPRINTS
from hyperfl_flwr.core.files.atomic_files import write_atomically

RESTORED = "restored-from-a-record"
"""Name of an empty file in the folder of a cell that was restored from its record."""


def is_restored(path: Path) -> bool:
    """Return whether a cell's folder was made from a record, and holds nothing that a record lacks."""
    return (path / RESTORED).is_file()


def restore_cell(recorded: Mapping[str, Any], manifest: Mapping[str, Any], path: Path) -> None:
    """Write a cell's folder from its record, also in the place of one from another record, but not of a run.

    Args:
        recorded: The record.
        manifest: The cell's manifest, with its complete settings.
        path: The cell's folder.
    """
    numbers = {"summary.json": json.dumps(recorded["summary"], indent=2) + "\n"} if recorded["summary"] else {}
    texts = {
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in recorded["rounds"]),
        **numbers,
        FINGERPRINTS: json.dumps(recorded.get("golden", {})),
        "manifest.json": json.dumps(manifest, indent=2),
    }
    if is_restored(path) and not _has(path, texts):
        shutil.rmtree(path)
    if path.exists():
        return
    path.mkdir(parents=True)
    (path / RESTORED).touch()
    for name, text in texts.items():  # the manifest last: without it, the cell is not finished
        write_atomically(path / name, text.encode())


def remove_restored(path: Path) -> None:
    """Remove a cell's folder if it was made from a record."""
    if is_restored(path):
        shutil.rmtree(path)


def _has(path: Path, texts: Mapping[str, str]) -> bool:
    return all((path / name).is_file() and (path / name).read_text() == text for name, text in texts.items())
