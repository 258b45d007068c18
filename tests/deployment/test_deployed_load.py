"""The benchmark of a SuperLink with many nodes, with two of them."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="needs a checkout of the project")
def test_every_node_answers_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reply is lost or wrong, and a round takes at least as long as its clients sleep."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    deployed_load = importlib.import_module("benchmarks.deployed_load")
    found = deployed_load.measure_load(2, 3, print)
    assert (found.nodes, found.rounds, found.lost) == (2, 3, 0)
    assert deployed_load.SLEEP <= found.round_seconds <= found.longest_round
    assert found.memory_end > 50e6
    assert found.node_memory > 20e6
