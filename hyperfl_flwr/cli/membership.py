"""The `hyperfl membership` command: who recognises the samples that a client has trained on."""

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

memberships = typer.Typer()


@memberships.command("membership")
def run_membership(
    run_directory: RunDirectory = None,
    method: Method = None,
    dataset: DatasetName = None,
    data_root: DataRoot = None,
    federations: Annotated[
        int, typer.Option(help="Number of federations; each is attacked with the others as shadows. Even.", min=8)
    ] = 16,
    jobs: Jobs = None,
    set_: Changes = None,
    output: Annotated[Path, typer.Option(help="Folder of the result.")] = Path("runs/membership"),
) -> None:
    """Membership inference: train small federations, and let attackers tell members from non-members.

    Each client trains on a random half of its samples. Prints a verdict for each attacker, and the report's path;
    repeat the command to continue.
    """
    from hyperfl_flwr.audit.membership.game import MembershipGame
    from hyperfl_flwr.audit.membership.report import write_report
    from hyperfl_flwr.audit.membership.results import sentence, sentence_left_out

    run = run_directory and run_directory.absolute()
    settings = game_settings(run, method, dataset, data_root, set_)
    game = MembershipGame(settings=settings, federations=federations, run=run)
    folder = output.absolute()
    document = write_report(game, play_all(game, folder, jobs), folder)
    for view in document["views"]:
        out.print(sentence(document, view), markup=False)
    for view in document["left_out"]:
        out.print(sentence_left_out(document, view), markup=False)
    out.print(str(folder / "membership.html"), markup=False)
