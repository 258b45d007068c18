"""Commands for studies: run the cells, and make tables and figures of the results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

import hyperfl_flwr.core.packages.guard_all  # noqa: F401 - before what it guards
from hyperfl_flwr.launch.console import out, parse_setting

if TYPE_CHECKING:
    from experiments.study_results import StudyResults
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
    from experiments.run_study import run_study

    results = run_study(
        name, rows=rows or (), columns=columns or (), seeds=seeds, settings=_settings(set_), data_root=data_root,
        output=output, quick=quick, jobs=jobs, records=records,
    )  # fmt: skip
    out.print(str(results.folder), markup=False)


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
    from experiments.run_study import run_sweep
    from experiments.study_axes import names_in
    from experiments.sweep import parse_grid

    results = run_sweep(
        names_in(methods), names_in(datasets or ["digits"]), grid=parse_grid(grid or ()), num_rounds=num_rounds,
        num_clients=num_clients, seeds=seeds, settings=_settings(set_), data_root=data_root, output=output, jobs=jobs,
    )  # fmt: skip
    _print_table(results)


def _settings(texts: list[str] | None) -> dict[str, Scalar]:
    return dict(map(parse_setting, texts or ()))


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
    from experiments.study_results import open_study

    _print_table(open_study(name, output, quick=quick, records=records), metric, against=against, mix=mix)


def _print_table(results: StudyResults, metric: str = "", *, against: str = "", mix: bool = False) -> None:
    written = results.write_tables(metric, against=against, mix=mix)
    out.print(results.table(metric, against=against, mix=mix), markup=False)
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
    from experiments.study_axes import names_in
    from experiments.study_results import open_study

    results = open_study(name, output, quick=quick, records=records)
    for kind in names_in(figures or ()) or results.study.figures:
        for picture in results.draw(kind, open_private_state=open_private_state, mix=mix):
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
    from experiments.study_results import open_study

    results = open_study(name, output, quick=quick)
    cells = write_records(results.study, results.folder, file)
    out.print(f"{len(cells)} cells in {file}", markup=False)


@studies.command("studies")
def list_studies() -> None:
    """List all studies."""
    from experiments.study import load_study, study_names

    listed = Table("name", "what it compares", "rows", "columns", "seeds")
    for name in study_names():
        found = load_study(name)
        listed.add_row(name, found.title, str(len(found.rows)), str(len(found.columns)), str(found.seeds))
    out.print(listed)
