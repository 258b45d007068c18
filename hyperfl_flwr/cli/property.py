"""The `hyperfl property` command: who can tell which share of a client's samples is of a class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyperfl_flwr.cli.shadow_federations import (
    Changes,
    DataRoot,
    DatasetName,
    Jobs,
    Method,
    RunDirectory,
    game_settings,
    play_all,
)
from hyperfl_flwr.launch.console import out

properties = typer.Typer()


@properties.command("property")
def run_property(
    run_directory: RunDirectory = None,
    method: Method = None,
    dataset: DatasetName = None,
    data_root: DataRoot = None,
    label: Annotated[int, typer.Option(help="The class whose share is estimated, from 0.", min=0)] = 0,
    largest_share: Annotated[
        float, typer.Option(help="Largest share of the class in a client's samples.", min=0.0, max=1.0)
    ] = 0.6,
    federations: Annotated[
        int, typer.Option(help="Number of federations; each is attacked with half of them as shadows. Even.", min=8)
    ] = 32,
    jobs: Jobs = None,
    set_: Changes = None,
    output: Annotated[Path, typer.Option(help="Folder of the result.")] = Path("runs/property"),
) -> None:
    """Property inference: train small federations, and let attackers estimate the share of a class.

    Each client has a different share of the class. Prints a verdict for each attacker, and the report's path; repeat
    the command to continue.
    """
    from hyperfl_flwr.audit.property.game import PropertyGame
    from hyperfl_flwr.audit.property.report import write_report
    from hyperfl_flwr.audit.property.results import sentence

    run = run_directory and run_directory.absolute()
    settings = game_settings(run, method, dataset, data_root, set_)
    game = PropertyGame(settings=settings, federations=federations, run=run, label=label, largest_share=largest_share)
    folder = output.absolute()
    document = write_report(game, play_all(game, folder, jobs), folder)
    for view in document["views"]:
        out.print(sentence(document, view), markup=False)
    out.print(str(folder / "property.html"), markup=False)
