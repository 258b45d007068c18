"""The network of somebody's own that a run trains: found, recorded with the run, and found again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.models.custom import source as custom_source
from hyperfl_flwr.models.custom.source import is_factory

MODEL = "model"
"""Folder of a run, or of a node's private state, with a copy of the network's source."""


def find_model(target: str, run: Path | None = None) -> None:
    """Let Python import the network's source, from the working directory or else from a run's copy of it.

    Where it is in neither it must be installed; that it is not is found out when the network is built.

    Args:
        target: The setting.
        run: A run's folder.

    Raises:
        ConfigError: If its name is another's, or Flower would not take it.
    """
    if is_factory(target):
        custom_source.find(target, [Path.cwd(), *([] if run is None else [run / MODEL])])


def find_kept(target: str, folder: Path) -> None:
    """Let Python import the network's source from where a run or a node has kept it, or else from where we are.

    Args:
        target: The setting.
        folder: A run's, or a node's of one run.

    Raises:
        ConfigError: If its name is another's.
    """
    if is_factory(target):
        custom_source.find(target, [folder / MODEL, Path.cwd()])


def model_facts(target: str) -> dict[str, Any]:
    """Return the entry `model` of a manifest: whose network, and a hash of its source; none for a built-in one."""
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
    """Return the hash of the network's source; empty for a built-in one."""
    return str(model_facts(target).get("model", {}).get("sha256", ""))


def travelling_source(target: str) -> Path | None:
    """Return the file or folder of the network's source that the app takes along; None if all nodes must have it."""
    source = custom_source.source_of(target) if is_factory(target) else None
    return None if source is None or custom_source.is_installed(source) else source


def keep_model(target: str, folder: Path) -> None:
    """Copy the network's source into the folder of a run, or of a node for one run, unless it is installed or there."""
    source = travelling_source(target)
    if source is None:
        return
    copy = folder / MODEL / source.name
    if not copy.exists() or custom_source.digest_of(copy) != custom_source.digest_of(source):
        custom_source.copy(source, folder / MODEL)


def refuse_other_model(manifest: Mapping[str, Any], target: str) -> None:
    """Check that a run goes on with the source that it began with.

    Raises:
        RunDirectoryError: If it has changed.
    """
    before, now = manifest.get("model", {}), model_facts(target).get("model", {})
    if before.get("sha256") != now.get("sha256"):
        raise RunDirectoryError(
            f"a resumed run must train the network that it began with, but the source of {target} has changed; take "
            f"the change back, or resume from another folder: the run's own has the first source in {MODEL}/"
        )
