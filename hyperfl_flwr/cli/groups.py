"""Help texts: the commands of `hyperfl --help` by subject, and those of a group with whole sentences."""

import re
from collections.abc import Iterable, Sequence

import click
from typer.core import TyperGroup

from hyperfl_flwr.core.similar_names import meant

SUBJECTS = {
    "Train": ("run", "quickstart", "methods", "datasets", "features", "settings", "check-method", "doctor"),
    "Results and comparisons": ("report", "compare", "sweep", "tensorboard"),
    "Studies": ("studies", "study", "table", "figure", "record"),
    "Models": ("export", "predict", "join", "personalize"),
    "Privacy": ("audit", "attacks", "descriptors", "membership", "property", "ledger", "dp", "dp-audit"),
    "Deployments": ("deploy", "image-folders"),
}
"""Commands by subject, in the order in which they are listed."""


class PlainHelp(click.HelpFormatter):
    """Writes brackets as they are: typer escapes them for rich, which these texts are not written with."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write a list of names and their descriptions."""
        super().write_dl([(name, text.replace("\\[", "[")) for name, text in rows], col_max, col_spacing)


class PlainContext(click.Context):
    """Context of a command whose help is plain text."""

    formatter_class = PlainHelp


class ListedCommands(TyperGroup):
    """A group whose help has the first clause of each command's, which is not cut to the width of a line."""

    context_class = PlainContext

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, whose help is plain text."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.context_class = PlainContext
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; click alone suggests similar names, which typer would repeat."""
        return click.Group.resolve_command(self, ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; an option that is the name of a setting is refused with the option that sets it."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            if text := _setting_text(error):
                raise click.UsageError(f"No such option: {error.option_name}. {text}", ctx=error.ctx) from None
            raise

    def subjects(self, shown: Sequence[str]) -> dict[str, Sequence[str]]:
        """Return the names of the shown commands by the heading of their list."""
        return {"Commands": shown}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists of commands."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = {name: command for name, command in commands.items() if command and not command.hidden}
        width = max(map(len, shown), default=0)
        for subject, names in self.subjects(list(shown)).items():
            # The first columns of all lists have the same width.
            rows = [(name.ljust(width), _summary(shown[name])) for name in names if name in shown]
            if rows:
                with formatter.section(subject):
                    formatter.write_dl(rows)


class GroupedCommands(ListedCommands):
    """A group whose help lists its commands by subject, and those of other packages at the end."""

    def subjects(self, shown: Sequence[str]) -> dict[str, Sequence[str]]:
        """Return the names of the shown commands by subject."""
        rest = [name for name in shown if not any(name in names for names in SUBJECTS.values())]
        return {**SUBJECTS, "Other commands": rest}


def _setting_text(error: click.NoSuchOption) -> str:
    """Return how a setting is set whose name was given as an option; empty if it is none, or the command sets none."""
    options = [name for each in error.ctx.command.params for name in each.opts] if error.ctx else []
    if "--set" not in options:
        return ""
    from hyperfl_flwr.config.table import default_settings  # which imports more than most commands need

    keys = meant(error.option_name.lstrip("-"), default_settings())
    names = [f"--set {key}=VALUE" for key in keys[:3]]
    return f"It is a setting: {' or '.join(names)}" if names else ""


def _summary(command: click.Command) -> str:
    """Return the first clause of a command's help, which is not cut to the width of a line."""
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return re.split(r"[;.](?: |$)", text, maxsplit=1)[0]
