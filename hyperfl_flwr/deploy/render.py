"""Render the files of a deployment (scripts, units, settings) from the templates in `templates`.

A value is written only as a number or through a filter that quotes it for the file's syntax. A text without a filter
and a missing value are errors, so that no value can inject commands or settings.
"""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperfl_flwr.deploy.node_settings import as_toml

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")


class _Quoted(str):
    """A text that a filter has quoted, and that is written unchanged."""


def render(template: str, **values: object) -> str:
    """Return the text of a deployment's file.

    Args:
        template: Name of a file in `TEMPLATES`.
        values: Values of its placeholders.

    Raises:
        jinja2.UndefinedError: If a value is missing.
        ValueError: If a value cannot be written in the file's syntax.
    """
    return jinja_environment().get_template(template).render(values)


@cache
def jinja_environment() -> "Environment":
    """Return the Jinja environment of the templates, in which missing and unquoted values are errors."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # the process that follows a run needs none

    environment = Environment(
        autoescape=False,  # noqa: S701 - escapes HTML only; these files are quoted by `_FILTERS`
        finalize=_refuse_unquoted,
        keep_trailing_newline=True,
        loader=FileSystemLoader(TEMPLATES),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= _FILTERS
    return environment


def _refuse_unquoted(value: object) -> object:
    from jinja2 import Undefined

    if isinstance(value, int | _Quoted | Undefined):  # jinja2 raises its own error for undefined values
        return value
    raise ValueError(f"a value in a template must be a number or pass one of {', '.join(_FILTERS)}; got {value!r}")


def _printable(value: object) -> str:
    text = str(value)
    if not text.isprintable():
        raise ValueError(f"a value in a template must contain only printable characters; got {text!r}")
    return text


def _bare(value: object) -> _Quoted:
    """Return a name, an address or a path of characters that need no quotes in any syntax."""
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9._/-]+", text):
        raise ValueError(f"a value without quotes must contain only letters, digits and ._/-; got {text!r}")
    return _Quoted(text)


def _shell(value: object) -> _Quoted:
    """Quote a value as one word of a POSIX shell, whose quotes hold every character of a path."""
    return _Quoted(shlex.quote(str(value)))


def _toml(value: object) -> _Quoted:
    """Quote a value as a TOML string."""
    return _Quoted(as_toml(str(value)))


def _nginx(value: object) -> _Quoted:
    """Quote a value as a string of nginx, which cannot escape a dollar sign."""
    text = _printable(value)
    if "$" in text:
        raise ValueError(f"a value for nginx must not contain a dollar sign; got {text!r}")
    return _Quoted('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"')


def _systemd_value(value: object) -> _Quoted:
    """Escape a value that systemd reads without quotes, such as `User=`: only specifiers (%h) need it."""
    return _Quoted(_printable(value).replace("%", "%%"))


def _systemd_path(value: object) -> _Quoted:
    """Quote a path in a systemd unit."""
    text = _printable(value).replace("\\", "\\\\").replace('"', '\\"')
    return _systemd_value(f'"{text}"')


def _systemd_argument(value: object) -> _Quoted:
    """Quote an argument of `ExecStart=`, where systemd also expands variables ($HOME)."""
    return _Quoted(_systemd_path(value).replace("$", "$$"))


_FILTERS: dict[str, Any] = {
    "bare": _bare,
    "nginx": _nginx,
    "shell": _shell,
    "systemd_argument": _systemd_argument,
    "systemd_path": _systemd_path,
    "systemd_value": _systemd_value,
    "toml": _toml,
}
