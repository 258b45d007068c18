"""The `hyperfl features` command: turn images with users into a file of feature vectors."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.console import err, out

if TYPE_CHECKING:
    from hyperfl_flwr.data.features.archive import Written

vectors = typer.Typer()


@vectors.command()
def features(
    images: Annotated[Path, typer.Option(help="Folder of the images; without --split, of class folders.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .npz file to write.")],
    split: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Training images with their users and classes.")
    ] = None,
    test: Annotated[Path | None, typer.Option(metavar="CSV", help="Test images with their classes.")] = None,
    column: Annotated[
        str, typer.Option(help="Column of --split with the users, for example geo_300 in the files of TFF.")
    ] = "user_id",
    weights: Annotated[
        str, typer.Option(metavar="auto|FILE", help="Weights of MobileNetV2: torchvision's download, or a state dict.")
    ] = "auto",
    batch: Annotated[int, typer.Option(help="Number of images that the network takes at a time.", min=1)] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:NUMBER.")] = "auto",
    min_images: Annotated[int, typer.Option(help="Leave out users with fewer usable training images.", min=1)] = 1,
    fail_on_missing: Annotated[
        bool, typer.Option("--fail-on-missing", help="Write nothing if an image is missing or broken.")
    ] = False,
) -> None:
    """Compute MobileNetV2 features of images with users, as an `npz:` data set; repeat the command to continue.

    Prints the paths of the file and of a report with hashes, numbers and missing images.
    """
    # Deferred: importing torch would delay every command.
    from hyperfl_flwr.core.arithmetic import set_arithmetic
    from hyperfl_flwr.core.device import resolve_device
    from hyperfl_flwr.data.features.archive import Rules, inputs_of, write_features
    from hyperfl_flwr.data.features.listing import read_folder, read_split
    from hyperfl_flwr.data.features.parts import Computation
    from hyperfl_flwr.launch.core_locks import usable_cores
    from hyperfl_flwr.models.pretrained.features import MOBILENET, load_mobilenet

    path = _output_file(output)
    if split is None and (test is not None or column != "user_id"):
        raise ConfigError("--test and --column belong to --split; give --split, or leave them out")
    folder = images.expanduser().absolute()
    listing = read_folder(folder) if split is None else read_split(split, test, column)
    place = resolve_device(device)
    set_arithmetic("fp32", deterministic=False, device=place)
    network = load_mobilenet(weights if weights == "auto" else str(Path(weights).expanduser().absolute()), place)
    files = {name: file for name, file in (("split", split), ("test", test)) if file is not None}
    options = {
        **({"column": column} if split is not None else {}),
        "network": str(MOBILENET),
        "weights": network.sha256,
        "batch": batch,
        "device": network.device.type,
    }
    computation = Computation(
        network=network, batch=batch, workers=len(usable_cores()), inputs=inputs_of(files, options)
    )
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        task = bar.add_task("computing features", total=len(listing.images))
        written = write_features(
            listing,
            folder,
            path,
            computation,
            Rules(fail_on_missing=fail_on_missing, min_images=min_images),
            lambda count: bar.advance(task, count),
        )
    _print_written(written)


def _output_file(output: Path) -> Path:
    """Return the absolute path of the file to write.

    Raises:
        HyperFLError: If it is no .npz file, or cannot lie there.
    """
    from hyperfl_flwr.data.features.places import check_places

    path = output.absolute()
    if path.suffix != ".npz":
        raise ConfigError(f"--output must be a file that ends with .npz, got {output}")
    if not path.parent.is_dir():
        raise ConfigError(f"--output must lie in an existing folder, but there is no {path.parent}; make it first")
    check_places(path)
    return path


def _print_written(written: "Written") -> None:
    for note in written.notes:
        err.print(f"note: {note}", markup=False)
    users = f" of {written.facts['users']} users" if "users" in written.facts else ""
    out.print(f"{written.facts['training_images']} training images{users}, {written.facts['test_images']} test images")
    for name in (written.report, written.path):
        out.print(str(name), markup=False)
