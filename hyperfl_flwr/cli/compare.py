"""The `hyperfl compare` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hyperfl_flwr.launch.console import out

if TYPE_CHECKING:
    from hyperfl_flwr.results.compare import Comparison

comparisons = typer.Typer()


@comparisons.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, two or more.")],
    output: Annotated[Path | None, typer.Option(help="Also write an HTML page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare runs: accuracy, worst client, bytes, and what federation adds to training alone.

    Runs that differ in their seeds only are one row. Where two rows have the same clients, their accuracies are paired.
    """
    from hyperfl_flwr.results.compare import compare as compare_runs

    found = compare_runs(runs)
    if as_json:
        out.print(json.dumps(found.entry(), indent=2), markup=False)
    else:
        _print(found)
    if output:
        from hyperfl_flwr.results.comparison_page import write_comparison

        out.print(str(write_comparison(found, output.absolute())), markup=False)


def _print(found: Comparison) -> None:
    from hyperfl_flwr.results.comparison_page import row_headers, rows_of, settings_rows

    if found.answers:
        out.print("\n".join(["Did federation help?", *(f"  {answer}" for answer in found.answers)]), markup=False)
    table = Table(*row_headers(found.task))
    for row in rows_of(found):
        table.add_row(*row)
    out.print(table, markup=False)
    if rows := settings_rows(found):
        differing = Table("setting", *(group.label for group in found.groups))
        for row in rows:
            differing.add_row(*row)
        out.print(differing, markup=False)
    for note in found.notes:
        out.print(note, markup=False)
