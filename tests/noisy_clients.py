"""Settings of runs with differential privacy of whole clients, and what the runs record."""

import json
from pathlib import Path
from typing import Any

from hyperfl_flwr.contract.folders import last_checkpoint
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.protocol.arrays import SharedArrays

N, NODES, C, Z = 8, 4, 0.5, 1.2

CLIPPED: Settings = {
    "num_clients": N, "num_rounds": 1, "data.train-samples": 20, "target": "cnn", "privacy.unit": "client",
    "privacy.clip-norm": C,
}  # fmt: skip
"""Settings of a round in which changes are clipped; the target has enough parameters to measure noise."""

SUM: Settings = {"privacy.noise": "sum", "secagg.enabled": True}


def noisy(noise: str, **changes: Any) -> Settings:
    """Return the settings of a round with noise."""
    secure = SUM if noise == "sum" else {}
    return CLIPPED | {"privacy.noise": noise, "privacy.noise-multiplier": Z} | secure | changes


def arrays_of(run: Path) -> SharedArrays:
    return last_checkpoint(run)[0]


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "privacy.jsonl").read_text().splitlines()]


def privacy_of(run: Path) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((run / "summary.json").read_text())["privacy"]
    return entry
