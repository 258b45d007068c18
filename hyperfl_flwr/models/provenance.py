"""Find what a run's network needs besides this project's code, record it with the run, and find it again.

That is the source of a user-supplied network, which is copied to the run's folder, or the weights of a pre-trained
body, of which only the hash is recorded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.models.custom import source as custom_source
from hyperfl_flwr.models.custom.source import is_factory
from hyperfl_flwr.models.pretrained.names import is_pretrained, parse

MODEL = "model"
"""Folder with a copy of the network's source, in a run's folder or in a node's private state."""


def needs_files(target: str) -> bool:
    """Return whether a network needs files besides this project's code: a user's source, or weights of a body."""
    return is_factory(target) or is_pretrained(target)


def find_model(target: str, weights: str, run: Path | None = None) -> None:
    """Make the network's source importable from the working directory, or else from the copy in a run's folder.

    A source that is in neither must be installed. What is missing raises an error only when it is needed.

    Args:
        target: Value of the setting `target`.
        weights: Value of the setting `lpm.weights`, see `use_weights`.
        run: A run's folder.

    Raises:
        ConfigError: If the source has the name of another package, or Flower would leave it out of an app.
    """
    use_weights(weights)
    if is_factory(target):
        custom_source.find(target, [Path.cwd(), *([] if run is None else [run / MODEL])])


def find_kept(target: str, folder: Path | None, weights: str = "") -> None:
    """Make the network's source importable from the copy of a run or node, or else from the working directory.

    Args:
        target: Value of the setting `target`.
        folder: A run's folder, or a node's folder for one run; None for the working directory alone.
        weights: Value of the setting `lpm.weights`, see `use_weights`; empty to keep what this process uses.

    Raises:
        ConfigError: If the source has the name of another package, or Flower would leave it out of an app.
    """
    if weights:
        use_weights(weights)
    if is_factory(target):
        custom_source.find(target, [*([] if folder is None else [folder / MODEL]), Path.cwd()])


def use_weights(weights: str) -> None:
    """Choose where this process takes the weights of pre-trained bodies from.

    Args:
        weights: Value of the setting `lpm.weights`: `auto`, or the absolute path of a file.
    """
    from hyperfl_flwr.models.pretrained.weights import choose  # deferred: imports torch

    choose(weights)


def model_facts(target: str, weights: str) -> dict[str, Any]:
    """Return a manifest's entry `model`, with the hash of the source or of the weights; empty for other targets.

    Args:
        target: Value of the setting `target`.
        weights: Value of the setting `lpm.weights`; empty for what this process uses.

    Raises:
        ConfigError: If the weights of a pre-trained body cannot be loaded.
    """
    if is_pretrained(target):
        from hyperfl_flwr.models.pretrained.weights import load_body

        body = parse(target).body
        return {"model": {"body": str(body), "sha256": load_body(body, weights).sha256}}
    source = custom_source.source_of(target) if is_factory(target) else None
    if source is None:
        return {}
    facts = {
        "factory": target,
        "sha256": custom_source.digest_of(source),
        "installed": custom_source.is_installed(source),
    }
    return {"model": facts}


def network_hash(target: str, weights: str) -> str:
    """Return the SHA-256 of a network's source or of its body's weights; an empty text for other targets.

    Args:
        target: Value of the setting `target`.
        weights: Value of the setting `lpm.weights`; empty for what this process uses.

    Raises:
        ConfigError: If the weights of a pre-trained body cannot be loaded.
    """
    return str(model_facts(target, weights).get("model", {}).get("sha256", ""))


def body_hash(target: str, weights: str = "") -> str:
    """Return the SHA-256 of the weights of a target's pre-trained body; an empty text for other targets.

    Args:
        target: Value of the setting `target`.
        weights: Value of the setting `lpm.weights`; empty for what this process uses.

    Raises:
        ConfigError: If the weights cannot be loaded.
    """
    return network_hash(target, weights) if is_pretrained(target) else ""


def recorded_body(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the weights of a run's pre-trained body; an empty text for other targets."""
    facts = manifest.get("model", {})
    return str(facts["sha256"]) if "body" in facts else ""


def refuse_other_body(target: str, sha256: str) -> None:
    """Check that this process has the weights of the body with which a model was trained.

    Args:
        target: The model's target network.
        sha256: Hash of the weights, from the model's recipe; empty for other networks.

    Raises:
        ConfigError: If the weights are others, or cannot be loaded.
    """
    if (found := body_hash(target)) != sha256:
        text = f"the model was trained with the weights {sha256[:12]} of {target}, not with {found[:12]}"
        raise ConfigError(f"{text}; give the file of the training as lpm.weights, or its weights to `hyperfl predict`")


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


def refuse_other_model(manifest: Mapping[str, Any], target: str, weights: str) -> None:
    """Check that a run is resumed with the network's source, or the body's weights, that it started with.

    Args:
        manifest: The run's manifest.
        target: Value of the setting `target`.
        weights: Value of the setting `lpm.weights`.

    Raises:
        RunDirectoryError: If they have changed.
        ConfigError: If the weights of a pre-trained body cannot be loaded.
    """
    if manifest.get("model", {}).get("sha256", "") == network_hash(target, weights):
        return
    if is_pretrained(target):
        raise RunDirectoryError(
            f"a resumed run must train with the weights that it started with, but those of {target} are others now; "
            f"take the file that lpm.weights named then"
        )
    raise RunDirectoryError(
        f"a resumed run must train the network that it started with, but the source of {target} has changed; undo "
        f"the change, or resume from another working directory: the run's folder has the first source in {MODEL}/"
    )
