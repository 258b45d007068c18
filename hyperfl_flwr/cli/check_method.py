"""The `hyperfl check-method` command."""

from pathlib import Path
from typing import Annotated

import typer

from hyperfl_flwr.launch.console import out, parse_setting
from hyperfl_flwr.launch.findings import as_json, exit_code, print_finding

contracts = typer.Typer()


@contracts.command("check-method")
def check(
    name: Annotated[str, typer.Argument(help="package.module:METHOD of your own, or a method of `hyperfl methods`.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the small federations, KEY=VALUE; repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder in which the runs are kept; default: none.")] = None,
    in_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Train small federations and list the rules that a method breaks; exit code 1 if there are any."""
    from hyperfl_flwr.contract.check import check_method

    found = []
    changes = dict(parse_setting(text) for text in set_ or ())
    for finding in check_method(name, changes, output and output.absolute()):
        found.append(finding)
        if not in_json:
            print_finding(out, finding)
    if in_json:
        out.print(as_json(found), markup=False)
    raise typer.Exit(exit_code(found))
