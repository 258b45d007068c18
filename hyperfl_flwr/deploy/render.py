"""Renders the files of a deployment (scripts, units, settings) from the templates in `templates`.

A value gets into a file only as a number or through a filter that quotes it for the file's syntax; a value without a
filter is an error, as is one that was not given.
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
    """A text that may stand in a file as it is."""


def render(template: str, **values: object) -> str:
    """Return the text of a deployment's file.

    Args:
        template: Name of a file in `TEMPLATES`.
        values: What its placeholders stand for.

    Raises:
        jinja2.UndefinedError: If a value is missing.
        ValueError: If a value cannot be written in the file's syntax.
    """
    return jinja_environment().get_template(template).render(values)


@cache
def jinja_environment() -> "Environment":
    """Return what reads the templates: undefined values and values without a filter are errors."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # the process that follows a run needs none

    environment = Environment(
        autoescape=False,  # noqa: S701 - escapes HTML, and none of the files is HTML: see `_FILTERS`
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

    if isinstance(value, int | _Quoted | Undefined):  # jinja2 raises its own error for what is undefined
        return value
    raise ValueError(f"a value in a template must be a number or pass one of {', '.join(_FILTERS)}; got {value!r}")


def _printable(value: object) -> str:
    text = str(value)
    if not text.isprintable():
        raise ValueError(f"a value in a template must have printable characters only; got {text!r}")
    return text


def _bare(value: object) -> _Quoted:
    """Return a name, an address or a path that every syntax reads as it is, without quotes."""
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9._/-]+", text):
        raise ValueError(f"a value without quotes must have letters, digits and ._/- only; got {text!r}")
    return _Quoted(text)


def _shell(value: object) -> _Quoted:
    """Return one word of a POSIX shell, whose quotes hold every character of a path."""
    return _Quoted(shlex.quote(str(value)))


def _toml(value: object) -> _Quoted:
    """Return a TOML string."""
    return _Quoted(as_toml(str(value)))


def _nginx(value: object) -> _Quoted:
    """Return a quoted string of nginx, which has no way to write a dollar sign."""
    text = _printable(value)
    if "$" in text:
        raise ValueError(f"a value for nginx must have no dollar sign; got {text!r}")
    return _Quoted('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"')


def _systemd_value(value: object) -> _Quoted:
    """Return a value that systemd takes without quotes, as of `User=`: only its specifiers (%h) are escaped."""
    return _Quoted(_printable(value).replace("%", "%%"))


def _systemd_path(value: object) -> _Quoted:
    """Return a quoted path of a systemd unit."""
    text = _printable(value).replace("\\", "\\\\").replace('"', '\\"')
    return _systemd_value(f'"{text}"')


def _systemd_argument(value: object) -> _Quoted:
    """Return a quoted argument of `ExecStart=`, in which systemd also replaces variables ($HOME)."""
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
