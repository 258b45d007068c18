"""HTML pages from the templates in `templates/`: one look, everything escaped, one file each.

A page holds its style and its figures and no script, and loads nothing: it can be opened without a network, and its
content security policy lets a browser do no more.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.storage import write_atomically

TEMPLATES = Path(__file__).parent / "templates"


NOTHING = "–"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings as a page shows them.

    Attributes:
        changed: Key, value and default of those that differ from the defaults.
        others: Key and value of all others.
    """

    changed: list[tuple[str, str, str]]
    others: list[tuple[str, str]]

    @classmethod
    def of(
        cls, settings: Mapping[str, Scalar], defaults: Mapping[str, Scalar], resolved: Mapping[str, object]
    ) -> "Settings":
        """Compare settings with the defaults.

        Args:
            settings: As they were asked for, by key.
            defaults: By key.
            resolved: What each `auto` became, by key, where it is known; it is shown in brackets.
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
        file: The file.
        template: Name of a template.
        mode: Permissions of the file.
        **content: The template's variables. Texts are escaped, whoever has written them.
    """
    write_atomically(file, _environment().get_template(template).render(content).encode(), mode=mode)


def plain(value: object) -> str:
    """Return a setting or a value of a manifest as text: as TOML has it, lists with commas, a dash for nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(plain, value)) or NOTHING
    return NOTHING if value is None or value == "" else str(value)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 client`, `2 clients`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float | None) -> str:
    """Return a share in [0, 1] in percent, `none` for None."""
    return "none" if share is None else f"{100 * share:.2f} %"


def megabytes(size: float) -> str:
    """Return a number of bytes in MB of 10^6 bytes."""
    return f"{size / 1e6:.3f} MB"


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
    environment.filters |= {"counted": counted, "percent": percent, "megabytes": megabytes, "plain": plain}
    return environment


def _printable(value: Any) -> Any:  # noqa: ANN401 - what a template can show
    """Replace what has no glyph in texts, such as characters that reverse the direction of writing."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in value)
    return value
