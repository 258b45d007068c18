"""Read the folders of runs, and compare what two runs have computed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.runs.checkpoint import Checkpoints, Progress
from hyperfl_flwr.runs.run_directory import read_metrics

TIMES = {"seconds", "client_seconds", "train_seconds", "peak_memory_mb"}
"""Fields in which two equal runs may differ."""


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def last_checkpoint(run: Path) -> tuple[dict[str, np.ndarray], Progress]:
    """Return the newest checkpoint of a run."""
    checkpoints = Checkpoints(run / "checkpoints")
    return checkpoints.load(checkpoints.rounds()[-1])


def exact(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return each array's dtype, shape and bytes, so that two results are equal only if all bits are."""
    return {key: (str(value.dtype), value.shape, value.tobytes()) for key, value in arrays.items()}


def private_arrays(run: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return all stored private arrays of a simulation: file -> name -> array."""
    clients = run / "clients"
    return {str(path.relative_to(clients)): read_arrays(path)[0] for path in sorted(clients.rglob("*.npz"))}


def current_private(run: Path) -> dict[int, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Return the private arrays that each client has after the last checkpoint."""
    _, progress = last_checkpoint(run)
    stored = private_arrays(run)
    names = {client: f"client-{client:05d}/round-{version:06d}.npz" for client, version in progress.versions.items()}
    return {client: exact(stored[name]) for client, name in names.items() if name in stored}


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times and memory."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(run)]


def outcome(run: Path) -> dict[str, Any]:
    """Return everything in which two equal runs agree: shared and private arrays, progress, metrics and accuracies."""
    arrays, progress = last_checkpoint(run)
    summary = json.loads((run / "summary.json").read_text())
    return {
        "arrays": exact(arrays),
        "progress": progress,
        "private": current_private(run),
        "metrics": metrics(run),
        "accuracies": {key: value for key, value in summary.items() if key.startswith("test_accuracy")},
    }
