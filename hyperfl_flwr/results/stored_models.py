"""Find the model of a client that its node has stored, of the runs in which it took part."""

from datetime import datetime
from pathlib import Path

from hyperfl_flwr.core.errors import RunDirectoryError, StateError
from hyperfl_flwr.node.private_state import client_folder
from hyperfl_flwr.node.saved_models import FILE, KeptModel


def stored_model_folder(states: Path, client: int, experiment: str | None) -> Path:
    """Return the folder with the stored model of a client.

    Args:
        states: A node's state folder, or that of one run in it.
        client: The client's id.
        experiment: The first digits of the run's name; None if there is only one.

    Raises:
        RunDirectoryError: If there is no such model, or of several runs.
    """
    found = {folder.name: client_folder(folder, client) for folder in sorted(states.glob("*/"))}
    runs = {name: folder for name, folder in found.items() if (folder / FILE).is_file()}
    if not runs and (client_folder(states, client) / FILE).is_file():
        runs = {states.name: client_folder(states, client)}
    if experiment is not None:
        runs = {key: path for key, path in runs.items() if experiment and key.startswith(experiment)}
    if len(runs) == 1:
        return next(iter(runs.values()))
    if runs:
        latest = sorted(runs, key=lambda name: (runs[name] / FILE).stat().st_mtime, reverse=True)
        listed = ", ".join(f"{name}: {_origin(runs[name])}" for name in latest)
        raise RunDirectoryError(
            f"{states} has models of client {client} of several runs ({listed}); choose one with --run"
        )
    there = sorted({path.parent.relative_to(states).as_posix() for path in states.glob("**/client-*/model.npz")})
    of_run = f" of the run {experiment}" if experiment else ""
    hint = f"there are {', '.join(there)}" if there else "give a run's folder, or a node's state-dir with keep-model on"
    raise RunDirectoryError(f"{states} holds no model of client {client}{of_run}; {hint}")


def _origin(folder: Path) -> str:
    """Return the method of a client's model and when it was stored, as `fedavg, 2026-01-31 12:00`."""
    stored = datetime.fromtimestamp((folder / FILE).stat().st_mtime)
    try:
        method = KeptModel.read(folder).method
    except StateError:
        method = "unreadable"
    return f"{method}, {stored:%Y-%m-%d %H:%M}"
