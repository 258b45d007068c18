"""Runs with malicious nodes: attacks that work, controls without malicious nodes, and where they are refused."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import small_settings, trained

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.node import NodeApp
from hyperfl_flwr.app.server import run as run_server
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.faults import check_resume
from hyperfl_flwr.contract.folders import last_checkpoint, metrics, outcome
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import ConfigError, RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.planning import plan, plan_deployed
from hyperfl_flwr.launch.plans import IN_PROCESS
from hyperfl_flwr.server.in_process_grid import InProcessGrid

ATTACK, NODES, SHARE, SCALE = (f"adversary.{name}" for name in ("attack", "nodes", "share", "scale"))

LEARNING: Settings = {
    "target": "mlp", "local-epochs": 3, "num-rounds": 3, "learning-rate": 0.1,
    "data.partition": "iid", "data.train-samples": 80, "data.test-samples": 40,
}  # fmt: skip
"""Settings with which five clients learn the digits in three rounds, to an accuracy of about 0.9."""

SCALES = (1e-30, 1e6)

MALICIOUS = "1,3"
HONEST = (0, 2, 4)


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs fedavg with one client on each node, once for each attack; returns the summary."""

    @cache
    def run(attack: str = "none", nodes: str = "auto", scale: float | str = "auto") -> dict[str, Any]:
        settings = small_settings(method="fedavg", output=str(tmp_path_factory.mktemp("learnt") / "run"), **LEARNING)
        adversary = {ATTACK: attack, NODES: nodes, SCALE: scale}
        return summary(trained(settings | adversary, num_nodes=NUM_CLIENTS))

    return run


def test_the_network_learns_without_malicious_nodes(learnt: Any) -> None:
    assert learnt()["test_accuracy_aggregate"] > 0.8


@pytest.mark.parametrize(
    ("attack", "nodes", "scale"),
    [
        ("label-flip", "0,1,3", "auto"),
        ("sign-flip", MALICIOUS, 2.0),
        ("ipm", MALICIOUS, 3.0),
        ("alie", MALICIOUS, 40.0),
    ],
)
def test_attacks_cost_accuracy(learnt: Any, attack: str, nodes: str, scale: float | str) -> None:
    assert learnt(attack, nodes, scale)["test_accuracy_aggregate"] < 0.6


def test_one_malicious_node_replaces_the_model(learnt: Any) -> None:
    """The backdoor works, and costs little accuracy; without a malicious node nobody has learnt it."""
    backdoored, clean = learnt("backdoor", "1"), learnt("backdoor")
    assert backdoored["backdoor_success_aggregate"] > 0.8
    assert backdoored["test_accuracy_aggregate"] > 0.7
    assert clean["backdoor_success_aggregate"] < 0.2
    assert clean["backdoor_success"] < 0.2


@pytest.mark.parametrize(
    ("method", "attack"), [("fedavg", "label-flip"), ("fedavg", "ipm"), ("fedavg", "backdoor"), ("pfedhn", "alie")]
)
def test_without_malicious_nodes_it_is_an_honest_run(method: str, attack: str, federate: Federate) -> None:
    """A backdoor is measured without malicious nodes, too, which needs a metric in each reply."""

    def without_backdoor(run: Path) -> dict[str, Any]:
        left_out = {"personalized_backdoor_success", "aggregate_backdoor_success"}
        left_out |= {"bytes_on_wire"} if attack == "backdoor" else set()
        found = outcome(run)
        rows = [{key: value for key, value in row.items() if key not in left_out} for row in found["metrics"]]
        return found | {"metrics": rows}

    attacked = federate(method, **{ATTACK: attack, SHARE: 0.0})
    assert without_backdoor(attacked) == without_backdoor(federate(method))


