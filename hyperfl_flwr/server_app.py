"""Flower's server app: settings in, rounds, results out."""

from hyperfl_flwr.packages import APP, refuse_foreign_packages

refuse_foreign_packages(APP)  # before anything else of the project is imported

# ruff: isort: split
import json
import logging
import secrets
import time
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from hyperfl_flwr import manifest
from hyperfl_flwr.config import RunConfig
from hyperfl_flwr.errors import HyperFLError, RunFailedError
from hyperfl_flwr.grid import Federation, handshake
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.plots import plot_run
from hyperfl_flwr.ray_pool import replace_dead_actors
from hyperfl_flwr.recording import RunDirectory, read_manifest
from hyperfl_flwr.resume import resume_round
from hyperfl_flwr.summary import summarise
from strategies.base import Setting
from strategies.recorded import RecordedStrategy

replace_dead_actors()

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run config describes."""
    run(grid, RunConfig.from_flat(context.run_config, methods=METHODS))


def run(grid: Grid, config: RunConfig) -> Path:
    """Run a federation on a grid; returns the run's folder.

    Raises:
        HyperFLError: If the run cannot start, or fails.
    """
    last_round = resume_round(config) if config.resume else 0
    directory = RunDirectory(Path(config.resume)) if config.resume else RunDirectory.create(_output(config))
    handler = logging.FileHandler(directory.path / "server.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("flwr").addHandler(handler)
    try:
        log(logging.INFO, "The run directory is %s", directory.path)
        _run(grid, config, directory, last_round)
    except HyperFLError as error:
        log(logging.ERROR, "%s", error)
        _finish(directory, "failed", str(error))
        resume = f"resume with: hyperfl run --resume {directory.path}"
        if isinstance(error, RunFailedError):
            raise RunFailedError(f"{error}\n{resume}") from error
        raise
    finally:
        logging.getLogger("flwr").removeHandler(handler)
        handler.close()
        directory.close()
    return directory.path


def _run(grid: Grid, config: RunConfig, directory: RunDirectory, last_round: int) -> None:
    experiment = read_manifest(directory.path)["experiment"] if config.resume else secrets.token_hex(8)
    document = _begin(config, directory, experiment)
    federation = handshake(grid, config.num_clients, config.node_timeout)
    document["nodes"] = [list(node.clients) for node in federation.nodes]
    document["devices"] = [node.properties["device"] for node in federation.nodes]
    document |= _data_notes(federation)
    directory.write_json("manifest.json", document)
    method = METHODS[config.method]
    inner = method.strategy(
        Setting(
            config=config,
            federation=federation,
            reductions=method.client.shared,
            experiment=experiment,
            run_directory=str(directory.path),
        )
    )
    strategy = RecordedStrategy(inner, directory, announce=lambda line: log(logging.INFO, "%s", line))
    arrays = inner.initial_arrays()
    if config.resume:
        arrays = strategy.resume(last_round) if last_round else _from_the_start(directory, arrays)
    strategy.start(grid, arrays, num_rounds=config.num_rounds, timeout=config.round_timeout)
    directory.write_json("summary.json", summarise(directory.path))
    plot_run(directory.path)
    _finish(directory, "completed", "")


def _output(config: RunConfig) -> Path:
    """Return the new run's folder: the setting, or a fresh name in the user's home."""
    if config.output:
        return Path(config.output)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.method}-{config.dataset.rpartition('/')[2]}-seed{config.seed}"
    return Path.home() / "hyperfl-runs" / f"{name}-{secrets.token_hex(2)}"


def _begin(config: RunConfig, directory: RunDirectory, experiment: str) -> dict[str, Any]:
    """Write the manifest of a run that begins or goes on."""
    document: dict[str, Any] = {
        "experiment": experiment,
        "status": "running",
        "settings": config.flat(),
        "versions": manifest.versions(),
        "code": manifest.code(),
        "hardware": manifest.hardware(),
        "start": manifest.now(),
        "end": None,
        "nodes": [],
    }
    if config.resume:
        old = read_manifest(directory.path)
        document["start"] = old["start"]
        document["resumed"] = [*old.get("resumed", []), manifest.now()]
    directory.write_json("manifest.json", document)
    return document


def _finish(directory: RunDirectory, status: str, problem: str) -> None:
    if not (directory.path / "manifest.json").is_file():
        return
    document = read_manifest(directory.path) | {"status": status, "problem": problem, "end": manifest.now()}
    directory.write_json("manifest.json", document)


def _data_notes(federation: Federation) -> dict[str, Any]:
    """Return what the nodes of a simulation tell about their data; a deployment's nodes tell nothing."""
    counts = federation.label_counts()
    if not counts:
        return {}
    reuse = json.loads(str(federation.nodes[0].properties["data-reuse"]))
    ordered = {split: [rows[client] for client in sorted(rows)] for split, rows in counts.items()}
    return {"label_counts": ordered, "data_reuse": reuse}


def _from_the_start(directory: RunDirectory, arrays: ArrayRecord) -> ArrayRecord:
    """Forget the rounds of a run that has no checkpoint yet."""
    directory.rewind(0)
    return arrays
