"""Render HTML pages from the templates in `templates/`: one style, everything escaped, one file per page.

A page holds its style and its figures and no script, and loads nothing: it opens without a network, and its content
security policy forbids a browser to run or load anything else.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import Task

TEMPLATES = Path(__file__).parent / "templates"


NOTHING = "–"
"""Text for a missing value."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings as text, for a page.

    Attributes:
        changed: Key, value and default of each setting that differs from its default.
        others: Key and value of each other setting.
    """

    changed: list[tuple[str, str, str]]
    others: list[tuple[str, str]]

    @classmethod
    def of(
        cls, settings: Mapping[str, Scalar], defaults: Mapping[str, Scalar], resolved: Mapping[str, object]
    ) -> "Settings":
        """Compare settings with the defaults.

        Args:
            settings: Settings as given, by key.
            defaults: Default values, by key.
            resolved: Known values that `auto` became, by key; they are shown in brackets.
        """
        shown = {key: plain(value) for key, value in settings.items()}
        shown |= {
            key: f"auto ({plain(resolved[key])})"
            for key, value in settings.items()
            if value == "auto" and resolved.get(key, "auto") != "auto"
        }
        changed = [key for key, value in settings.items() if value != defaults.get(key)]
        return cls(
            changed=[(key, shown[key], plain(defaults.get(key))) for key in changed],
            others=[(key, value) for key, value in shown.items() if key not in changed],
        )


def write_page(file: Path, template: str, *, mode: int = 0o644, **content: object) -> None:
    """Render a page and replace a file with it, atomically.

    Args:
        file: File to write.
        template: File name of the template.
        mode: Permissions of the file.
        **content: Variables of the template. All texts are escaped, also those of this project.

    Raises:
        RunDirectoryError: If the file cannot be written.
    """
    text = page(template, **content)
    try:
        write_atomically(file, text.encode(), mode=mode)
    except OSError as error:
        raise RunDirectoryError(f"{file} cannot be written: {error.strerror}; choose another output") from None


def page(template: str, **content: object) -> str:
    """Return a page as text, see `write_page`."""
    return _environment().get_template(template).render(content)


def plain(value: object) -> str:
    """Return a setting or a manifest value as text: booleans as in TOML, lists with commas, a dash for no value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(plain, value)) or NOTHING
    return NOTHING if value is None or value == "" else str(value)


def percent(share: float | None) -> str:
    """Return a share in [0, 1] in percent, `none` for None."""
    return "none" if share is None else f"{100 * share:.2f} %"


def interval_text(interval: Sequence[float] | None) -> str:
    """Return an interval of a share in percent, such as `81.2 to 93.4 %`, cut at 0 and 100 %; a dash for None."""
    return NOTHING if interval is None else f"{100 * max(0.0, interval[0]):.1f} to {100 * min(1.0, interval[1]):.1f} %"


def score_interval_text(interval: Sequence[float] | None, task: Task) -> str:
    """Return an interval of a task's main score; a dash for None."""
    if task.has_shares or interval is None:
        return interval_text(interval)
    return f"{interval[0]:.3f} to {interval[1]:.3f}"


def megabytes(size: float) -> str:
    """Return a number of bytes in MB of 10^6 bytes."""
    return f"{size / 1e6:.3f} MB"


def moment(time: str | None) -> str:
    """Return a time of a manifest in UTC, such as `2026-11-30 16:49:40 UTC`; a dash for None."""
    return NOTHING if time is None else f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def sentence(text: str) -> str:
    """Return a warning of the log, which follows a name or a colon there, as a sentence of its own."""
    return f"{text[:1].upper()}{text[1:]}."


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (counted, megabytes, moment, percent, plain, sentence)
    environment.filters |= {each.__name__: each for each in filters}
    return environment


def _printable(value: Any) -> Any:  # noqa: ANN401 - any value that a template prints
    """Replace unprintable characters of texts, such as those that reverse the direction of writing."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in value)
    return value