@pytest.mark.parametrize("method", ["fedavg", "hyperfl", "pfedhn", "scaffold", "fedgen"])
def test_numbers_are_of_honest_clients(method: str, federate: Federate) -> None:
    """The clients of malicious nodes finish without metrics; means and the summary are over all others."""
    run = federate(method, NUM_CLIENTS, **{ATTACK: "sign-flip", NODES: MALICIOUS})
    rows = [row for row in metrics(run) if row["kind"] == "client" and row["round"] == 2]
    assert [row["client"] for row in rows if "personalized_accuracy" in row] == list(HONEST)
    assert len(rows) == NUM_CLIENTS
    found = summary(run)
    known = [found["test_accuracy_per_client"][client] for client in HONEST]
    assert found["test_accuracy_num_clients"] == found["test_accuracy_aggregate_num_clients"] == len(HONEST)
    assert found["test_accuracy"] == pytest.approx(sum(known) / len(HONEST))
    assert [client for client, value in enumerate(found["test_accuracy_per_client"]) if value is None] == [1, 3]


def test_one_client_moves_the_models_of_all_others(federate: Federate) -> None:
    """With pfedhn, a false update of client 1 in round 1 changes what clients 0, 2 and 4 are sent in round 2 only."""

    def received(run: Path) -> list[dict[int, float]]:
        rows = [row for row in metrics(run) if row["kind"] == "client-aggregate"]
        return [
            {row["client"]: row["aggregate_loss"] for row in rows if row["round"] == after and row["client"] in HONEST}
            for after in (0, 1)
        ]

    honest = received(federate("pfedhn", NUM_CLIENTS))
    attacked = received(federate("pfedhn", NUM_CLIENTS, **{ATTACK: "sign-flip", NODES: "1"}))
    assert honest[0] == attacked[0]
    assert all(honest[1][client] != attacked[1][client] for client in HONEST)


@pytest.mark.parametrize("method", ["fedavg", "pfedhn"])
def test_a_forged_change_that_is_too_long_is_refused(method: str, federate: Federate) -> None:
    """`max-update-ratio` leaves the node out in each round, and the run goes on with the others."""
    run = federate(method, NUM_CLIENTS, **{ATTACK: "sign-flip", NODES: "1", SCALE: 1e6})
    rounds = [row for row in metrics(run) if row["kind"] == "train"]
    assert [(row["clients"], row["failed"]) for row in rounds] == [(4, [1]), (4, [1])]
    texts = [path.read_text() for path in (run / "failures").iterdir()]
    assert len(texts) == 2
    assert all("more than max-update-ratio" in text for text in texts)
    assert summary(run)["test_accuracy_num_clients"] == 4


@pytest.mark.parametrize(("scale", "clients"), [(1.0, 5), (1.5, 4)])
def test_privacy_of_clients_bounds_a_forged_change(scale: float, clients: int, federate: Federate) -> None:
    """With noise on the server, no change counts that is longer than a clipped one, as the honest ones here are."""
    private: dict[str, Any] = {"privacy.unit": "client", "privacy.noise": "server", "privacy.noise-multiplier": 0.1}
    adversary = {ATTACK: "sign-flip", NODES: "1", SCALE: scale}
    run = federate("fedavg", NUM_CLIENTS, num_rounds=1, **private, **{"privacy.clip-norm": 0.001}, **adversary)
    (row,) = [row for row in metrics(run) if row["kind"] == "train"]
    assert (row["clients"], row["failed"]) == (clients, [] if clients == NUM_CLIENTS else [1])


@pytest.mark.parametrize("method", ["pfedhn", "scaffold"])
def test_a_change_of_nothing_is_as_if_the_node_were_silent(method: str, federate: Federate) -> None:
    """Where the server adds up changes, an update of 10^-30 of the change is worth as much as a refused reply.

    Both methods send changes in place of values. The mean of scaffold's models is over another number of clients.
    """
    plan: dict[str, Any] = {"num_rounds": 1, "pfedhn.combine": "sum", ATTACK: "sign-flip", NODES: "1"}
    nothing, refused = (last_checkpoint(federate(method, NUM_CLIENTS, **plan, **{SCALE: scale}))[0] for scale in SCALES)
    compared = [key for key in nothing if not key.startswith("model/")]
    assert compared
    for key in compared:
        np.testing.assert_allclose(nothing[key], refused[key], rtol=1e-5, atol=1e-7)


