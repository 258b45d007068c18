"""Commands for studies: run the cells, and make tables and figures of the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import hyperfl_flwr.core.packages.guard_all  # noqa: F401 - before what it guards
from hyperfl_flwr.launch.console import err, out, parse_setting

if TYPE_CHECKING:
    from experiments.study import Cell, Place, Study
    from hyperfl_flwr.core.setting_types import Scalar

studies = typer.Typer()

FromRecords = Annotated[
    str,
    typer.Option(
        "--records",
        help="A file of records, or the name of one of the project's own: restore its cells to the study's folder "
        "first, which is then ./runs/studies/NAME-records by default.",
    ),
]

OnCell = Callable[["Cell", str], None]


Jobs = Annotated[int | None, typer.Option(help="Number of parallel runs; default: one per core.", min=1)]
DataRoot = Annotated[Path | None, typer.Option(help="Folder of the data sets; default: your cache folder.")]


@studies.command()
def study(
    name: Annotated[str, typer.Argument(help="One of `hyperfl studies`, or a TOML file of yours.")],
    quick: Annotated[bool, typer.Option("--quick", help="Do tiny runs that only show that everything works.")] = False,
    rows: Annotated[list[str] | None, typer.Option(help="Rows, separated by commas; default: all.")] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="Columns or their data sets, separated by commas; default: all.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds; default: the study's.", min=1)] = None,
    jobs: Jobs = None,
    data_root: DataRoot = None,
    output: Annotated[Path | None, typer.Option(help="The study's folder; default: ./runs/studies/NAME.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting of all runs, as KEY=VALUE.")] = None,
    records: FromRecords = "",
) -> None:
    """Run a study's unfinished cells; the last line printed is the study's folder."""
    # Deferred, here and below: importing torch would delay every command.
    from experiments.prepared_data import refuse_missing
    from experiments.study import load_study
    from experiments.study_folder import StudyManifest, open_study_folder

    found = load_study(name)
    changes = _changes(set_, data_root)
    cells = found.cells(quick=quick, rows=rows or (), columns=columns or (), seeds=seeds, changes=changes)
    refuse_missing(found, cells)
    folder, _ = _study_folder(found, output, quick=quick, records=records)
    open_study_folder(folder, StudyManifest(study=found.name, quick=quick, changes=changes), found)
    _run(found, cells, folder, jobs, quick=quick)
    out.print(str(folder), markup=False)


@studies.command()
def sweep(
    methods: Annotated[list[str], typer.Option(help="Methods; several are separated by commas.")],
    datasets: Annotated[list[str] | None, typer.Option(help="Data sets, separated by commas; default: digits.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Values that a setting has in every method's runs, as KEY=VALUE,VALUE; repeatable."),
    ] = None,
    num_rounds: Annotated[int | None, typer.Option(help="Number of federated rounds.")] = None,
    num_clients: Annotated[int | None, typer.Option(help="Number of clients N.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 1,
    jobs: Jobs = None,
    data_root: DataRoot = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the sweep; default: ./runs/studies/sweep.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting of all runs, as KEY=VALUE.")] = None,
) -> None:
    """Run methods on data sets with some values of settings, and print the table; repeat the command to continue.

    It writes `sweep.toml` to its folder: a study that can be changed and extended.
    """
    from experiments.study_axes import names_in
    from experiments.sweep import NAME, make_sweep, parse_grid, refuse_chosen, refuse_twice, without_effect_on_some
    from hyperfl_flwr.data.sample_format import from_here

    chosen = {"num-rounds": num_rounds, "num-clients": num_clients}
    settings = _changes(set_, None) | {key: value for key, value in chosen.items() if value is not None}
    folder = (output or Path("runs", "studies", NAME)).absolute()
    values = parse_grid(grid or ())
    refuse_chosen(settings, values)
    names = names_in(datasets or ["digits"])
    refuse_twice("data set", names)
    located = {name: from_here(name, has_data_root=data_root is not None) for name in names}
    found = make_sweep(folder, names_in(methods), located, seeds, settings, values)
    for warning in without_effect_on_some(names_in(methods), settings, values):
        err.print(f"warning: {warning}", markup=False)
    _run(found, found.cells(changes=_changes(None, data_root)), folder, jobs, quick=False)
    _print_table(found, folder, mix=False)


def _changes(texts: list[str] | None, data_root: Path | None) -> dict[str, Scalar]:
    changes = dict(map(parse_setting, texts or ()))
    return changes | ({} if data_root is None else {"data-root": str(data_root.absolute())})


def _run(found: Study, cells: Sequence[Cell], folder: Path, jobs: int | None, *, quick: bool) -> None:
    """Run the unfinished cells with a progress bar, as many at a time as the machine has cores for."""
    from experiments.runner import run_cells
    from hyperfl_flwr.core.device import resolve_device
    from hyperfl_flwr.launch.sizing import Machine, suitable_jobs

    config = cells[0].config
    threads = 1 if config.threads == "auto" else config.threads
    number = jobs or suitable_jobs(Machine.detect(resolve_device(config.device)), len(cells), threads)
    with _cells_progress(found.title, len(cells)) as (on_finished, on_note):
        run_cells(found, cells, folder, number, on_finished, quick=quick, on_note=on_note)


@studies.command()
def table(
    name: Annotated[str, typer.Argument(help="One of `hyperfl studies`, or a TOML file of yours.")],
    output: Annotated[Path | None, typer.Option(help="The study's folder; default: ./runs/studies/NAME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use the study's quick runs.")] = False,
    mix: Annotated[bool, typer.Option("--mix", help="Accept runs of different code, data or settings.")] = False,
    metric: Annotated[str, typer.Option(help="Key of summary.json to show; default: the study's metric.")] = "",
    against: Annotated[
        str,
        typer.Option(
            help="Name of a row: show how the other rows differ from it, with 95 % intervals; clients and seeds are "
            "paired."
        ),
    ] = "",
    records: FromRecords = "",
) -> None:
    """Print a study's table, and write it to its folder as Markdown, CSV and LaTeX."""
    from experiments.study import load_study
    from experiments.tables import with_metric

    found = with_metric(load_study(name), metric) if metric else load_study(name)
    folder, stale = _study_folder(found, output, quick=quick, records=records)
    _print_table(found, folder, mix=mix, stale=stale, against=against)


