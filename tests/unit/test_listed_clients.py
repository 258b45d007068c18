"""A manifest lists the clients of a small run, and summarises those of a large one."""

import json
from pathlib import Path

import pytest

from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import metrics, outcome
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs import listed_clients
from hyperfl_flwr.runs.listed_clients import clients_per_node, known_sizes, label_rows, labels_entry, nodes_entry
from hyperfl_flwr.runs.run_directory import is_simulation, read_manifest

ROWS = [[3, 0], [1, 2], [0, 5]]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients are many."""
    monkeypatch.setattr(listed_clients, "MOST_LISTED", 2)


def test_small_numbers_are_listed() -> None:
    assert nodes_entry([range(0, 3, 2), [1]]) == [[0, 2], [1]]
    assert labels_entry({"train": ROWS}, 2) == {"train": ROWS}


@pytest.mark.usefixtures("few")
def test_large_numbers_are_summarised() -> None:
    """By hand; the third client is novel, and the last node's clients are no range."""
    assert labels_entry({"train": ROWS, "test": ROWS}, 2)["train"] == {
        "clients_by_samples": {"3": 2}, "per_class": [4, 2],
    }  # fmt: skip
    entry = nodes_entry([[0, 3, 6], [1], [], [2, 4, 5]])
    assert entry == [{"first": 0, "step": 3, "number": 3}, {"first": 1, "step": 1, "number": 1}, [], [2, 4, 5]]
    assert clients_per_node({"nodes": entry}) == [3, 1, 0, 3]


@pytest.mark.usefixtures("few")
def test_sizes_of_a_summary_are_those_of_the_rows() -> None:
    """Clients that have not reported are known by their sizes only."""
    manifest = {"label_counts": labels_entry({"train": ROWS}, 3), "settings": {"num-clients": 3}, "experiment": "a"}
    listed = {**manifest, "label_counts": {"train": ROWS}}
    assert known_sizes(listed, {}) == {0: 3, 1: 3, 2: 5}
    assert sorted(known_sizes(manifest, {}).values()) == [3, 3, 5]
    found = known_sizes(manifest, {1: 3})
    assert found.pop(1) == 3
    assert sorted(found.values()) == [3, 5]
    assert max(found) < 0
    assert known_sizes(manifest, {0: 3, 1: 3, 2: 5}) == known_sizes(listed, {})
    assert known_sizes({"settings": {"num-clients": 3}}, {0: 7}) == {0: 7}  # a deployment
    assert label_rows(listed) == ROWS
    with pytest.raises(
        RunDirectoryError, match=r"has 3 clients, and manifest.json lists the label counts of at most 2"
    ):
        label_rows(manifest)


@pytest.mark.usefixtures("few")
def test_a_run_with_a_summarised_manifest_is_like_any_other(federate: Federate, tmp_path: Path) -> None:
    """It is resumed, has a report, and states the same privacy of records, also of clients that no round has drawn."""
    noisy = {"dp.epsilon": 4.0, "fraction_train": 0.4, "last_round": "sampled"}
    many = federate("fedavg", num_rounds=2, **noisy)
    manifest = read_manifest(many)
    assert manifest["label_counts"]["train"]["clients_by_samples"] == {"40": NUM_CLIENTS}
    assert manifest["nodes"] == [{"first": 0, "step": 2, "number": 3}, {"first": 1, "step": 2, "number": 2}]
    assert is_simulation(manifest)
    text = write_report(many, tmp_path / "many.html").read_text()
    assert "5 clients on 2 nodes" in text
    assert "The run has too many clients for a figure of their samples" in text.replace("\n", " ")
    longer = federate("fedavg", num_rounds=1, evaluate="all")
    resumed = federate("fedavg", num_rounds=2, resume=str(longer))
    assert len(metrics(resumed)) > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listed_clients, "MOST_LISTED", 1000)
        listed, straight = federate("fedavg", num_rounds=2, **noisy), federate("fedavg", num_rounds=2)
    privacy = [json.loads((run / "summary.json").read_text())["privacy"] for run in (many, listed)]
    assert privacy[0] == privacy[1]
    assert outcome(resumed) == outcome(straight)
