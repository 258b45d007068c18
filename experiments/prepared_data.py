"""Find out, before a study is run, which files of its data have not been made yet."""

from collections.abc import Sequence
from pathlib import Path

from experiments.study import Cell, Study
from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.sample_format import is_local_data, local_data_path


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
        raise DataError(f"the study {study.name} lacks data: {needed}; choose other columns with --datasets meanwhile")
