"""The `hyperfl` command line: parse the options, call one function, print its result.

Each command imports what it needs inside its function, so that `hyperfl --help` and commands without torch start fast.
"""

from __future__ import annotations

import tomllib
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.markup import escape
from rich.table import Table

from hyperfl_flwr import __version__
from hyperfl_flwr.cli.audit import audits
from hyperfl_flwr.cli.check_method import contracts
from hyperfl_flwr.cli.compare import comparisons
from hyperfl_flwr.cli.datasets import collections
from hyperfl_flwr.cli.deploy import deployments
from hyperfl_flwr.cli.doctor import doctors
from hyperfl_flwr.cli.dp import budgets
from hyperfl_flwr.cli.dp_audit import games
from hyperfl_flwr.cli.export import exports
from hyperfl_flwr.cli.features import vectors
from hyperfl_flwr.cli.groups import GroupedCommands
from hyperfl_flwr.cli.image_folders import folders
from hyperfl_flwr.cli.ledger import ledgers
from hyperfl_flwr.cli.membership import memberships
from hyperfl_flwr.cli.personalize import personal
from hyperfl_flwr.cli.predict import predictions
from hyperfl_flwr.cli.property import properties
from hyperfl_flwr.cli.settings import listings
from hyperfl_flwr.cli.tensorboard import boards
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.packages.package_guard import STUDIES
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.console import err, out, parse_setting

if TYPE_CHECKING:
    from hyperfl_flwr.launch.follow import Platform
    from hyperfl_flwr.launch.plans import Engine
    from hyperfl_flwr.launch.quickstart import Spread

cli = typer.Typer(
    cls=GroupedCommands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
cli.add_typer(comparisons)
cli.add_typer(audits)
cli.add_typer(personal)
cli.add_typer(deployments, name="deploy")
cli.add_typer(ledgers)
cli.add_typer(budgets)
cli.add_typer(games)
cli.add_typer(memberships)
cli.add_typer(properties)
cli.add_typer(doctors)
cli.add_typer(contracts)
cli.add_typer(listings)
cli.add_typer(boards)
cli.add_typer(folders)
cli.add_typer(collections)
cli.add_typer(vectors)
cli.add_typer(exports)
cli.add_typer(predictions)
for commands in entry_points(group="hyperfl.commands"):
    # Of the studies alone, which may be missing: `guard_all` has checked that they are this project's.
    if commands.module.startswith(f"{STUDIES}.") and find_spec(STUDIES):
        cli.add_typer(commands.load())


EngineOption = Annotated[
    str,
    typer.Option(
        help="ray: Flower's simulation engine; in-process: one process, without ports and Ray; auto: whichever is "
        "likely to end sooner. All give the same numbers with equal `threads`."
    ),
]

RayAddressOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Train on all hosts of this running Ray cluster.")
]


