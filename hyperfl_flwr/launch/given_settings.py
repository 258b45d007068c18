"""Take settings and paths as a caller from Python gives them."""

import sys
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.sample_format import from_here


def absolute(path: PathLike[str] | str) -> Path:
    """Return an absolute path, relative to the working directory, with `~` as the user's home."""
    return Path(path).expanduser().absolute()


def changed_settings(
    settings: Mapping[str, Scalar] | None = None, **named: Scalar | PathLike[str] | None
) -> dict[str, Scalar]:
    """Merge settings from a mapping and from keyword arguments, with absolute paths.

    Args:
        settings: Settings by their keys; a value may be a scalar of numpy.
        **named: Settings that override these, with underscores instead of hyphens; None is left out.

    Returns:
        The settings by their keys.

    Raises:
        ConfigError: If `settings` is no mapping, or a value is not a string, a number or a boolean.
    """
    if settings is not None and not isinstance(settings, Mapping):
        kind = type(settings).__name__
        raise ConfigError(f'settings must be a dictionary, such as {{"local-epochs": 1}}; got a {kind}')
    given: dict[str, Any] = {name.replace("_", "-"): value for name, value in named.items() if value is not None}
    for key in {"data-root", "output", "resume"} & given.keys():
        given[key] = str(absolute(given[key]))
    changes: dict[str, Any] = {key: plain_scalar(value) for key, value in {**(settings or {}), **given}.items()}
    for key, value in changes.items():
        if not isinstance(value, str | int | float | bool):  # a nested table would be ignored without an error
            raise ConfigError(
                f"the setting {key} must be a string, a number or a boolean, got {value!r}; settings of a section have "
                f"a dot in their key, for example data.partition"
            )
    if isinstance(own := changes.get("dataset"), str):
        changes["dataset"] = from_here(own, has_data_root=bool(changes.get("data-root")))
    return changes


def plain_scalar(value: object) -> object:
    """Return a scalar of numpy as a value of Python, and all else as it is; does not import numpy."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value
