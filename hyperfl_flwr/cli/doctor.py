"""The `hyperfl doctor` command."""

from pathlib import Path
from typing import Annotated

import typer

from hyperfl_flwr.launch.console import out
from hyperfl_flwr.launch.findings import as_json, exit_code, print_finding

doctors = typer.Typer()


@doctors.command()
def doctor(
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: your cache folder.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Also check this Ray cluster and each of its hosts.")
    ] = None,
    in_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Check that this machine can run simulations and deployments; exit code 1 if there is an error."""
    from hyperfl_flwr.launch.doctor import examine

    found = []
    for finding in examine(data_root, ray_address):
        found.append(finding)
        if not in_json:
            print_finding(out, finding)
    if in_json:
        out.print(as_json(found), markup=False)
    raise typer.Exit(exit_code(found))
