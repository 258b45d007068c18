"""The runs whose results are stored in expected.json, and the command that stores them again.

Run it from the project's root, only when results are MEANT to change, and give the reason in the commit's message::

    python -m tests.golden.regenerate
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hyperfl_flwr.app import client as client_app
from hyperfl_flwr.app import server as server_app
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.runs.run_directory import read_metrics
from hyperfl_flwr.server.in_process_grid import InProcessGrid

EXPECTED = Path(__file__).with_name("expected.json")

# Current defaults are written out as well: a new default must not change what is compared.
COMMON: dict[str, Scalar] = {
    "dataset": "digits",
    "device": "cpu",
    "seed": 0,
    "num-clients": 4,
    "num-rounds": 3,
    "fraction-train": 1.0,
    "local-epochs": 2,
    "batch-size": 50,
    "learning-rate": 0.01,
    "momentum": 0.5,
    "weight-decay": 5e-4,
    "target": "cnn",
    "threads": 1,
    "data.partition": "similarity",
    "data.seed": 0,
    "data.train-samples": 100,
    "data.test-samples": 60,
    "data.iid-fraction": 0.2,
    "hyperfl.initialisation": "hyperfan-bias",
    "hyperfl.embedding": "trained",
    "hyperfl.embedding-dim": 16,
    "hyperfl.hidden-width": 32,
    "hyperfl.classifier-learning-rate": 0.1,
    "hyperfl.embedding-learning-rate": "auto",
    "hyperfl.clip-norm": 50.0,
}
RUNS: dict[str, dict[str, Scalar]] = {
    "local": {"method": "local"},
    "fedavg": {"method": "fedavg"},
    "hyperfl": {"method": "hyperfl"},
    "hyperfl, sampled, a common frozen embedding": {
        "method": "hyperfl",
        "hyperfl.embedding": "common-frozen",
        "fraction-train": 0.5,
    },
}
"""Settings that differ from `COMMON`, by name of the run."""

KEYS = ("train_loss", "personalized_accuracy")


def sequences(name: str, folder: Path, *, num_nodes: int = 2, device: str = "cpu") -> dict[str, Sequence[float]]:
    """Run one of `RUNS` in this process and return its mean training loss and personalized accuracy by round."""
    changes = {"output": str(folder / "run"), "device": device}
    config = RunConfig.from_flat(default_settings() | COMMON | RUNS[name] | changes)
    grid = InProcessGrid(client_app.app, num_nodes, config.flat(), {"simulated": True})
    rounds = [record for record in read_metrics(server_app.run(grid, config)) if record["kind"] == "train"]
    return {key: [record[key] for record in rounds] for key in KEYS}


def main() -> None:
    """Store the results that the current code computes."""
    found = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = sequences(name, Path(folder))
    EXPECTED.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
