"""The `hyperfl export` and `hyperfl join` commands: write the models of a finished run, and add clients to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.console import err, out

if TYPE_CHECKING:
    from hyperfl_flwr.launch.plans import Plan
    from hyperfl_flwr.results.export import Exported, State
    from hyperfl_flwr.results.join import Joined
    from hyperfl_flwr.results.join_server import JoinedByServer

exports = typer.Typer()

Source = Annotated[
    Path, typer.Argument(help="Folder of a run, or on a node its state-dir (the private state of its clients).")
]
Client = Annotated[int | None, typer.Option(help="Client of the model; default: the global model, if there is one.")]
StateOption = Annotated[
    str | None,
    typer.Option(
        "--state",
        help="personalized: after the client's last local training; aggregate: the last global state with the client's "
        "private parameters; default: personalized if it is stored.",
    ),
]
Experiment = Annotated[str | None, typer.Option(help="On a node: the run's id (`experiment` in its manifest.json).")]
Root = Annotated[Path | None, typer.Option(help="Folder of the run's data set; default: as in the run.")]
Weights = Annotated[
    Path | None, typer.Option(help="Weights of a pre-trained body; default: as in the run, else a download.")
]


@exports.command("export")
def run_export(
    source: Source,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, *.safetensors.")],
    client: Client = None,
    state: StateOption = None,
    run: Experiment = None,
    data_root: Root = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Write the clients' shared parameters instead, for `hyperfl join`.")
    ] = False,
) -> None:
    """Export a model for plain torch: parameters, JSON description and script; prints their paths."""
    from hyperfl_flwr.results.export import check_output, write_exported
    from hyperfl_flwr.results.join import shared_of, write_shared

    if shared:
        if client is not None or state or run:
            raise ConfigError("--shared is the same for all clients; leave out --client, --state and --run")
        write_shared(shared_of(source.absolute(), changes_of(data_root)), output.absolute())
        out.print(str(output.absolute()), markup=False)
        return
    check_output(output.absolute())
    found = model_of(source.absolute(), client, state, run, data_root)
    for note in found.notes:
        err.print(f"note: {note}", markup=False)
    out.print(str(found), markup=False)
    paths = write_exported(found, output.absolute())
    if len(paths) == 2:  # parameters and description
        err.print(f"note: no script is written: {found.recipe.target} is not a plain torch model", markup=False)
    for path in paths:
        out.print(str(path), markup=False)


def changes_of(data_root: Path | None, weights: Path | None = None) -> dict[str, Scalar]:
    """Return the settings of this machine that options give."""
    given = {"data-root": data_root, "lpm.weights": weights}
    return {key: str(path.expanduser().absolute()) for key, path in given.items() if path is not None}


@exports.command("join")
def run_join(
    source: Annotated[Path, typer.Argument(help="Folder of a run, or a file of `hyperfl export --shared`.")],
    data: Annotated[str, typer.Option(help="The new client's labelled data: npz:FILE, csv:FILE or folder:PATH.")] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the result, new or empty.")] = None,
    deployment: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Let the nodes of this deployment with join-data join.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Number of rounds; default: 3, with pfedhn and it-pfl 20.", min=1)
    ] = None,
    model: Annotated[
        str, typer.Option(help="Network of the new client, if the run has several (pfedhn.targets).")
    ] = "",
    embedding_rate: Annotated[
        float | None,
        typer.Option(help="Learning rate of the new embedding, with pfedhn and it-pfl; default: the run's.", min=0),
    ] = None,
    data_root: Root = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:NUMBER.")] = "auto",
    weights: Weights = None,
    group_by: Annotated[
        str, typer.Option(help="How samples of one subject, which stay in one part, are recognised: see data.group-by.")
    ] = "auto",
) -> None:
    """Join a finished run as a new client with labelled data; trains its private parameters, or its embedding."""
    from hyperfl_flwr.core.device import resolve_device
    from hyperfl_flwr.models.provenance import use_weights
    from hyperfl_flwr.results.join import join, shared_of
    from hyperfl_flwr.results.join_server import join_with_server, joins_with_server

    if deployment is not None:
        if data or output or data_root or weights or device != "auto" or group_by != "auto":
            raise ConfigError(
                "with --deployment, the node.toml of each joining node sets its data, output and device; give only the "
                "run's folder and the rounds, network and rate of the embeddings"
            )
        _join_nodes(deployment, source.absolute(), rounds or 20, model, embedding_rate or 0.0)
        return
    if output is None:
        raise ConfigError("no output folder given; use --output, or --deployment DIR")
    name, grouping = _labelled_data(data), _grouping(group_by)
    where, place, changes = source.absolute(), resolve_device(device), changes_of(data_root, weights)
    if joins_with_server(where):
        _print_joined(
            join_with_server(
                where, name, output.absolute(), rounds or 20, place, target=model, rate=embedding_rate,
                changes=changes, grouping=grouping,
            )
        )  # fmt: skip
        return
    if model or embedding_rate is not None:
        raise ConfigError("--model and --embedding-rate are for runs of pfedhn and it-pfl; leave them out")
    if weights is not None:  # a file of shared parameters names none
        use_weights(str(changes["lpm.weights"]))
    done = join(shared_of(where, changes), name, output.absolute(), rounds or 3, place, grouping=grouping)
    _print_trained(done)


def _labelled_data(data: str) -> str:
    """Return the name of a client's data with an absolute path."""
    kind, colon, path = data.partition(":")
    if kind not in ("npz", "csv", "folder") or not colon:
        raise ConfigError(f"--data must be npz:FILE, csv:FILE or folder:PATH, got {data!r}")
    return f"{kind}:{Path(path).expanduser().absolute()}"


