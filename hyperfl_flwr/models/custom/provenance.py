"""Find the source of a run's user-supplied network, record it with the run, and load it again from there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.models.custom import source as custom_source
from hyperfl_flwr.models.custom.source import is_factory

MODEL = "model"
"""Folder with a copy of the network's source, in a run's folder or in a node's private state."""


def find_model(target: str, run: Path | None = None) -> None:
    """Make the network's source importable from the working directory, or else from the copy in a run's folder.

    A source that is in neither must be installed. A missing one raises an error only when the network is built.

    Args:
        target: Value of the setting `target`.
        run: A run's folder.

    Raises:
        ConfigError: If the source has the name of another package, or Flower would leave it out of an app.
    """
    if is_factory(target):
        custom_source.find(target, [Path.cwd(), *([] if run is None else [run / MODEL])])


def find_kept(target: str, folder: Path) -> None:
    """Make the network's source importable from the copy of a run or node, or else from the working directory.

    Args:
        target: Value of the setting `target`.
        folder: A run's folder, or a node's folder for one run.

    Raises:
        ConfigError: If the source has the name of another package, or Flower would leave it out of an app.
    """
    if is_factory(target):
        custom_source.find(target, [folder / MODEL, Path.cwd()])


def model_facts(target: str) -> dict[str, Any]:
    """Return a manifest's entry `model`: factory and hash of the source; empty for a built-in or unknown target."""
    source = custom_source.source_of(target) if is_factory(target) else None
    if source is None:
        return {}
    facts = {
        "factory": target,
        "sha256": custom_source.digest_of(source),
        "installed": custom_source.is_installed(source),
    }
    return {"model": facts}


def source_hash(target: str) -> str:
    """Return the SHA-256 of the network's source; an empty text for a built-in target."""
    return str(model_facts(target).get("model", {}).get("sha256", ""))


def travelling_source(target: str) -> Path | None:
    """Return the file or folder of the network's source that the app includes; None if nodes have it installed."""
    source = custom_source.source_of(target) if is_factory(target) else None
    return None if source is None or custom_source.is_installed(source) else source


def keep_model(target: str, folder: Path) -> None:
    """Copy the network's source into a run's or a node's folder, unless it is installed or already there."""
    source = travelling_source(target)
    if source is None:
        return
    copy = folder / MODEL / source.name
    if not copy.exists() or custom_source.digest_of(copy) != custom_source.digest_of(source):
        custom_source.copy(source, folder / MODEL)


def refuse_other_model(manifest: Mapping[str, Any], target: str) -> None:
    """Check that a run is resumed with the network's source that it started with.

    Raises:
        RunDirectoryError: If the source has changed.
    """
    before, now = manifest.get("model", {}), model_facts(target).get("model", {})
    if before.get("sha256") != now.get("sha256"):
        raise RunDirectoryError(
            f"a resumed run must train the network that it started with, but the source of {target} has changed; undo "
            f"the change, or resume from another working directory: the run's folder has the first source in {MODEL}/"
        )