@cli.command()
def run(
    method: Annotated[
        str | None, typer.Option(help="Training method (see `hyperfl methods`); default: hyperfl.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Data set (see `hyperfl datasets`), npz:FILE, csv:FILE or folder:PATH; default: digits."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Clients' network: a built-in one, or your own as package.module:factory; default: cnn."),
    ] = None,
    num_clients: Annotated[int | None, typer.Option(help="Number of clients N; default: 20.")] = None,
    num_nodes: Annotated[
        int | None,
        typer.Option(help="Number of simulated nodes P; default: fits the machine, or as in the resumed run.", min=1),
    ] = None,
    engine: EngineOption = "auto",
    ray_address: RayAddressOption = None,
    num_rounds: Annotated[int | None, typer.Option(help="Number of federated rounds; default: 10.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: your cache folder.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run; default: a new folder below ./runs.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of all but the data partition (see data.seed); default: 0.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting with KEY=VALUE; repeatable.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    deployment: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run on the SuperLink and nodes of this deployment.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")] = False,
    track: Annotated[str, typer.Option(help="Also send the numbers to mlflow or wandb.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate time, memory, disk and traffic; do not start the run.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the logs of the server and of Flower.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the run's folder.")] = False,
) -> None:
    """Run federated training, simulated or on a deployment; the last line printed is the run's folder."""
    from hyperfl_flwr.api.train import run as train
    from hyperfl_flwr.launch.given_settings import changed_settings
    from hyperfl_flwr.launch.progress import ShownProgress

    if quiet and verbose:
        raise ConfigError("--quiet prints the run's folder only, and --verbose all logs; give one of them")
    changes: dict[str, Scalar] = {} if config is None else _read_settings(config)
    changes |= dict(parse_setting(text) for text in set_ or ())
    changes = changed_settings(
        changes, method=method, dataset=dataset, target=model, num_clients=num_clients, num_rounds=num_rounds,
        seed=seed, data_root=data_root, output=output, resume=resume,
    )  # fmt: skip
    platform: Platform | None = None
    if deployment is not None:
        if num_nodes is not None or dry_run or engine != "auto" or ray_address is not None:
            raise ConfigError(
                "--num-nodes, --engine, --ray-address and --dry-run are for simulations; a deployment has its own "
                "nodes, of which --set num-nodes=K takes the first K"
            )
        from hyperfl_flwr.deploy.run import deployment as deployed_at

        platform = deployed_at(deployment)
    if dry_run:
        _print_estimate(changes, num_nodes, engine, ray_address)
        return
    done = train(
        settings=changes,
        engine=cast("Engine", engine),  # which is checked with the settings
        num_nodes=num_nodes,
        ray_address=ray_address,
        deployment=platform,
        tensorboard=tensorboard,
        track=track,
        progress=partial(
            ShownProgress, verbose=verbose, quiet=quiet, rounds=deployment is not None or not err.is_terminal
        ),
    )
    out.print(str(done.folder), markup=False)


@cli.command()
def quickstart(
    output: Annotated[Path | None, typer.Option(help="Folder of the runs; default: a new folder below ./runs.")] = None,
    num_rounds: Annotated[int, typer.Option(help="Number of federated rounds.", min=1)] = 10,
    engine: EngineOption = "auto",
) -> None:
    """Train HyperFL, FedAvg and local-only on handwritten digits with two seeds each, and print a comparison."""
    from hyperfl_flwr.launch.progress import ShownProgress
    from hyperfl_flwr.launch.quickstart import SEEDS
    from hyperfl_flwr.launch.quickstart import quickstart as run_quickstart

    result = run_quickstart(output and output.absolute(), num_rounds, partial(ShownProgress, noted=set()), engine)
    table = Table(
        "method", "learning rate", "personalized", "aggregate", "worst client", "MB per client and round", "s per round"
    )
    for row in result.results:
        accuracies = [_in_percent(row.spread(f"test_accuracy{part}")) for part in ("", "_aggregate", "_worst")]
        megabytes = (row.spread(f"bytes_{way}_per_client_round").mean / 1e6 for way in ("up", "down"))
        travelled = "{:.2f} up, {:.2f} down".format(*megabytes)
        seconds = f"{row.spread('seconds_per_round').mean:.2f}"
        table.add_row(row.method, f"{row.learning_rate:g}", *accuracies, travelled, seconds)
    out.print(table)
    tested = " and ".join(map(str, result.results[0].test_samples))
    out.print(
        "personalized: after local training; aggregate: as received, before it; both on each client's own test data."
    )
    out.print(f"Mean of {len(SEEDS)} seeds (least to largest) with data divided differently; {tested} test images.")
    out.print(f"plot: {result.picture}", markup=False)
    out.print(str(result.folder), markup=False)


@cli.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of the run, or on a node the node's folder or state-dir.")],
    output: Annotated[
        Path | None, typer.Option(help="File to write; default: report.html in the run's folder.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="On a node: the run's id (`experiment` in manifest.json); default: the last.")
    ] = None,
) -> None:
    """Write an HTML page about a run, or on a node about the node's part in it; prints its path.

    Of a run: accuracies, curves, clients, traffic and settings. Of a node: accuracy, single classes, and what left it.
    """
    from hyperfl_flwr.deploy.owner_page import is_node, write_owner_page
    from hyperfl_flwr.results.report import write_report

    path, file = folder.absolute(), output and output.absolute()
    if is_node(path):
        written = write_owner_page(path, run, file)
    elif run is not None:
        raise ConfigError("--run is for the folder of a node; leave it out")
    else:
        written = write_report(path, file)
    out.print(str(written), markup=False)


@cli.command()
def methods() -> None:
    """List the training methods."""
    from hyperfl_flwr.methods import METHODS

    table = Table("name", "what it does", "leaves the client", "learning rate", "paper")
    for name, method in METHODS.items():
        table.add_row(name, method.title, method.sends, f"{method.learning_rate:g}", method.paper)
    out.print(table)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(__version__)
        raise typer.Exit


@cli.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Personalized federated learning with hypernetworks on Flower: methods, baselines, attacks and defences."""


def _in_percent(share: Spread) -> str:
    """Format a share over the seeds in percent: mean, least and largest."""
    return f"{100 * share.mean:.1f} % ({100 * share.least:.1f} to {100 * share.largest:.1f})"


def _print_estimate(changes: dict[str, Scalar], num_nodes: int | None, engine: str, ray_address: str | None) -> None:
    from hyperfl_flwr.launch.core_locks import usable_cores
    from hyperfl_flwr.launch.estimate import estimate
    from hyperfl_flwr.launch.planning import plan
    from hyperfl_flwr.launch.simulation import found_cluster

    cluster = found_cluster(ray_address)
    planned = plan(changes, num_nodes, engine, cluster)
    for warning in planned.warnings:
        err.print(f"warning: {warning}", markup=False)
    cost = estimate(planned, len(usable_cores()) if cluster is None else cluster.cpus)
    table = Table("estimate", "")
    if planned.data:
        table.add_row("data", escape(planned.data.removeprefix("data: ")))
    if cluster is not None:
        nodes = f"{counted(planned.num_nodes, 'node')} of {counted(planned.threads, 'thread')}"
        table.add_row("Ray cluster", f"{cluster}, {nodes}")
    table.add_row("engine", planned.engine)
    down, up = cost.bytes_down_per_client_round, cost.bytes_up_per_client_round
    table.add_row("a client's payload per round", f"{down / 1e6:.2f} MB down, {up / 1e6:.2f} MB up")
    table.add_row("on the wire per round", f"{cost.bytes_on_wire_per_round / 1e6:.2f} MB")
    table.add_row("disk", f"{max(cost.disk_bytes / 1e6, 1):.0f} MB")
    table.add_row("memory", f"{cost.memory_bytes / 1e6:.0f} MB")
    table.add_row("one client's round", f"{cost.client_seconds:.1f} s (measured for one epoch and for two)")
    time = f"{cost.seconds:.0f} seconds" if cost.seconds < 120 else f"{cost.seconds / 60:.1f} minutes"
    table.add_row(f"time for {counted(planned.num_rounds, 'round')}", f"about {time}")
    out.print(table)
    out.print(cost.resolution, markup=False)


def _read_settings(path: Path) -> dict[str, Scalar]:
    from hyperfl_flwr.core.files.toml_files import flatten

    try:
        return flatten(tomllib.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not a valid TOML file: {error}; correct it") from None
