"""What the parts of the command line share: two consoles, and settings as they are typed."""

import sys
import tomllib

from rich.console import Console

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar

PIPE_WIDTH = 160
"""Columns of a table that no terminal shows."""

out = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Console(stderr=True, soft_wrap=True, highlight=False)


def parse_setting(text: str) -> tuple[str, Scalar]:
    """Turn KEY=VALUE into a setting; VALUE is TOML, or else a text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set takes KEY=VALUE, got {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
