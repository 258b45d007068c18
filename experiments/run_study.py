"""Run studies and sweeps from Python: the commands `hyperfl study` and `hyperfl sweep` as functions.

Modules that import torch are imported where they are used: a name of the Python interface must not load it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.study_axes import names_in
from experiments.study_results import StudyResults, open_study
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.console import err
from hyperfl_flwr.launch.given_settings import absolute, changed_settings

if TYPE_CHECKING:
    from experiments.study import Cell, Study

    OnCell = Callable[[Cell, str], None]


def run_study(
    name: Path | str,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    seeds: int | None = None,
    settings: Mapping[str, Scalar] | None = None,
    data_root: Path | str | None = None,
    output: Path | str | None = None,
    quick: bool = False,
    jobs: int | None = None,
    records: Path | str = "",
    progress: bool = True,
) -> StudyResults:
    """Run a study's unfinished cells, several at a time in processes of their own, and wait for their end.

    A call that was interrupted is repeated to continue: finished cells are kept, and begun ones resumed.

    Args:
        name: One of `hyperfl studies`, or the path of a TOML file, see `experiments.study_file`.
        rows: Names of rows; empty for all.
        columns: Names of columns, or of their data sets; empty for all.
        seeds: Number of seeds; by default the study's.
        settings: Other settings of all runs by their keys.
        data_root: Folder of the data sets; by default the user's cache folder.
        output: The study's folder; by default `runs/studies/NAME` in the working directory.
        quick: Whether to do tiny runs that only show that everything works.
        jobs: Number of parallel runs; by default one per core.
        records: As for `open_study`; cells that are restored are not run.
        progress: Whether to show a bar on standard error; failed runs are named there in any case.

    Returns:
        The results of all finished cells in the folder.

    Raises:
        ConfigError: If there is no such study, row or column, or a setting is wrong.
        DataError: If a file of a column's data has not been made; the message has the command.
        RunDirectoryError: If the folder is not the study's, or was begun with other settings.
        RunFailedError: If a cell failed; the others have been run.
        KeyboardInterrupt: If the user interrupted it.
    """
    from experiments.prepared_data import refuse_missing
    from experiments.study import load_study
    from experiments.study_folder import StudyManifest, open_study_folder

    seeds, jobs = _count("seeds", seeds), _count("jobs", jobs)
    study, changes = load_study(str(name)), changed_settings(settings, data_root=data_root)
    cells = study.cells(quick=quick, rows=_names(rows), columns=_names(columns), seeds=seeds, changes=changes)
    refuse_missing(study, cells)
    results = open_study(name, output, quick=quick, records=records)
    open_study_folder(results.folder, StudyManifest(study=study.name, quick=quick, changes=changes), study)
    _run(study, cells, results.folder, jobs, quick=quick, progress=progress)
    return results


def run_sweep(
    methods: Sequence[str],
    datasets: Sequence[str] = ("digits",),
    *,
    grid: Mapping[str, Iterable[Scalar]] | None = None,
    num_rounds: int | None = None,
    num_clients: int | None = None,
    seeds: int = 1,
    settings: Mapping[str, Scalar] | None = None,
    data_root: Path | str | None = None,
    output: Path | str | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> StudyResults:
    """Run methods on data sets with some values of settings, all combined; repeat the call to continue.

    It writes `sweep.toml` to its folder: a study that can be changed and extended.

    Args:
        methods: The methods, one row each.
        datasets: The data sets: names, `npz:FILE`, `csv:FILE` or `folder:PATH`.
        grid: Values of settings, with each of which every method is run, as in `{"learning-rate": [0.01, 0.1]}`.
        num_rounds: Number of federated rounds.
        num_clients: Number of clients N.
        seeds: Number of seeds, counted from 0.
        settings: Other settings of all runs by their keys.
        data_root: As for `run_study`.
        output: Folder of the sweep; by default `runs/studies/sweep` in the working directory.
        jobs: As for `run_study`.
        progress: As for `run_study`.

    Returns:
        The results of the sweep.

    Raises:
        ConfigError: If something is given twice, or a setting is unknown or wrong.
        RunDirectoryError: If the folder is neither empty nor of a sweep, or a cell was run with other settings.
        RunFailedError: If a cell failed; the others have been run.
        KeyboardInterrupt: If the user interrupted it.
    """
    from experiments.study_folder import default_folder
    from experiments.sweep import NAME, make_sweep, refuse_chosen, refuse_twice, without_effect_on_some
    from hyperfl_flwr.data.sample_format import from_here

    seeds, jobs = _count("seeds", seeds) or 1, _count("jobs", jobs)
    changes = changed_settings(settings, num_rounds=num_rounds, num_clients=num_clients)
    folder = absolute(output) if output else default_folder(NAME, quick=False)
    values = {key: [changed_settings({key: value})[key] for value in several] for key, several in (grid or {}).items()}
    refuse_chosen(changes, values)
    rows, names = _names(methods), _names(datasets)
    refuse_twice("data set", names)
    located = {name: from_here(name, has_data_root=data_root is not None) for name in names}
    study = make_sweep(folder, rows, located, seeds, changes, values)
    for warning in without_effect_on_some(rows, changes, values):
        err.print(f"warning: {warning}", markup=False)
    cells = study.cells(changes=changed_settings(data_root=data_root))
    _run(study, cells, folder, jobs, quick=False, progress=progress)
    return StudyResults(study=study, folder=folder)


def _names(given: Sequence[str]) -> list[str]:
    """Return names that are given as a sequence, or as one text with commas."""
    return names_in([given]) if isinstance(given, str) else list(given)


def _count(name: str, value: int | None) -> int | None:
    """Return a number of seeds or runs; None for the default.

    Raises:
        ConfigError: If it is below 1.
    """
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")
    return value


def _run(
    study: "Study", cells: "Sequence[Cell]", folder: Path, jobs: int | None, *, quick: bool, progress: bool
) -> None:
    """Run the unfinished cells, as many at a time as the machine has cores for."""
    from experiments.runner import run_cells
    from hyperfl_flwr.core.device import resolve_device
    from hyperfl_flwr.launch.sizing import Machine, suitable_jobs

    config = cells[0].config
    threads = 1 if config.threads == "auto" else config.threads
    number = jobs or suitable_jobs(Machine.detect(resolve_device(config.device)), len(cells), threads)
    with _shown(study.title, len(cells), progress=progress) as (on_finished, on_note):
        run_cells(study, cells, folder, number, on_finished, quick=quick, on_note=on_note)


@contextlib.contextmanager
def _shown(title: str, total: int, *, progress: bool) -> "Iterator[tuple[OnCell, OnCell]]":
    """Show a progress bar of a study's cells on standard error, and what there is to say of single ones."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=err, disable=not progress) as bar:
        task = bar.add_task(title, total=total)

        def on_finished(cell: "Cell", problem: str) -> None:
            bar.advance(task)
            if problem:
                bar.console.print(f"{cell} failed: {problem}", markup=False)

        def on_note(cell: "Cell", note: str) -> None:
            bar.console.print(f"{cell}: {note}", markup=False)

        yield on_finished, on_note
