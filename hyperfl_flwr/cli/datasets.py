"""The `hyperfl datasets` command: list the data sets, or compare one with its published sizes."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hyperfl_flwr.core.errors import ConfigError, RunFailedError
from hyperfl_flwr.launch.console import out

collections = typer.Typer()


@collections.command()
def datasets(
    check: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Compare emnist or cinic10 with its published sizes; emnist is downloaded first if it is missing.",
        ),
    ] = "",
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: your cache folder.")] = None,
) -> None:
    """List the data sets; with --check, the exit code is 1 if a data set's files are not the published ones."""
    if check:
        _check(check, data_root)
        return
    if data_root is not None:
        raise ConfigError("--data-root belongs to --check; give both, or neither")
    from hyperfl_flwr.data.registry import DATASETS

    table = Table("name", "what it is", "classes", "shape", "download", "source")
    for name, info in DATASETS.items():
        size = f"{info.download_mb} MB" if info.download_mb else "none"
        table.add_row(name, info.title, str(info.num_classes or "any"), _shape(info.input_shape), size, info.source)
    out.print(table)


def _check(name: str, data_root: Path | None) -> None:
    from hyperfl_flwr.data.registry import default_data_root, load_dataset
    from hyperfl_flwr.data.totals import TOTALS, differences

    if name not in TOTALS:
        raise ConfigError(f"--check must be one of {', '.join(TOTALS)}, got {name!r}")
    totals, root = TOTALS[name], (data_root or default_data_root()).expanduser().absolute()
    if found := differences(load_dataset(name, root), totals):
        raise RunFailedError(
            f"{name} in {root} is not the published data set ({totals.source}): {'; '.join(found)}; delete its files "
            f"and get them again"
        )
    out.print(
        f"{name}: {totals.train:,} training and {totals.test:,} test samples of {totals.classes} classes, as published "
        f"({totals.source})",
        markup=False,
    )


def _shape(shape: Any) -> str:  # noqa: ANN401
    return "any" if shape is None else "x".join(map(str, shape))
