"""Consoles for standard output and standard error, and the parser of `--set`."""

import sys
import tomllib

from rich.console import Console

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar

PIPE_WIDTH = 160
"""Width of tables in columns where standard output is not a terminal."""

out = Console(soft_wrap=True, highlight=False, emoji=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def parse_setting(text: str) -> tuple[str, Scalar]:
    """Parse KEY=VALUE into a setting; VALUE is read as TOML, or as a string if it is not TOML.

    Raises:
        ConfigError: If there is no equals sign or no key.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set must be KEY=VALUE, got {text!r}")
    return key, parse_value(value)


def parse_value(text: str) -> Scalar:
    """Return a value that is read as TOML, or as a string if it is not TOML."""
    try:
        value: Scalar = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value
