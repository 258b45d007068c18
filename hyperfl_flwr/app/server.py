"""Flower's server app: run a federation from its settings to its results, or serve novel clients."""

import contextlib
import logging
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import hyperfl_flwr.core.packages.quick_torch  # noqa: F401
from hyperfl_flwr.app.adversary import adversary_problem
from hyperfl_flwr.app.joining import open_joinable
from hyperfl_flwr.app.methods import check_run, client_of, new_strategy
from hyperfl_flwr.app.personalize import open_run
from hyperfl_flwr.app.resolved import resolution, resolution_text, resolved
from hyperfl_flwr.app.robust_reductions import check_enough_nodes, robust_warnings
from hyperfl_flwr.app.secure_sums import check_nodes, secure_context, secure_sum_warnings
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import DIVERGES_AGAIN, ConfigError, DivergedError, HyperFLError, RunFailedError
from hyperfl_flwr.flower.grid import is_http_grid
from hyperfl_flwr.flower.log import FLOWER_LOGGER, log
from hyperfl_flwr.flower.parent_monitor import end_with_parent
from hyperfl_flwr.flower.ray_pool import cluster_hosts, replace_dead_actors
from hyperfl_flwr.models.provenance import keep_sources, method_facts, model_facts, refuse_changed_sources, use_weights
from hyperfl_flwr.runs import manifest
from hyperfl_flwr.runs.failures import nobody_text
from hyperfl_flwr.runs.privacy_statement import statement_text
from hyperfl_flwr.runs.resume import begun_rounds, refuse_other_nodes, resume_round
from hyperfl_flwr.runs.run_data import RunData, refuse_changed_data
from hyperfl_flwr.runs.run_directory import DEPLOYMENT, RunDirectory, new_run_name, read_manifest, refuse_used_directory
from hyperfl_flwr.runs.summary import summarise
from hyperfl_flwr.runs.summary_texts import fall_text, majority_text
from hyperfl_flwr.runs.target_accuracy import target_text
from hyperfl_flwr.server.federation import Federation, refuse_other_sources
from hyperfl_flwr.server.roster import Announce, Roster
from strategies.engine.context import SecureContext
from strategies.engine.cross_site import evaluate_cross_site, willing_clients
from strategies.engine.recorded import RecordedStrategy
from strategies.novel.assess import assess_novel_clients

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation of the run config, or create models on demand with a trained run."""
    replace_dead_actors()
    if is_http_grid(grid):
        end_with_parent()
    config = RunConfig.from_flat(context.run_config)
    if config.personalize.run:
        for line in join_nodes(grid, config) if config.personalize.join_rounds else personalize(grid, config):
            log(logging.INFO, "%s", line)
    else:
        run(grid, config)


def personalize(grid: Grid, config: RunConfig) -> Iterator[str]:
    """Create a model for each novel client of a grid with a run's hypernetwork; yields a line about each."""
    source = open_run(Path(config.personalize.run))
    yield from source.notes
    for served in source.serve(grid):
        yield f"novel client {served.client}: {served.seen()}"


def join_nodes(grid: Grid, config: RunConfig) -> Iterator[str]:
    """Let each joining node of a grid join a run; yields a line about each."""
    settings = config.personalize
    source = open_joinable(Path(settings.run), settings.join_target, settings.join_learning_rate or None)
    yield from source.notes
    for served in source.join(grid, settings.join_rounds):
        yield f"novel client {served.client}: {served.seen()}"


