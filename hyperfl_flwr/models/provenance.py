"""Find what a run needs besides this project's code, record it with the run, and find it again.

That is the source of a network or a method of the user's own, which is copied to the run's folder, and the weights of a
pre-trained body, of which only the hash is recorded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.packages.user_code import UserCode, is_user_code, user_code_in
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.models.pretrained.names import is_pretrained, parse


def needs_files(target: str) -> bool:
    """Return whether a network needs files besides this project's code: a user's source, or weights of a body."""
    return is_user_code(target) or is_pretrained(target)


def find_sources(settings: Mapping[str, Scalar], run: Path | None = None) -> None:
    """Make the user's own code importable from the working directory, or else from the copy in a run's folder.

    Needed before the settings are checked, which a method of the user's own extends. A source that is in neither must
    be installed. What is missing raises an error only when it is needed.

    Args:
        settings: Settings of a run by dotted key, of which `method` and `target` may name code.
        run: A run's folder.

    Raises:
        ConfigError: If the source has the name of another package, or Flower would leave it out of an app.
    """
    for code in user_code_in(settings):
        code.find_new(run)


def keep_sources(settings: Mapping[str, Scalar], folder: Path) -> None:
    """Copy the user's own code into a run's folder, unless it is installed or already there."""
    for code in user_code_in(settings):
        code.keep(folder)


def travelling_sources(settings: Mapping[str, Scalar]) -> list[Path]:
    """Return the files or folders of the user's own code that the app must include, each once."""
    found = [code.travelling for code in user_code_in(settings)]
    return list(dict.fromkeys(source for source in found if source is not None))


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
    facts = UserCode("target", target).facts() if is_user_code(target) else {}
    return {"model": facts} if facts else {}


def method_facts(method: str) -> dict[str, Any]:
    """Return a manifest's entry `method`, with the hash of the source; empty for built-in methods."""
    facts = UserCode("method", method).facts() if is_user_code(method) else {}
    return {"method": facts} if facts else {}


def method_hash(method: str) -> str:
    """Return the SHA-256 of the source of a method of the user's own; an empty text for built-in methods."""
    return str(method_facts(method).get("method", {}).get("sha256", ""))


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


def changed_sources(manifest: Mapping[str, Any], settings: Mapping[str, Scalar]) -> list[str]:
    """Say which of the user's own code differs between a run's manifest and this process."""
    found = [
        (code, str(manifest.get(code.entry, {}).get("sha256", "")), code.sha256) for code in user_code_in(settings)
    ]
    return [
        f"source {before[:12]} of {code.name} instead of {now[:12]}" for code, before, now in found if before != now
    ]


def refuse_changed_sources(manifest: Mapping[str, Any], settings: Mapping[str, Scalar]) -> None:
    """Check that a run is resumed with the user's own code, and the body's weights, that it started with.

    Args:
        manifest: The run's manifest.
        settings: The run's settings by dotted key.

    Raises:
        RunDirectoryError: If they have changed.
        ConfigError: If the weights of a pre-trained body cannot be loaded.
    """
    for code in user_code_in(settings):
        code.refuse_change(manifest)
    target, weights = str(settings["target"]), str(settings["lpm.weights"])
    if is_pretrained(target) and recorded_body(manifest) != network_hash(target, weights):
        raise RunDirectoryError(
            f"a resumed run must train with the weights that it started with, but those of {target} have changed; "
            f"take the file that lpm.weights named then"
        )
