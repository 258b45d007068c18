"""The results of runs with secure sums: what summary, page, figures, table and export show without single clients."""

import json
from pathlib import Path
from typing import Any

import pytest
from federations import Call, Federate, Settings
from html_pages import Page

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.planning import plan
from hyperfl_flwr.launch.plans import IN_PROCESS, RAY
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.run_directory import read_metrics
from hyperfl_flwr.runs.summary import summarise

SECURE: Settings = {"secagg.enabled": True, "target": "mlp", "data.train-samples": 20}


@pytest.mark.parametrize(("num_clients", "has_std"), [(6, False), (10, True)])
def test_summary_and_page(num_clients: int, has_std: bool, federate: Federate) -> None:
    """Means are known, and from ten clients on standard deviations; the page says what is not known."""
    run = federate("fedrep", 3, plots=True, **SECURE, num_clients=num_clients)
    last = [row for row in read_metrics(run) if row["kind"] == "train"][-1]
    summary = summarise(run)
    assert summary["test_accuracy"] == last["personalized_accuracy"]
    assert summary["test_accuracy_num_clients"] == num_clients
    assert (summary["test_accuracy_std"] is not None) == has_std
    hidden = ("test_accuracy_per_client", "test_accuracy_worst", "test_accuracy_worst_decile")
    assert [summary[key] for key in hidden] == [None] * 3
    assert json.loads((run / "summary.json").read_text()) == summary
    assert (run / "plots" / "run.png").is_file()
    text = write_report(run).read_text()
    page = Page(text)
    assert "sums over 3 nodes and no single client; 3 of them must answer" in text
    assert page.rows["personalized accuracy of the worst client"] == "not known: sums are secure"
    assert len(page.figures) == 3 + has_std  # accuracy, loss, label counts of a simulation, and perhaps the spread


def test_a_client_is_exported_without_its_accuracy(federate: Federate, call: Call) -> None:
    run = federate("fedrep", 3, **SECURE, num_clients=6)
    code, _, err = call("export", str(run), "--client", "3", "-o", "mine/model.safetensors")
    assert code == 0, err
    (document,) = run.parent.rglob("mine/model.json")
    assert json.loads(document.read_text())["accuracy"] is None


@pytest.mark.parametrize(
    ("num_clients", "engine", "num_nodes"), [(10, IN_PROCESS, 3), (10, RAY, 3), (4, IN_PROCESS, 3)]
)
def test_a_simulation_has_enough_nodes(num_clients: int, engine: str, num_nodes: int, tmp_path: Path) -> None:
    """On two cores or one; a machine with more may have more."""
    changes = SECURE | {"method": "fedrep", "num-clients": num_clients, "output": str(tmp_path / "run")}
    assert plan(changes, engine=engine).num_nodes >= num_nodes


@pytest.mark.parametrize(
    ("num_nodes", "changes", "problem"),
    [
        (2, {}, "start more nodes"),
        (101, {"num-clients": 101}, "allows at most 100 nodes"),
        (None, {"num-clients": 2}, "start more nodes"),
        (3, {"method": "pfedhn"}, "secagg.enabled must be false with pfedhn"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run_starts(
    num_nodes: int | None, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    settings = SECURE | {"method": "fedrep", "num-clients": 10, "output": str(tmp_path / "run")} | changes
    with pytest.raises(ConfigError, match=problem):
        plan(settings, num_nodes, engine=IN_PROCESS)
