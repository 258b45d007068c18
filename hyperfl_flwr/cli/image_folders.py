"""The `hyperfl image-folders` command: write sample data to try a deployment."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.console import err, out, parse_setting

folders = typer.Typer()


@folders.command("image-folders")
def image_folders(
    output: Annotated[Path, typer.Argument(help="Folder to create.")],
    dataset: Annotated[str, typer.Option(help="Data set (see `hyperfl datasets`).")] = "digits",
    num_clients: Annotated[int, typer.Option(help="Number of clients N.", min=1)] = 2,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: your cache folder.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting with KEY=VALUE; repeatable.")
    ] = None,
) -> None:
    """Divide a data set among clients and write it as class folders of PNG files; prints each client's folder."""
    from hyperfl_flwr.deploy.image_folders import write_image_folders

    changes: dict[str, Scalar] = dict(parse_setting(text) for text in set_ or ())
    changes |= {"dataset": dataset, "num-clients": num_clients}
    if data_root is not None:
        changes["data-root"] = str(data_root.absolute())
    with Progress(console=err, transient=True) as progress:
        written = write_image_folders(changes, output.absolute(), progress)
    for folder in written:
        out.print(str(folder), markup=False)
