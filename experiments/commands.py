"""Commands for studies: run the cells, and make tables and figures of the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import hyperfl_flwr.core.guard_all  # noqa: F401 - before what it guards
from hyperfl_flwr.launch.console import err, out, parse_setting

if TYPE_CHECKING:
    from experiments.study import Cell

studies = typer.Typer()

OnCell = Callable[["Cell", str], None]


@studies.command()
def study(
    name: Annotated[str, typer.Argument(help="One of `hyperfl studies`.")],
    quick: Annotated[bool, typer.Option("--quick", help="Do tiny runs that only show that everything works.")] = False,
    methods: Annotated[list[str] | None, typer.Option(help="Rows of the study; repeatable; default: all.")] = None,
    datasets: Annotated[list[str] | None, typer.Option(help="Columns, or their data sets; repeatable.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds; default: the study's.", min=1)] = None,
    jobs: Annotated[int | None, typer.Option(help="Number of parallel runs; default: one per core.", min=1)] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: your cache folder.")] = None,
    output: Annotated[Path | None, typer.Option(help="The study's folder; default: ./runs/studies/NAME.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting of all runs, as KEY=VALUE.")] = None,
) -> None:
    """Run a study's unfinished cells; the last line printed is the study's folder."""
    # Deferred, here and below: importing torch would delay every command.
    from experiments.runner import StudyManifest, default_folder, open_study_folder, run_cells
    from experiments.study import load_study
    from hyperfl_flwr.core.device import resolve_device
    from hyperfl_flwr.launch.sizing import Machine, suitable_jobs

    found = load_study(name)
    changes = dict(parse_setting(text) for text in set_ or ())
    if data_root is not None:
        changes["data-root"] = str(data_root.absolute())
    cells = found.cells(quick=quick, rows=methods or (), columns=datasets or (), seeds=seeds, changes=changes)
    folder = output.absolute() if output else default_folder(name, quick=quick)
    open_study_folder(folder, StudyManifest(study=name, quick=quick, changes=changes))
    config = cells[0].config
    threads = 1 if config.threads == "auto" else config.threads
    number = jobs or suitable_jobs(Machine.detect(resolve_device(config.device)), len(cells), threads)
    with _cells_progress(found.title, len(cells)) as (on_finished, on_note):
        run_cells(found, cells, folder, number, on_finished, quick=quick, on_note=on_note)
    out.print(str(folder), markup=False)


@studies.command()
def table(
    name: Annotated[str, typer.Argument(help="One of `hyperfl studies`.")],
    output: Annotated[Path | None, typer.Option(help="The study's folder; default: ./runs/studies/NAME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use the study's quick runs.")] = False,
    mix: Annotated[bool, typer.Option("--mix", help="Accept runs of different commits or settings.")] = False,
    metric: Annotated[str, typer.Option(help="Number of summary.json to show; default: the study's.")] = "",
) -> None:
    """Print a study's table, and write it to its folder as Markdown, CSV and LaTeX."""
    from experiments.collect import collect, with_metric
    from experiments.runner import default_folder, read_study_manifest
    from experiments.study import load_study
    from experiments.tables import markdown, write_tables

    folder = output.absolute() if output else default_folder(name, quick=quick)
    found = with_metric(load_study(name), metric) if metric else load_study(name)
    collected = collect(found, read_study_manifest(folder), folder, mix=mix)
    written = write_tables(collected, folder)
    out.print(markdown(collected), markup=False)
    for path in written:
        out.print(str(path), markup=False)


@studies.command()
def figure(
    name: Annotated[str, typer.Argument(help="One of `hyperfl studies`.")],
    output: Annotated[Path | None, typer.Option(help="The study's folder; default: ./runs/studies/NAME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use the study's quick runs.")] = False,
    number: Annotated[
        list[str] | None,
        typer.Option(
            help="Number of metrics.jsonl's `train` lines, or NUMBER@SETTING, labels, embeddings, pseudo-data, "
            "novel-divergence or novel-epsilon; repeatable."
        ),
    ] = None,
    open_private_state: Annotated[
        bool, typer.Option("--open-private-state", help="Allow reading embeddings from simulated clients' files.")
    ] = False,
) -> None:
    """Draw a study's figures, or the given numbers over the rounds; prints the paths of the pictures."""
    from experiments.figures.curves import draw
    from experiments.runner import default_folder, read_study_manifest
    from experiments.study import load_study

    folder, found = output.absolute() if output else default_folder(name, quick=quick), load_study(name)
    for kind in number or found.figures:
        for picture in draw(found, read_study_manifest(folder), folder, kind, open_private_state=open_private_state):
            out.print(str(picture), markup=False)


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
