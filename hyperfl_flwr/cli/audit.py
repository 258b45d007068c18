"""The `hyperfl audit`, `descriptors` and `attacks` commands: attack what clients send, and measure the leakage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hyperfl_flwr.audit.replaced import without_replaced
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.console import out, parse_setting
from hyperfl_flwr.launch.early_check import check_early

audits = typer.Typer()

SHOWN = (
    *((kind, "total_variation") for kind in ("own", "other_client", "uniform")),
    *((kind, "rank_correlation") for kind in ("own", "other_client")),
)
"""Columns of `hyperfl descriptors`: (reference, measure). A uniform estimate has no ranks, so no rank correlation."""


@audits.command("audit")
def run_audit(
    method: Annotated[
        str | None, typer.Option(help="Training method (see `hyperfl methods`); default: hyperfl.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Data set (see `hyperfl datasets`), npz:FILE, csv:FILE or folder:PATH; default: digits."),
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: your cache folder.")] = None,
    attacks: Annotated[
        str, typer.Option(help="Comma-separated names (see `hyperfl attacks`); default: all that apply.")
    ] = "",
    num_images: Annotated[int | None, typer.Option(help="Number of private images; default: 20.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per local step; default: 1.", min=1)] = None,
    samples: Annotated[int | None, typer.Option(help="Images per client; default: one batch.", min=1)] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Local epochs of each client; default: 1.", min=1)] = None,
    iterations: Annotated[
        int | None, typer.Option(help="Iterations of each optimisation; default: the attack's own.", min=2)
    ] = None,
    restarts: Annotated[
        int | None, typer.Option(help="Number of random starts; default: the attack's own.", min=1)
    ] = None,
    total_variation: Annotated[
        float | None, typer.Option(help="Weight of the total-variation prior; default: the attack's own.")
    ] = None,
    prior: Annotated[
        str, typer.Option(help="Data set from whose images ig-prior learns, other than the attacked one.")
    ] = "",
    labels_known: Annotated[bool, typer.Option("--labels-known", help="Give the attacks the true labels.")] = False,
    summed: Annotated[
        bool,
        typer.Option("--summed", help="Attack only the sum of the clients' uploads, as with secure sums."),
    ] = False,
    by_neighbours: Annotated[
        bool,
        typer.Option(
            "--by-neighbours", help="Let the first and last client of priv-hfl's chain attack their neighbours."
        ),
    ] = False,
    malicious_server: Annotated[
        bool,
        typer.Option("--malicious-server", help="Attack as a malicious server, which sends forged weights."),
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Start from the last checkpoint of the run in this folder.")
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            help="Attack what the run in this folder has recorded: uploads, or with secagg.enabled an opened sum."
        ),
    ] = None,
    lpips_weights: Annotated[
        Path | None, typer.Option(help="File of AlexNet's ImageNet weights; without it, LPIPS is not computed.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting of the round with KEY=VALUE; repeatable.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the result; default: a new one, runs/audit or runs/audit-N."),
    ] = None,
) -> None:
    """Attack a client's upload and compare the result with its images; prints the verdicts and the report's path."""
    changes: dict[str, Scalar] = dict(parse_setting(text) for text in set_ or ())
    named = {key: value for key, value in {"method": method, "dataset": dataset}.items() if value is not None}
    local: dict[str, Scalar] = {"batch-size": batch_size or 1, "local-epochs": local_epochs or 1}
    if checkpoint is None and recorded is None:
        check_early(without_replaced({**named, **local, **changes}))
    from hyperfl_flwr.audit.bars import shown_bars
    from hyperfl_flwr.audit.perform import AuditRequest, perform
    from hyperfl_flwr.audit.sentences import verdicts
    from hyperfl_flwr.runs.result_directory import result_directory

    if data_root is not None:
        changes["data-root"] = str(data_root.absolute())
    request = AuditRequest(
        named=named, changes=changes, attacks=[name.strip() for name in attacks.split(",") if name.strip()],
        num_images=num_images, batch_size=batch_size, samples=samples, local_epochs=local_epochs,
        iterations=iterations, restarts=restarts, total_variation=total_variation, prior=prior,
        labels_known=labels_known, summed=summed, by_neighbours=by_neighbours, malicious_server=malicious_server,
        checkpoint=checkpoint, recorded=recorded,
    )  # fmt: skip
    with result_directory(output, Path("runs/audit")) as folder, shown_bars() as bars:
        document = perform(
            request, folder, lpips_weights, on_note=bars.note, on_finding=bars.done, progress=bars.progress
        )
    for verdict in verdicts(document).values():
        out.print(verdict, markup=False)
    out.print(str(folder / "audit.html"), markup=False)


@audits.command("descriptors")
def run_descriptors(
    run_directory: Annotated[Path, typer.Argument(help="Folder of an it-pfl run with novel clients.")],
    epsilons: Annotated[
        str, typer.Option(help="Comma-separated privacy budgets of the noise on a descriptor; none is without noise.")
    ] = "none,0.1,1,10",
    delta: Annotated[float | None, typer.Option(help="Delta of the noise; default: the run's novel.delta.")] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder of the run's data set; default: as in the run.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the result; default: a new one, as runs/descriptors."),
    ] = None,
) -> None:
    """Estimate novel clients' label shares from their descriptors, with controls; prints means and the file's path."""
    from hyperfl_flwr.audit.descriptors import measure_descriptors
    from hyperfl_flwr.core.files.atomic_files import write_atomically
    from hyperfl_flwr.runs.result_directory import result_directory
    from hyperfl_flwr.runs.run_directory import refuse_used_directory

    changes: dict[str, Scalar] = {"novel.epsilons": epsilons, "device": "cpu"}
    changes |= {} if delta is None else {"novel.delta": delta}
    changes |= {} if data_root is None else {"data-root": str(data_root.absolute())}
    with result_directory(output, Path("runs/descriptors")) as folder:
        refuse_used_directory(folder)
        document = measure_descriptors(run_directory.absolute(), changes)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "descriptors.json", (json.dumps(document, indent=2) + "\n").encode())
    listed = Table("epsilon", *(f"{kind}, {measure}".replace("_", " ") for kind, measure in SHOWN))
    for entry in document["by_epsilon"]:
        epsilon = "no noise" if entry["epsilon"] is None else f"{entry['epsilon']:g}"
        listed.add_row(epsilon, *(_with_error(entry[kind][measure]) for kind, measure in SHOWN))
    out.print(listed)
    out.print(str(folder / "descriptors.json"), markup=False)


def _with_error(found: Mapping[str, Any]) -> str:
    if found["mean"] is None:
        return "-"
    return f"{found['mean']:.2f}" + ("" if found["sem"] is None else f" +- {found['sem']:.2f}")


@audits.command("attacks")
def list_attacks() -> None:
    """List the attacks of `hyperfl audit`; `membership` and `property` have attacks of their own."""
    from hyperfl_flwr.attacks.registry import ATTACKS
    from hyperfl_flwr.methods import METHODS

    listed = Table("name", "what it is", "source", "server", "on", "on sums of")
    for name, attack in ATTACKS.items():
        single, summed = (
            ", ".join(method.name for method in METHODS.values() if attack.applies_to(method.uploads, summed=summed))
            for summed in (False, True)
        )
        server = "curious" if attack.forge is None else "malicious"
        listed.add_row(name, attack.title, attack.source, server, single, summed)
    out.print(listed)
