"""Read the commands in the documentation's pages, and parse them without running them."""

import functools
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import click
import typer

from hyperfl_flwr.cli.main import cli

SEPARATORS = frozenset({"&&", "||", "|", ";", "&"})


@functools.cache
def command_line() -> click.Command:
    """Return the whole command line; making it takes long."""
    return typer.main.get_command(cli)


def options_of(words: list[str]) -> Mapping[str, Any]:
    """Return the options of a command, as typer reads them; raises click.UsageError if it does not know one."""
    command: click.Command = command_line()
    context = click.Context(command)
    while isinstance(command, click.Group):
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
    return command.make_context(command.name, list(words)).params


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words after `hyperfl` of each command in a page's blocks of code; shell variables are replaced."""
    text = re.sub(r"\\\n *", " ", text)
    fenced = re.compile(r"^ *```(?:bash|console)\b[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = "\n".join(re.findall(r"^ {4,}((?:\$ )?hyperfl .*)$", rest, re.MULTILINE))
    for block in (*fenced.findall(text), indented):
        variables: dict[str, str] = {}
        for line in block.splitlines():
            if assigned := re.match(r' *(\w+)="([^"]*)"$', line):
                variables[assigned[1]] = _replaced(assigned[2], variables)
            else:
                yield from _commands(_replaced(line, variables))


def _replaced(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda found: variables.get(found[1], "1"), text)


def _commands(line: str) -> Iterator[list[str]]:
    """Yield the commands of a line of a shell; words before `hyperfl` are an environment or a path to it."""
    if not re.match(r" *(?:\$ )?(?:\w+=\S+ )*\S*\bhyperfl ", line):
        return
    command: list[str] = []
    for word in (*shlex.split(line, comments=True), ";"):
        if word not in SEPARATORS:
            command.append(word)
            continue
        names = [number for number, each in enumerate(command) if each.rpartition("/")[2] == "hyperfl"]
        if names and command[names[0] + 1 :]:
            yield [each for each in command[names[0] + 1 :] if each != "..."]
        command = []
