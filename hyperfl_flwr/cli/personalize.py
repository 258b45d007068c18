"""The `hyperfl personalize` command: create a model for a novel client's unlabelled data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.console import err, out

if TYPE_CHECKING:
    from clients.novel.on_demand import NovelOwner
    from hyperfl_flwr.launch.plans import Plan
    from strategies.novel.on_demand import PersonalizedModel

personal = typer.Typer()


@personal.command("personalize")
def run_personalize(
    run_directory: Annotated[Path, typer.Argument(help="Folder of an it-pfl run, finished or with a checkpoint.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder of images, an .npz or a .csv file; the prefixes folder:, npz: and csv: are optional, and "
            "labels are not read."
        ),
    ] = None,
    deployment: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Create models for the novel clients on this deployment's nodes.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Differential privacy budget of each sample: adds noise to the descriptor.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta of the differential privacy; requires --epsilon.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the result; default: a new folder below ./runs.")
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder of the run's data set; default: as in the run.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:NUMBER.")] = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the descriptor that the server received.")] = False,
) -> None:
    """Create a model for a novel client's unlabelled data; prints what the server saw and the result's files."""
    if deployment is not None:
        if data or epsilon or delta or output or data_root or device != "auto":
            raise ConfigError(
                "with --deployment, the node.toml of each novel client sets its data, privacy, output and device; "
                "give only the run's folder"
            )
        _serve_nodes(deployment, run_directory.absolute(), verbose=verbose)
        return
    if data is None:
        raise ConfigError(
            "no data given; use --data with a folder of images, an .npz or a .csv file, or --deployment DIR"
        )
    from clients.novel.on_demand import PREDICTIONS, NovelOwner
    from hyperfl_flwr.core.device import resolve_device
    from hyperfl_flwr.data.sample_format import samples_path
    from hyperfl_flwr.models.standalone import PARAMETERS, SCRIPT
    from hyperfl_flwr.results.personalize import personalize
    from hyperfl_flwr.runs.run_directory import new_run_name

    samples = samples_path(data)
    folder = (output or Path("runs") / new_run_name("personalized", samples.stem, 0)).absolute()
    owner = NovelOwner(data=samples, output=folder, epsilon=epsilon, delta=delta, device=resolve_device(device))
    changes: dict[str, Scalar] = {} if data_root is None else {"data-root": str(data_root.absolute())}
    done = personalize(run_directory.absolute(), owner, changes)
    for note in done.notes:
        err.print(f"note: {note}", markup=False)
    _print_seen(done.served, owner, verbose=verbose)
    for name in (PREDICTIONS, PARAMETERS, SCRIPT):
        out.print(str(folder / name), markup=False)


def _serve_nodes(folder: Path, run: Path, *, verbose: bool) -> None:
    from hyperfl_flwr.deploy.layout import Deployment
    from hyperfl_flwr.deploy.personalize import personalize_nodes
    from hyperfl_flwr.launch.progress import ShownProgress
    from hyperfl_flwr.launch.subprocess_call import call_in_subprocess

    deployment = Deployment.read(folder)
    # In a subprocess: planning imports torch, which this process does not need to follow the run.
    planned: Plan = call_in_subprocess("hyperfl_flwr.launch.planning:plan_personalized", run)
    with ShownProgress("personalize", verbose=verbose) as observer:
        seen = personalize_nodes(deployment, planned, observer)
    for line in seen:
        out.print(line, markup=False)


def _print_seen(served: PersonalizedModel, owner: NovelOwner, *, verbose: bool) -> None:
    out.print(served.seen(), markup=False)
    if owner.epsilon is not None:
        out.print(
            f"its noise makes it ({owner.epsilon:g}, {owner.delta:g})-differentially private for each sample",
            markup=False,
        )
    if verbose:
        out.print(" ".join(f"{number:.6g}" for number in served.descriptor), markup=False)
