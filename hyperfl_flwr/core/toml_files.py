"""Settings as TOML files hold them, in a module that imports no third-party package: commands without torch use it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.errors import InstallationError
from hyperfl_flwr.core.setting_types import Scalar


def app_file(name: str) -> Path:
    """Return `pyproject.toml` or `LICENSE` of this installation: beside the packages, or inside an installed wheel.

    Raises:
        InstallationError: If the file is in neither place.
    """
    for path in (ROOT / "hyperfl_flwr" / name, ROOT / name):
        if path.is_file():
            return path
    raise InstallationError(f"{name} is missing from the installation under {ROOT}; install hyperfl-flwr again")


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Turn nested tables into dotted keys."""
    flat: dict[str, Scalar] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def settings_text(settings: Mapping[str, Scalar]) -> str:
    """Return a TOML file of settings with dotted keys, as Flower takes it."""
    return "".join(f"{_toml_key(key)} = {toml_value(value)}\n" for key, value in settings.items())


def _toml_key(key: str) -> str:
    return f'"{key}"' if "." in key else key


def toml_value(value: Scalar) -> str:
    """Return a value as a TOML file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)
