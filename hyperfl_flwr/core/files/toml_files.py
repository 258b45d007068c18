"""Convert settings to and from TOML; imports no third-party package, so that commands without torch start fast."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.errors import InstallationError
from hyperfl_flwr.core.setting_types import Scalar


def app_file(name: str) -> Path:
    """Return the path of this installation's `pyproject.toml` or `LICENSE`.

    An installed wheel holds the file in the package `hyperfl_flwr`; a checkout holds it next to the packages.

    Raises:
        InstallationError: If the file is in neither place.
    """
    for path in (ROOT / "hyperfl_flwr" / name, ROOT / name):
        if path.is_file():
            return path
    raise InstallationError(f"{name} is missing from the installation under {ROOT}; install hyperfl-flwr again")


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Return nested tables as one flat dict with dotted keys."""
    flat: dict[str, Scalar] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def settings_text(settings: Mapping[str, Scalar]) -> str:
    """Return settings with dotted keys as the text of a TOML file, in the form that Flower accepts."""
    return "".join(f"{_toml_key(key)} = {toml_value(value)}\n" for key, value in settings.items())


def _toml_key(key: str) -> str:
    return f'"{key}"' if "." in key else key


def toml_value(value: Scalar) -> str:
    """Return a value as a TOML file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)
