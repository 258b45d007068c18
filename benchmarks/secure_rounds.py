"""Measure whole rounds with secure sums against plain ones."""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workload import Workload, write_dataset
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.runs.run_directory import read_metrics
from hyperfl_flwr.server.in_process_grid import InProcessGrid

FROZEN: dict[str, Scalar] = {"hyperfl.embedding": "common-frozen"}
"""The setting with which HyperFL's sums can be secure."""

TURNS = 6
"""Number of runs, every second one with secure sums."""


@dataclass(frozen=True, kw_only=True)
class SecureRound:
    """A round with secure sums and a plain one, all nodes in one process.

    Attributes:
        method: The method.
        nodes: Number of nodes.
        plain: Median wall seconds of a plain round.
        secure: Median wall seconds of a round with secure sums.
    """

    method: str
    nodes: int
    plain: float
    secure: float


def measure_rounds(work: Workload, num_rounds: int) -> SecureRound:
    """Measure rounds with and without secure sums in runs that take turns; the first round of each is not counted.

    Args:
        work: The workload.
        num_rounds: Number of rounds of each run, at least 2.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "images.npz"
        write_dataset(work, dataset)
        for turn in range(TURNS):
            is_secure = bool(turn % 2)
            settings = work.settings() | (FROZEN if work.method == "hyperfl" else {})
            settings |= {"num-rounds": num_rounds, "dataset": f"npz:{dataset}", "output": f"{folder}/{turn}"}
            settings |= {"secagg.enabled": is_secure, "checkpoint-every": 1}
            grid = InProcessGrid(app, work.clients, settings, {"simulated": True})
            rows = [row for row in read_metrics(run(grid, RunConfig.from_flat(settings))) if row["kind"] == "train"]
            seconds[is_secure] += [row["seconds"] for row in rows[1:]]
    plain, secure = (statistics.median(seconds[is_secure]) for is_secure in (False, True))
    return SecureRound(method=work.method, nodes=work.clients, plain=plain, secure=secure)