def _grouping(group_by: str) -> str:
    """Return how samples of one subject are recognised."""
    from hyperfl_flwr.data.grouped_split import parse_grouping

    try:
        return parse_grouping(group_by)
    except ValueError as problem:
        raise ConfigError(f"--group-by {problem}") from None


def _join_nodes(folder: Path, run: Path, rounds: int, model: str, rate: float) -> None:
    from hyperfl_flwr.deploy.layout import Deployment
    from hyperfl_flwr.deploy.personalize import personalize_nodes
    from hyperfl_flwr.launch.progress import ShownProgress
    from hyperfl_flwr.launch.subprocess_call import call_in_subprocess

    deployment = Deployment.read(folder)
    # In a subprocess: planning imports torch, which this process does not need to follow the run.
    planned: Plan = call_in_subprocess("hyperfl_flwr.launch.planning:plan_joined", run, rounds, model, rate)
    with ShownProgress("join") as observer:
        seen = personalize_nodes(deployment, planned, observer)
    for line in seen:
        out.print(line, markup=False)


def _print_trained(done: Joined) -> None:
    for note in done.notes:
        err.print(f"note: {note}", markup=False)
    task = done.task
    out.print(
        f"{task.score_title} {task.text(done.score_before)} before and {task.text(done.score_after)} after "
        f"{done.seconds:.1f} s of training on {done.train_examples} samples, of {done.test_examples} test samples",
        markup=False,
    )
    for file in done.files:
        out.print(str(file), markup=False)


def _print_joined(done: JoinedByServer) -> None:
    task = done.task
    for note in done.notes:
        err.print(f"note: {note}", markup=False)
    out.print(
        f"{task.score_title} {task.text(done.score_before)} of the model of the first embedding, "
        f"{task.text(done.score_generated)} of the trained one and {task.text(done.score)} after local "
        f"training; {done.seconds:.1f} s",
        markup=False,
    )
    out.print(done.served.seen(), markup=False)
    for file in done.files:
        out.print(str(file), markup=False)


def model_of(
    source: Path, client: int | None, state: str | None, experiment: str | None, data_root: Path | None
) -> Exported:
    """Find the model that a command's options select, in a run's folder or in a node's state-dir.

    Raises:
        HyperFLError: If the options contradict each other, or select no stored model.
    """
    from hyperfl_flwr.results.export import model_of_node, model_of_run

    if state not in (None, "personalized", "aggregate"):
        raise ConfigError(f"--state must be personalized or aggregate, got {state!r}")
    chosen: State | None = None if state is None else "personalized" if state == "personalized" else "aggregate"
    if (source / "manifest.json").is_file() or not source.is_dir():
        if experiment is not None:
            raise ConfigError(f"--run is for the folder of a node, but {source} is that of a run; leave it out")
        return model_of_run(source, client, chosen, changes_of(data_root))
    source = _states_of(source)
    if client is None:
        if not any(source.glob("**/client-*/model.npz")):
            raise RunDirectoryError(
                f"{source} must be a run's folder, which has a manifest.json, or a node's state-dir with models of its "
                f"clients (keep-model); it is neither"
            )
        raise ConfigError("--client is required with a node's state-dir; give the number of one of its clients")
    if chosen == "aggregate":
        raise ConfigError(
            "--state must be personalized on a node: a node stores only its clients' models after local training"
        )
    return model_of_node(source, client, experiment)


def _states_of(folder: Path) -> Path:
    """Return the state-dir of a node: the one that the `node.toml` in a folder names, else the folder itself."""
    from hyperfl_flwr.deploy.node_settings import FILE, read_settings

    return Path(read_settings(folder).state_dir) if (folder / FILE).is_file() else folder
