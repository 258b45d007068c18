"""The `hyperfl audit`, `descriptors` and `attacks` commands: attack what clients send, and measure the leakage."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hyperfl_flwr.audit.replaced import ignored_text, without_replaced
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import CLASSIFICATION
from hyperfl_flwr.launch.console import err, out, parse_setting
from hyperfl_flwr.launch.early_check import check_early

if TYPE_CHECKING:
    from hyperfl_flwr.attacks.optimiser_loop import Progress as OnProgress
    from hyperfl_flwr.audit.audit import AttackResult
    from hyperfl_flwr.audit.observation_files import ObservationFiles
    from hyperfl_flwr.audit.options import Options
    from hyperfl_flwr.audit.record_round import AttackedRound

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
    from hyperfl_flwr.audit.audit import audit
    from hyperfl_flwr.audit.chosen import chosen_attacks
    from hyperfl_flwr.audit.options import Options
    from hyperfl_flwr.audit.record_round import recorded_round
    from hyperfl_flwr.audit.report import write_audit
    from hyperfl_flwr.core.device import resolve_device
    from hyperfl_flwr.metrics.images import Lpips
    from hyperfl_flwr.runs.run_directory import refuse_used_directory, unused_directory

    output = (output or unused_directory(Path("runs/audit"))).absolute()
    refuse_used_directory(output)
    options = Options(
        attacks=[name.strip() for name in attacks.split(",") if name.strip()],
        num_images=num_images or 20, samples=samples, labels_known=labels_known, iterations=iterations,
        restarts=restarts, total_variation=total_variation, summed=summed, by_neighbours=by_neighbours,
        malicious_server=malicious_server, prior=prior,
    )  # fmt: skip
    if data_root is not None:
        changes["data-root"] = str(data_root.absolute())
    observed: ObservationFiles | None = None
    if by_neighbours:
        others = {"--recorded": recorded, "--checkpoint": checkpoint, "--summed": summed, "--prior": prior}
        _refuse_combination("--by-neighbours", {**others, "--malicious-server": malicious_server})
    if recorded is not None:
        sizes = {"num-images": num_images, "batch-size": batch_size, "samples": samples, "local-epochs": local_epochs}
        own = {**named, **sizes, "--checkpoint": checkpoint, "--set": set_, "--malicious-server": malicious_server}
        _refuse_combination("--recorded", own)
        target, observed = recorded_round(recorded.absolute(), changes, summed=summed)
        target = replace(target, prior=prior, labels_known=labels_known)
        options = replace(options, summed=target.summed)  # a run with secure sums has recorded a sum
    else:
        target = _fresh_target(named, local, changes, options, checkpoint)
    chosen_attacks(options.attacks, target)  # fail before loading weights and drawing bars
    lpips = None if lpips_weights is None else Lpips(lpips_weights, resolve_device(target.config.device))
    with _bars() as bars:
        findings = audit(target, options, observed, on_finding=bars.done, progress=bars.progress)
    output.mkdir(parents=True, exist_ok=True)
    written = write_audit(target, findings, output, lpips)
    _print_verdicts(target, findings)
    out.print(str(written[-1]), markup=False)


def _fresh_target(
    named: Mapping[str, str],
    local: Mapping[str, Scalar],
    changes: Mapping[str, Scalar],
    options: Options,
    checkpoint: Path | None,
) -> AttackedRound:
    """Build the target of an audit that runs its own round, from the initial model or from a run's checkpoint.

    Args:
        named: Method and data set, if they were given.
        local: Settings of the clients' local steps.
        changes: Other settings; they take precedence.
        options: See `hyperfl_flwr.audit.audit`.
        checkpoint: Folder of the run to start from; None for the initial model.
    """
    from hyperfl_flwr.audit.make_round import local_epochs_setting, make_attacked_round
    from hyperfl_flwr.config.table import with_defaults
    from hyperfl_flwr.data.sample_format import from_here
    from hyperfl_flwr.models.provenance import find_sources
    from hyperfl_flwr.runs.run_data import require_classes, require_dataset
    from hyperfl_flwr.runs.run_directory import settings_of
    from hyperfl_flwr.runs.run_sources import find_sources_of

    if checkpoint is not None:
        _refuse_combination("--checkpoint", named)
        require_dataset(checkpoint)
        require_classes(checkpoint)
        settings = settings_of(checkpoint)
        find_sources_of(checkpoint)
    else:
        given: dict[str, Scalar] = {**named, **changes}
        if own := given.get("dataset"):
            changes = {**changes, "dataset": from_here(str(own), has_data_root="data-root" in changes)}
        find_sources({**given, **changes})
        settings = with_defaults({**given, **changes})
    merged = {**settings, **local, **changes}
    if merged.get("task", CLASSIFICATION.name) != CLASSIFICATION.name:
        raise ConfigError(f"task must be classification, which the attacks are for; got {merged['task']!r}")
    # The derived epochs must not override --set.
    merged = {**merged, **local_epochs_setting(merged, options), **changes}
    target = make_attacked_round(merged, options, checkpoint and checkpoint.absolute())
    if text := ignored_text(changes, target.config.flat()):
        err.print(text, markup=False, soft_wrap=True)
    return target


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
    from hyperfl_flwr.runs.run_directory import refuse_used_directory, unused_directory

    output = (output or unused_directory(Path("runs/descriptors"))).absolute()
    refuse_used_directory(output)
    changes: dict[str, Scalar] = {"novel.epsilons": epsilons, "device": "cpu"}
    changes |= {} if delta is None else {"novel.delta": delta}
    changes |= {} if data_root is None else {"data-root": str(data_root.absolute())}
    document = measure_descriptors(run_directory.absolute(), changes)
    listed = Table("epsilon", *(f"{kind}, {measure}".replace("_", " ") for kind, measure in SHOWN))
    for entry in document["by_epsilon"]:
        epsilon = "no noise" if entry["epsilon"] is None else f"{entry['epsilon']:g}"
        listed.add_row(epsilon, *(_with_error(entry[kind][measure]) for kind, measure in SHOWN))
    out.print(listed)
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "descriptors.json", (json.dumps(document, indent=2) + "\n").encode())
    out.print(str(output / "descriptors.json"), markup=False)


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


def _refuse_combination(option: str, others: Mapping[str, object]) -> None:
    if given := [name if name.startswith("-") else f"--{name}" for name, value in others.items() if value]:
        raise ConfigError(
            f"{', '.join(given)} cannot be given with {option}, which determines it; leave one of them out"
        )


def _print_verdicts(target: AttackedRound, findings: Mapping[str, AttackResult]) -> None:
    from hyperfl_flwr.audit.report import measure
    from hyperfl_flwr.audit.sentences import sentence

    document = measure(target, findings)
    for name in findings:
        out.print(sentence(document, name), markup=False)


class _Bars:
    """Progress bars on standard error, one for each attack."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.tasks: dict[str, TaskID] = {}

    def progress(self, name: str) -> OnProgress:
        """Add a bar for an attack and return the callback that advances it."""
        task = self.bar.add_task(name, total=None)

        def on_progress(done: int, total: int) -> None:
            self.bar.update(task, completed=done, total=total)

        self.tasks[name] = task
        return on_progress

    def done(self, name: str, finding: AttackResult) -> None:
        """Fill the bar of an attack that has finished, also if it stopped early."""
        self.bar.update(self.tasks[name], completed=1, total=1)


@contextlib.contextmanager
def _bars() -> Iterator[_Bars]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err) as bar:
        yield _Bars(bar)
