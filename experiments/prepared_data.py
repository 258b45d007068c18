"""Find out, before a study is run, which files of its data have not been made yet, or have changed."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from experiments.study import Cell, Study
from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import Dataset
from hyperfl_flwr.data.digests import sample_digest
from hyperfl_flwr.data.federated_data import with_settings
from hyperfl_flwr.data.partition.assign import DataSettings
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_format import is_local_data, local_data_path
from hyperfl_flwr.runs.run_directory import read_manifest


def refuse_missing(study: Study, cells: Sequence[Cell]) -> None:
    """Refuse cells of which the data lie in a file that a command makes, and that is missing.

    Args:
        study: The study, whose columns name such commands (`prepare`).
        cells: The cells that are to be run.

    Raises:
        DataError: Naming the missing files, and the command for each.
    """
    commands = {column.name: column.prepare for column in study.columns if column.prepare}
    missing: dict[str, str] = {}
    for cell in cells:
        name, root = cell.config.dataset, cell.config.data_root
        if cell.column not in commands or not is_local_data(name):
            continue
        path = local_data_path(name)
        if not path.is_absolute() and not root:
            missing[cell.column] = f"{path} in the folder of --data-root, which is not given"
        elif not (file := Path(root) / path).is_file():
            missing[cell.column] = str(file)
    if missing:
        needed = "; ".join(f"{column} needs {file}, made by: {commands[column]}" for column, file in missing.items())
        raise DataError(f"the study {study.name} lacks data: {needed}; choose other columns with --columns meanwhile")


def changed_data(cell: Cell, folder: Path) -> list[str]:
    """Return the reason why a finished cell may have other numbers by now: the user's data have changed since.

    Empty if they are the same, or one of the two versions is not known: of a data set with a name, or of a file that
    cannot be read any more.

    Args:
        cell: The cell.
        folder: The study's folder.
    """
    before = read_manifest(cell.folder(folder)).get("data", {}).get("sha256", "")
    if not before or not is_local_data(cell.config.dataset):
        return []
    settings = cell.config.data_settings()
    root = Path(settings.data_root) if settings.data_root else None
    try:
        now = _version(settings, load_dataset(settings.dataset, root, settings.sample_format))
    except DataError:
        return []
    if now == before:
        return []
    return [f"{cell.config.dataset} has changed, its SHA-256 was {before[:12]} and is now {now[:12]}"]


@lru_cache(maxsize=8)
def _version(settings: DataSettings, dataset: Dataset) -> str:
    """Return the SHA-256 of a data set as manifests of simulations have it."""
    return sample_digest(with_settings(settings, dataset))
