"""List the commands of `hyperfl --help` by subject."""

import re

import click
from typer.core import TyperGroup

SUBJECTS = {
    "Train": ("run", "quickstart", "methods", "datasets", "features", "settings", "check-method", "doctor"),
    "Results and comparisons": ("report", "compare", "sweep", "tensorboard"),
    "Studies": ("studies", "study", "table", "figure", "record"),
    "Models": ("export", "predict", "join", "personalize"),
    "Privacy": ("audit", "attacks", "descriptors", "membership", "property", "ledger", "dp", "dp-audit"),
    "Deployments": ("deploy", "image-folders"),
}
"""Commands by subject, in the order in which they are listed."""


class GroupedCommands(TyperGroup):
    """A group whose help lists its commands by subject, and those of other packages at the end."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; click alone suggests similar names, which typer would repeat."""
        return click.Group.resolve_command(self, ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists of commands."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = {name: command for name, command in commands.items() if command and not command.hidden}
        width = max(map(len, shown), default=0)
        rest = tuple(name for name in shown if not any(name in names for names in SUBJECTS.values()))
        for subject, names in {**SUBJECTS, "Other commands": rest}.items():
            # The first columns of all lists have the same width.
            rows = [(name.ljust(width), _summary(shown[name])) for name in names if name in shown]
            if rows:
                with formatter.section(subject):
                    formatter.write_dl(rows)


def _summary(command: click.Command) -> str:
    """Return the first clause of a command's help, which is not cut to the width of a line."""
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return re.split(r"[;.](?: |$)", text, maxsplit=1)[0]