def test_a_resumed_run_has_the_same_malicious_nodes(federate: Federate) -> None:
    def federate_malicious(method: str, num_nodes: int = NUM_CLIENTS, **changes: Any) -> Path:
        return federate(method, num_nodes, **{ATTACK: "backdoor", SHARE: 0.4} | changes)

    check_resume("fedavg", federate_malicious)


def test_the_run_names_the_malicious_nodes(federate: Federate) -> None:
    run = federate("fedavg", NUM_CLIENTS, **{ATTACK: "ipm", SHARE: 0.4})
    malicious = json.loads((run / "manifest.json").read_text())["resolved"]["adversary.nodes"]
    silent = [client for client, value in enumerate(summary(run)["test_accuracy_per_client"]) if value is None]
    assert list(map(int, malicious.split(","))) == silent


def test_each_client_has_a_node_of_its_own(tmp_path: Path) -> None:
    """Unless another number is given, so that the malicious nodes do not depend on the machine."""
    changes: dict[str, Scalar] = {"num-clients": 10, "output": str(tmp_path / "run"), ATTACK: "alie", SHARE: 0.2}
    assert [plan(changes, nodes, IN_PROCESS).num_nodes for nodes in (None, 5)] == [10, 5]
    with pytest.raises(ConfigError, match=r"adversary.share = 0.2 selects no node of 2"):
        plan(changes, 2, IN_PROCESS)


def test_a_deployment_refuses_attacks(tmp_path: Path) -> None:
    """When it is planned, and in the server app, before it asks a node."""
    changes: dict[str, Scalar] = {"output": str(tmp_path / "run"), ATTACK: "alie", SHARE: 0.4}
    with pytest.raises(ConfigError, match=r"adversary.attack must be none in a deployment, got alie"):
        plan_deployed(NUM_CLIENTS, changes)
    settings = small_settings(method="fedavg", **changes)
    grid = InProcessGrid(app, NUM_CLIENTS, settings)
    with pytest.raises(ConfigError, match=r"adversary.attack must be none in a deployment, got alie"):
        run_server(grid, RunConfig.from_flat(settings))
    assert not (tmp_path / "run").exists()


def test_a_deployed_node_refuses_to_attack(tmp_path: Path) -> None:
    """Whatever the attack and the nodes that it names; with the default it takes part."""
    node = NodeConfig.of({"partition-id": 0, "num-partitions": NUM_CLIENTS, "state-dir": str(tmp_path)})
    given: dict[str, Scalar] = {ATTACK: "label-flip", NODES: "1"}
    with pytest.raises(RefusalError, match=r"adversary.attack must be none in a deployment, got label-flip"):
        NodeApp(node, small_settings(method="fedavg", **given))
    assert not NodeApp(node, small_settings(method="fedavg")).is_malicious


def test_means_and_their_errors_are_of_the_honest_clients(federate: Federate) -> None:
    """Clients are drawn from all, but only honest ones have numbers: the error is of a draw from these."""
    run = federate(
        "fedavg", num_clients=8, num_nodes=8, num_rounds=2, fraction_train=0.75, last_round="sampled",
        **{ATTACK: "label-flip", SHARE: 0.5},
    )  # fmt: skip
    rows = [
        row for row in metrics(run) if row["kind"] == "client" and row["round"] == 2 and "personalized_accuracy" in row
    ]
    (line,) = [row for row in metrics(run) if row["kind"] == "train" and row["round"] == 2]
    number, values = len(rows), [row["personalized_accuracy"] for row in rows]
    assert 1 < number < 4
    assert (line["clients"], line["measured"], line["drawn_from"]) == (6, number, 4)
    assert line["personalized_accuracy"] == pytest.approx(np.mean(values))
    wanted = np.std(values, ddof=1) / number**0.5 * (1 - number / 4) ** 0.5
    assert line["personalized_accuracy_sem"] == pytest.approx(wanted)
    best = max((row for row in metrics(run) if row["kind"] == "train"), key=lambda row: row["personalized_accuracy"])
    assert summary(run)["best_num_clients"] == best["measured"] < best["clients"]
    assert f"of {number} clients drawn from 4, 6 of 6 clients finished" in (run / "server.log").read_text()