def run(grid: Grid, config: RunConfig, *, plots: bool = True) -> Path:
    """Run a federation on a grid; returns the run's folder, with figures unless `plots` is False.

    Nothing is written before the handshake with the nodes has succeeded.

    Raises:
        HyperFLError: If the run cannot start, or fails.
    """
    early_records: list[logging.LogRecord] = []  # kept until the folder exists, then logged there

    def announce_early(line: str) -> None:
        announce(line)
        early_records.append(logging.makeLogRecord({"levelname": "INFO", "msg": line}))

    use_weights(config.lpm.weights)
    secure = secure_context(config)
    roster = _roster(grid, config, announce_early, secure)
    if problem := adversary_problem(config, simulated=roster.simulated):
        raise ConfigError(problem)
    directory, last_round = _resumed(config, roster) if config.resume else (_created(config, roster), 0)
    with _recorded(directory, early_records):
        announce(resolution_text(read_manifest(directory.path)["resolved"]))
        for line in secure_sum_warnings(config, simulated=roster.simulated):
            announce(line)
        for line in robust_warnings(config, roster.num_nodes):
            announce(line)
        if config.cross_site and not roster.simulated:
            number = len(willing_clients(roster.federation, config.num_clients))
            announce(f"cross-site: nodes with {number} of {config.num_clients} clients allow the matrix so far")
        _train(grid, resolved(config), roster, directory, last_round, secure)
        if plots:
            plot_run(directory.path)
    return directory.path


def _created(config: RunConfig, roster: Roster) -> RunDirectory:
    """Wait for the nodes, and create the run's folder."""
    path = Path(config.output) if config.output else Path.home() / "hyperfl-runs" / _name(config, roster)
    refuse_used_directory(path)  # before the nodes load their data
    federation = roster.gather()
    refuse_other_sources(federation, config.method, config.target, config.lpm.weights)
    check_run(config, federation.input_shape, federation.num_classes)
    _check_present(config, federation)
    directory = RunDirectory.create(path)
    sources = model_facts(config.target, config.lpm.weights) | method_facts(config.method)
    document = manifest.new(config.flat(), _resolution(config, roster), roster, sources, hosts=cluster_hosts())
    directory.write_json("manifest.json", document)
    keep_sources(config.flat(), directory.path)
    return directory


def _resumed(config: RunConfig, roster: Roster) -> tuple[RunDirectory, int]:
    """Wait for the nodes, and open the folder of the run to resume; returns it and the run's last completed round."""
    directory = RunDirectory(Path(config.resume))
    try:
        last_round = resume_round(config, resolved(config), keeps_state=client_of(config.method).keeps_state(config))
        federation = roster.gather(resumed=RunData.read(read_manifest(directory.path)).terms())
        refuse_other_sources(federation, config.method, config.target, config.lpm.weights)
        refuse_other_nodes(read_manifest(directory.path), roster.num_nodes)
        if roster.simulated:  # a node of a deployment could claim anything
            refuse_changed_data(read_manifest(directory.path), federation, config.dataset)
        refuse_changed_sources(read_manifest(directory.path), config.flat())
        check_run(config, federation.input_shape, federation.num_classes)
        _check_present(config, federation)
    except BaseException:
        directory.close()
        raise
    old, chosen = read_manifest(directory.path), _resolution(config, roster)
    begun = begun_rounds(directory.path, old)
    # On disk before rounds are deleted, so that those that were trained are always counted.
    document = manifest.resumed(
        old,
        config.flat(),
        chosen,
        roster,
        begun_rounds=begun,
        repeated_rounds=begun - last_round,
        hosts=cluster_hosts(),
    )
    directory.write_json("manifest.json", document)
    directory.rewind(last_round)  # deletes later rounds, so only after all checks have passed
    return directory, last_round


def _check_present(config: RunConfig, federation: Federation) -> None:
    """Refuse secure sums and robust reductions over too few nodes."""
    present = sum(bool(node.clients) for node in federation.nodes)
    check_nodes(config, federation.num_nodes, present)
    check_enough_nodes(config, present)


