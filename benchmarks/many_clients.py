"""Measure runs of many clients with tiny data: `python -m benchmarks.many_clients`, which prints a table.

Each run is a separate process, so that its memory is its own. With the in-process engine, CPU seconds of each phase are
measured, which other programs on the machine hardly change; on Ray, only wall times are.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import NUM_NODES, TimedGrid
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.flower.env import training_environment
from hyperfl_flwr.launch.follow import RunCallbacks
from hyperfl_flwr.launch.planning import plan
from hyperfl_flwr.launch.plans import RAY
from hyperfl_flwr.launch.simulation import launch
from hyperfl_flwr.runs.run_directory import read_metrics

NUM_ROUNDS, PER_ROUND = 4, 30
"""Rounds of a run, and clients that a round trains unless it trains all."""

TRAIN, TEST, FEATURES, CLASSES = 8, 2, 16, 10
"""Samples of a client, and their length and classes."""

ENDS: dict[str, dict[str, Scalar]] = {"all": {}, "drawn": {"last-round": "sampled", "evaluate": 1000}}
"""Settings of the last round and the evaluation by name; those of `all` are the defaults."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run to measure.

    Attributes:
        method: Name of the method.
        clients: Number of clients.
        engine: `in-process` or `ray`; both with `NUM_NODES` nodes.
        end: A name of `ENDS`.
    """

    method: str
    clients: int
    engine: str
    end: str

    def settings(self, folder: Path) -> dict[str, Scalar]:
        """Return the settings that differ from the defaults; data and results are in a folder."""
        return {
            "method": self.method, "num-clients": self.clients, "fraction-train": PER_ROUND / self.clients,
            "dataset": f"npz:{folder / 'data.npz'}", "target": "mlp", "local-epochs": 1, "batch-size": TRAIN,
            "num-rounds": NUM_ROUNDS, "checkpoint-every": NUM_ROUNDS, "device": "cpu", "threads": 1,
            "output": str(folder / "run"), "hyperfl.hidden-width": 8, **ENDS[self.end],
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run has cost; times in seconds.

    Attributes:
        start: Until the first round: the data are read, and the nodes answer.
        round: Median of the rounds but the last.
        last: The last round.
        evaluation: The evaluation of the final state.
        rest: From there to the summary and the figures.
        memory: Largest resident memory of all processes, in bytes.
        state: Bytes of the clients' folder.
        entries: Largest number of entries in a folder below it.
        manifest: Bytes of manifest.json.
    """

    start: float
    round: float
    last: float
    evaluation: float
    rest: float
    memory: int
    state: int
    entries: int
    manifest: int


def write_data(clients: int, file: Path) -> None:
    """Write standard normal vectors with random labels for each client."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for prefix, count in (("", TRAIN), ("test_", TEST)):
        number = clients * count
        arrays[f"{prefix}features"] = rng.standard_normal((number, FEATURES), dtype=np.float32)
        arrays[f"{prefix}labels"] = rng.integers(0, CLASSES, number)
        arrays[f"{prefix}clients"] = np.repeat(np.arange(clients), count)
    np.savez(file, **arrays)


def measure(case: Case) -> Cost:
    """Run a case in this process, or on Ray from it; times are of the CPU in this process, and wall times on Ray."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(case.clients, folder / "data.npz")
        changes = case.settings(folder)
        times = _in_process(changes) if case.engine == "in-process" else _on_ray(changes)
        return _cost(folder / "run", times)


def _in_process(changes: dict[str, Scalar]) -> list[float]:
    """Return the CPU times of the begin, the first message of each phase, the end of the evaluation, and the end."""
    config = RunConfig.from_flat(default_settings() | changes)
    began = time.process_time()
    grid = TimedGrid(config.flat())
    run(grid, config)
    phases = [cpu for _, cpu in grid.times]
    return [began, *phases, grid.answered[1], time.process_time()]


def _on_ray(changes: dict[str, Scalar]) -> list[float]:
    """Return the same wall times, from the run's log and files."""
    began = time.time()
    path = launch(plan(changes, NUM_NODES, RAY), RunCallbacks())
    ended = time.time()
    rounds = [row["seconds"] for row in read_metrics(path) if row["kind"] == "train"]
    lines = [line for line in (path / "server.log").read_text().splitlines() if " INFO round " in line]
    ends = [datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() for line in lines]
    starts = [end - seconds for end, seconds in zip(ends, rounds, strict=True)]
    return [began, *starts, ends[-1], (path / "metrics.jsonl").stat().st_mtime, ended]


def _cost(path: Path, times: Sequence[float]) -> Cost:
    began, *starts, evaluation, evaluated, ended = times
    spans = np.diff([*starts, evaluation]).tolist()
    state = list((path / "clients").rglob("*"))
    folders = [path / "clients", *(entry for entry in state if entry.is_dir())]
    return Cost(
        start=starts[0] - began,
        round=statistics.median(spans[:-1]),
        last=spans[-1],
        evaluation=evaluated - evaluation,
        rest=ended - evaluated,
        memory=round(max(row["peak_memory_mb"] for row in read_metrics(path) if row["kind"] == "train") * 1e6),
        state=sum(entry.stat().st_size for entry in state if entry.is_file()),
        entries=max(len(list(folder.iterdir())) for folder in folders),
        manifest=(path / "manifest.json").stat().st_size,
    )


def rows_of(cases: Sequence[Case]) -> list[str]:
    """Measure cases, each in a process of its own; returns the lines of a table."""
    lines = [
        "| method | clients | engine | end | start s | round s | last round s | evaluation s | rest s | memory MB | "
        "state MB | largest folder | manifest kB |",
        "|---|---:|---|---|" + "---:|" * 9,
    ]
    for case in cases:
        words = [sys.executable, "-m", "benchmarks.many_clients", "--one", json.dumps(asdict(case))]
        done = subprocess.run(words, env=training_environment(), stdout=subprocess.PIPE, check=True)
        cost = Cost(**json.loads(done.stdout.splitlines()[-1]))
        lines.append(
            f"| {case.method} | {case.clients:,} | {case.engine} | {case.end} | {cost.start:.1f} | {cost.round:.2f} | "
            f"{cost.last:.1f} | {cost.evaluation:.1f} | {cost.rest:.1f} | {cost.memory / 1e6:.0f} | "
            f"{cost.state / 1e6:.1f} | {cost.entries:,} | {cost.manifest / 1e3:.0f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_clients", description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000, help="number of clients (default: 10,000)")
    parser.add_argument("--methods", default="fedavg,hyperfl", help="methods, with commas between them")
    parser.add_argument("--engines", default="in-process,ray", help="engines, with commas between them")
    parser.add_argument("--ends", default=",".join(ENDS), help="all, drawn, or both")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measure(Case(**json.loads(options.one))))))
        return
    cases = [
        Case(method=method, clients=options.clients, engine=engine, end=end)
        for method in options.methods.split(",")
        for engine in options.engines.split(",")
        for end in options.ends.split(",")
    ]
    print("\n".join(rows_of(cases)))


if __name__ == "__main__":
    main()
