"""The `hyperfl settings` command: list the settings with their descriptions and defaults."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.toml_files import toml_value
from hyperfl_flwr.launch.console import out

if TYPE_CHECKING:
    from hyperfl_flwr.core.settings import Setting

listings = typer.Typer()

WIDEST = 100
"""Maximum width of a line of text, in columns."""

INDENT = "    "


@listings.command("settings")
def list_settings(
    word: Annotated[
        str,
        typer.Argument(
            help="Part of a key, for example pfedhn or learning-rate, or package.module:METHOD for the settings of a "
            "method of your own; default: all."
        ),
    ] = "",
) -> None:
    """List the settings with their defaults, possible values and meanings."""
    from hyperfl_flwr.config.run_config import RunConfig
    from hyperfl_flwr.config.table import all_settings, topics, with_defaults
    from hyperfl_flwr.core.packages.user_code import UserCode, is_user_code
    from hyperfl_flwr.core.settings import declared
    from hyperfl_flwr.core.similar_names import nearest
    from hyperfl_flwr.methods import METHODS

    if is_user_code(word):
        UserCode("method", word).find_new()
        RunConfig.from_flat(with_defaults({"method": word}))  # refuses what a run would refuse
        found = [(topic, list(declared(topic))) for topic in METHODS[word].settings]
        if not found:
            out.print(f"{word} has no settings of its own.", markup=False)
            return
    else:
        found = [(topic, [setting for setting in declared(topic) if word in setting.key]) for topic in topics()]
    if not any(settings for _, settings in found):
        raise ConfigError(f"no setting has {word!r} in its key{nearest(word, all_settings())}")
    for topic, settings in found:
        if settings:
            out.print(f"{topic.title}\n", style="bold", markup=False)
        for setting in settings:
            out.print(described(setting, min(out.width, WIDEST)), markup=False)


def described(setting: Setting, width: int) -> str:
    """Return a setting with its default, possible values and meaning, in lines of at most `width` columns."""
    resumable = "; may change when a run is resumed" if setting.resumable else ""
    lines = [f"{setting.key} = {toml_value(setting.default)}"]
    for paragraph in (f"({setting.values}{resumable})", *setting.meaning.split("\n\n")):
        lines += textwrap.wrap(
            paragraph, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        )
    return "\n".join([*lines, ""])
