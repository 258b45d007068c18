"""The `hyperfl ledger` command: show which messages a node has sent and received."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.console import err, out

if TYPE_CHECKING:
    from hyperfl_flwr.deploy.ledger_view import RunLedger
    from hyperfl_flwr.node.ledger import LedgerEntry

ledgers = typer.Typer()


@ledgers.command()
def ledger(
    state_dir: Annotated[Path, typer.Argument(help="A node's state-dir, or the folder that contains it.")],
    run: Annotated[
        str | None,
        typer.Option(help="Show only the run with this id (`experiment` in its manifest.json); its first digits do."),
    ] = None,
    received: Annotated[bool, typer.Option("--received", help="Also list received messages.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole ledger as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write an HTML page to this file instead; prints its path.")
    ] = None,
) -> None:
    """Show every message that left a node, as recorded in the node's ledger."""
    from hyperfl_flwr.deploy.ledger_view import chosen, runs_of

    if as_json and output:
        raise ConfigError("--json prints and --output writes a page; give only one of them")
    found, damaged = runs_of(state_dir.absolute())
    runs = chosen(found, run)
    if damaged:
        numbers = ", ".join(map(str, damaged))
        err.print(f"warning: ledger lines that are unreadable, changed, or of messages that were not sent: {numbers}")
    if as_json:
        out.print(json.dumps([_document(one) for one in runs], indent=2), markup=False)
    elif output:
        from hyperfl_flwr.deploy.ledger_page import write_ledger

        out.print(str(write_ledger(output.absolute(), runs, damaged, received=received)), markup=False)
    else:
        for one in runs:
            _print_run(one, received=received)
    if any(one.leaked for one in runs):
        raise typer.Exit(1)  # scripts must notice that private arrays were sent


def _document(run: RunLedger) -> dict[str, Any]:
    return {
        "experiment": run.experiment,
        "methods": run.methods,
        "messages": [asdict(entry) | {"bytes": entry.bytes} for entry in run.entries],
        "totals": {name: {"out": left, "in": came} for name, (left, came) in run.totals().items()},
        "private": list(run.private),
        "private_arrays_that_left": run.leaked,
        "whole_models_left": run.sent_models,
    }


def _print_run(run: RunLedger, *, received: bool) -> None:
    name = f"run {run.experiment}" if run.experiment else "no run: handshakes that no run followed"
    out.print(f"{name} ({', '.join(run.methods)})", markup=False)
    for entry in run.entries:
        if received or entry.direction != "in":
            _print_entry(entry)
    _print_arrays(run, received=received)
    _print_totals(run)
    _print_private(run)


def _print_entry(entry: LedgerEntry) -> None:
    from hyperfl_flwr.deploy.ledger_view import content_of, event_of, phase_of

    _say(f"{entry.time}  {event_of(entry)}  {entry.kind}  {phase_of(entry)}  {entry.bytes} bytes")
    for record in entry.records:
        _say(f"    {record.name}: {content_of(record)}")
    if entry.error:
        _say(f"    error: {entry.error}")
    if entry.finding:
        _say(f"    {entry.finding}")


def _print_arrays(run: RunLedger, *, received: bool) -> None:
    rows = [(key, times) for key, times in run.arrays().items() if received or key[0] == "out"]
    if not rows:
        out.print("no arrays were sent" if not received else "no arrays were sent or received")
        return
    table = Table("array", "shape", "type", "bytes", "times sent" if not received else "times")
    for (direction, _, array), times in rows:
        shape = "x".join(map(str, array.shape)) or "one number"
        passed = f"{direction} {times}" if received else str(times)
        table.add_row(Text(_safe(array.name)), shape, Text(_safe(array.dtype)), str(array.bytes), passed)
    out.print(table)


def _say(text: str) -> None:
    out.print(_safe(text), markup=False)


def _safe(text: str) -> str:
    """Replace non-printable characters: the server chooses parts of the text and could send terminal escapes."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _print_totals(run: RunLedger) -> None:
    table = Table("group or record", "bytes sent", "bytes received")
    totals = run.totals()
    for name, (left, came) in totals.items():
        table.add_row(Text(_safe(name)), str(left), str(came))
    table.add_row("all", *(str(sum(column)) for column in _columns(list(totals.values()))))
    out.print(table)


def _columns(rows: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [left for left, _ in rows], [came for _, came in rows]


def _print_private(run: RunLedger) -> None:
    if not run.experiment:
        return
    if run.leaked:
        _say(f"ERROR: arrays of private groups have left the node: {', '.join(run.leaked)}")
    elif run.sent_models:
        out.print(
            "The clients' whole models were sent for a cross-site matrix, which cross-site = true in the node config "
            "allows.",
            markup=False,
        )
    elif run.private:
        out.print(f"These groups are private and stayed on the node: {', '.join(run.private)}.", markup=False)
    elif not run.knows_private:
        _say(f"The ledger does not say which groups of {', '.join(run.methods)} are private.")
    else:
        out.print(f"The method {', '.join(run.methods)} has no private groups.", markup=False)