def _train(
    grid: Grid,
    config: RunConfig,
    roster: Roster,
    directory: RunDirectory,
    last_round: int,
    secure: SecureContext | None,
) -> None:
    experiment, folder = read_manifest(directory.path)["experiment"], str(directory.path)
    inner = new_strategy(config, roster.federation, experiment=experiment, run_directory=folder, secure=secure)
    strategy = RecordedStrategy(inner, directory, announce, roster)
    arrays = strategy.resume(last_round)
    result = strategy.start(grid, arrays, num_rounds=config.num_rounds, timeout=config.round_timeout)
    if config.novel.clients:
        assess_novel_clients(grid, inner, result.arrays, directory, announce)
    if config.cross_site:
        evaluate_cross_site(grid, inner.context, inner.progress.round, directory, announce)
    summary = summarise(directory.path)
    directory.write_json("summary.json", summary)
    if text := target_text(read_manifest(directory.path)["settings"], summary):
        announce(f"target-accuracy: {text}")
    for text in filter(None, (nobody_text(directory.path), majority_text(summary), fall_text(summary))):
        log(logging.WARNING, "%s", text)
    if text := statement_text(summary["privacy"]):
        announce(f"privacy: {text}")


@contextlib.contextmanager
def _recorded(directory: RunDirectory, early_records: Sequence[logging.LogRecord]) -> Iterator[None]:
    """Log to the run's `server.log`, starting with earlier lines, and record the run's end in the manifest."""
    handler = logging.FileHandler(directory.path / "server.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for record in early_records:
        handler.handle(record)
    FLOWER_LOGGER.addHandler(handler)
    log(logging.INFO, "The run's folder is %s", directory.path)
    status, problem, has_diverged = "completed", "", False
    failure: BaseException | None = None
    try:
        yield
    except RunFailedError as error:
        status, problem, has_diverged, failure = "failed", str(error), isinstance(error, DivergedError), error
        log(logging.ERROR, "%s", error)
        hint = f"resume with: hyperfl run --resume {shlex.quote(str(directory.path))}"
        if has_diverged:
            hint = DIVERGES_AGAIN
        raise type(error)(f"{error}\n{hint}") from error
    except BaseException as error:
        status = "failed" if isinstance(error, Exception) else "stopped"  # KeyboardInterrupt is not an Exception
        problem, failure = f"{type(error).__name__}: {error}", error
        if status == "failed":
            log(logging.ERROR, "the run ends with an exception", exc_info=error)
        else:
            log(logging.INFO, "the run was stopped (%s)", type(error).__name__)
        raise
    finally:
        end = {"status": status, "problem": problem, "diverged": has_diverged, "end": manifest.now()}
        try:
            directory.write_json("manifest.json", read_manifest(directory.path) | end)
        except (OSError, HyperFLError) as error:
            if failure is None:
                raise
            log(logging.ERROR, "the run's end is not in manifest.json: %s", error)  # the failure matters more
        finally:
            FLOWER_LOGGER.removeHandler(handler)
            handler.close()
            directory.close()


announce = partial(log, logging.INFO, "%s")


def plot_run(directory: Path) -> None:
    """Draw the figures of a finished run; nothing else of the server needs matplotlib, which takes half a second."""
    from hyperfl_flwr.runs.figures import plots

    plots.plot_run(directory)


def _roster(grid: Grid, config: RunConfig, announce: Announce, secure: SecureContext | None) -> Roster:
    return Roster(
        grid,
        num_clients=config.hosted_clients,
        timeout=config.node_timeout,
        min_nodes=None if config.min_nodes == "auto" else config.min_nodes,
        announce=announce,
        exclusion_rounds=config.exclusion_rounds,
        session=secure.session if secure else "",
        fewest=config.secagg.fewest_nodes if secure else config.robust.fewest_nodes,
        num_nodes=None if config.num_nodes == "auto" else config.num_nodes,
    )


def _resolution(config: RunConfig, roster: Roster) -> dict[str, Any]:
    min_nodes = roster.num_nodes if roster.simulated else roster.min_nodes
    return resolution(config, roster.federation, num_nodes=roster.num_nodes, min_nodes=min_nodes)


def _name(config: RunConfig, roster: Roster) -> str:
    return new_run_name(config.method, config.dataset if roster.simulated else DEPLOYMENT, config.seed)
