"""The `hyperfl tensorboard` command."""

from pathlib import Path
from typing import Annotated

import typer

from hyperfl_flwr.launch.console import out

boards = typer.Typer()


@boards.command()
def tensorboard(
    run_directory: Annotated[Path, typer.Argument(help="Folder of the run.")],
    clients: Annotated[bool, typer.Option("--clients", help="Also write the curves of each client.")] = False,
) -> None:
    """Write a run's metrics as TensorBoard event files; prints their folder, for `tensorboard --logdir`."""
    from hyperfl_flwr.launch.tensorboard import write_event_files

    out.print(str(write_event_files(run_directory.absolute(), per_client=clients)), markup=False)
