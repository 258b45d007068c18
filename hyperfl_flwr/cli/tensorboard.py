"""The command line's way to TensorBoard."""

from pathlib import Path
from typing import Annotated

import typer

from hyperfl_flwr.launch.console import out

boards = typer.Typer()


@boards.command()
def tensorboard(
    run_directory: Annotated[Path, typer.Argument(help="A run's folder.")],
    clients: Annotated[bool, typer.Option("--clients", help="Also write curves of each client.")] = False,
) -> None:
    """Write a run's metrics as TensorBoard's event files; prints their folder, for `tensorboard --logdir`."""
    from hyperfl_flwr.launch.tensorboard import write_event_files

    out.print(str(write_event_files(run_directory.absolute(), per_client=clients)), markup=False)