def _print_table(found: Study, folder: Path, *, mix: bool, stale: Collection[Place] = (), against: str = "") -> None:
    from experiments.collect import collect
    from experiments.paired import pair
    from experiments.study_folder import read_study_manifest
    from experiments.tables import markdown, write_tables

    collected = collect(found, read_study_manifest(folder), folder, mix=mix, stale=stale)
    pairing = pair(collected, against) if against else None
    written = write_tables(collected, folder, pairing)
    out.print(markdown(collected, pairing), markup=False)
    for path in written:
        out.print(str(path), markup=False)


@studies.command()
def figure(
    name: Annotated[str, typer.Argument(help="One of `hyperfl studies`, or a TOML file of yours.")],
    output: Annotated[Path | None, typer.Option(help="The study's folder; default: ./runs/studies/NAME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use the study's quick runs.")] = False,
    figures: Annotated[
        list[str] | None,
        typer.Option(
            help="Numbers of metrics.jsonl's `train` lines, or NUMBER@SETTING, labels, embeddings, pseudo-data, "
            "accuracy-bytes, leakage-accuracy, membership, property, privacy-cost, novel-divergence or novel-epsilon, "
            "separated by commas; default: the study's figures."
        ),
    ] = None,
    open_private_state: Annotated[
        bool, typer.Option("--open-private-state", help="Allow reading embeddings from simulated clients' files.")
    ] = False,
    mix: Annotated[bool, typer.Option("--mix", help="Accept runs of different code, data or settings.")] = False,
    records: FromRecords = "",
) -> None:
    """Draw a study's figures, or those given; prints the paths of the pictures."""
    from experiments.figures.curves import draw
    from experiments.study import load_study
    from experiments.study_axes import names_in
    from experiments.study_folder import read_study_manifest

    found = load_study(name)
    folder, _ = _study_folder(found, output, quick=quick, records=records)
    for kind in names_in(figures or ()) or found.figures:
        drawn = draw(found, read_study_manifest(folder), folder, kind, open_private_state=open_private_state, mix=mix)
        for picture in drawn:
            out.print(str(picture), markup=False)


@studies.command()
def record(
    name: Annotated[str, typer.Argument(help="One of `hyperfl studies`, or a TOML file of yours.")],
    file: Annotated[Path, typer.Argument(help="File of records; made if it is missing, else cells are replaced.")],
    output: Annotated[Path | None, typer.Option(help="The study's folder; default: ./runs/studies/NAME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use the study's quick runs.")] = False,
) -> None:
    """Write a study's finished cells to a small file: settings, commit, machine and numbers, without the runs."""
    from experiments.recording import record as write_records
    from experiments.study import load_study

    found = load_study(name)
    folder, _ = _study_folder(found, output, quick=quick, records="")
    cells = write_records(found, folder, file)
    out.print(f"{len(cells)} cells in {file}", markup=False)


def _study_folder(found: Study, output: Path | None, *, quick: bool, records: str) -> tuple[Path, Mapping[Place, str]]:
    """Return a study's folder and the stale records, after others have been restored to it, if there are any."""
    from experiments.records import find_records, read_records, restore
    from experiments.study_folder import default_folder

    folder = output.absolute() if output else default_folder(found.name, quick=quick, recorded=bool(records))
    stale = restore(found, read_records(find_records(records)), folder) if records else {}
    for place, reason in stale.items():
        err.print(f"{', '.join(map(str, place))}: the record is out of date: {reason}", markup=False)
    return folder, stale


@studies.command("studies")
def list_studies() -> None:
    """List all studies."""
    from experiments.study import load_study, study_names

    listed = Table("name", "what it compares", "rows", "columns", "seeds")
    for name in study_names():
        found = load_study(name)
        listed.add_row(name, found.title, str(len(found.rows)), str(len(found.columns)), str(found.seeds))
    out.print(listed)


@contextlib.contextmanager
def _cells_progress(title: str, total: int) -> Iterator[tuple[OnCell, OnCell]]:
    """Show a progress bar of a study's cells on standard error."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=err) as bar:
        task = bar.add_task(title, total=total)

        def on_finished(cell: Cell, problem: str) -> None:
            bar.advance(task)
            if problem:
                bar.console.print(f"{cell} failed: {problem}", markup=False)

        def on_note(cell: Cell, note: str) -> None:
            bar.console.print(f"{cell}: {note}", markup=False)

        yield on_finished, on_note
