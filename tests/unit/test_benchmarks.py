"""The benchmark's client part at a tiny size: that it runs, and that both sides compute the same."""

import importlib
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="needs a checkout of the project"),
]


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_both_sides_train_the_same(shape, monkeypatch):
    """The plain loop's training loss: two programs for one computation, float32, four steps: 1e-4."""
    monkeypatch.syspath_prepend(ROOT)
    clients = importlib.import_module("benchmarks.clients")
    timings = list(
        clients.measure_clients(repetitions=1, epochs=2, num_train=24, num_test=10, batch_size=12, shapes=[shape])
    )
    assert [timing.method for timing in timings] == ["fedavg", "hyperfl"]
    for timing in timings:
        assert timing.shape == shape
        assert timing.loss_difference < 1e-4
        for name in ("ours_cpu", "ours_wall", "plain_cpu", "plain_wall", "cpu_ratio", "wall_ratio"):
            assert math.isfinite(getattr(timing, name)), name
