"""Malicious nodes and robust rules together: a rule sees false updates as of nodes, and names the malicious nodes."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from federations import small_settings, trained

from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics, outcome
from hyperfl_flwr.contract.grids import PermutedGrid, Settings
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.observation import load_observation, observation_path

ATTACK, NODES, SCALE, RULE = "adversary.attack", "adversary.nodes", "adversary.scale", "robust.reduction"

MALICIOUS = 1

LEARNING: Settings = {
    "target": "mlp", "local-epochs": 2, "num-rounds": 2, "learning-rate": 0.1,
    "data.partition": "iid", "data.train-samples": 80, "data.test-samples": 20,
}  # fmt: skip
"""Settings with which five clients learn the digits in two rounds, to an accuracy of about 0.8."""

Learnt = Callable[..., Path]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    """Return a function that runs fedavg on five nodes of which one is malicious, once for each attack and rule."""

    @cache
    def run(attack: str, rule: str = "mean", scale: float | str = "auto") -> Path:
        settings = small_settings(method="fedavg", output=str(tmp_path_factory.mktemp("learnt") / "run"), **LEARNING)
        return trained(
            settings | {ATTACK: attack, NODES: str(MALICIOUS), SCALE: scale, RULE: rule}, num_nodes=NUM_CLIENTS
        )

    return run


def result(run: Path, name: str) -> float:
    return float(json.loads((run / "summary.json").read_text())[name])


@pytest.mark.parametrize("rule", ["median", "krum", "geometric-median"])
def test_a_rule_holds_where_the_mean_falls(rule: str, learnt: Learnt) -> None:
    """With one of five nodes that turns around four times its change, the mean of the changes is about nothing."""
    fallen, held = (result(learnt("sign-flip", name, 4.0), "test_accuracy_aggregate") for name in ("mean", rule))
    assert fallen < 0.5 < 0.65 < held


def test_a_norm_bound_weakens_the_replacement_of_the_model(learnt: Learnt) -> None:
    """It goes on to work in half of the images, since the bound leaves its direction."""
    mean, bounded = (result(learnt("backdoor", rule), "backdoor_success_aggregate") for rule in ("mean", "norm-bound"))
    assert mean > 0.75
    assert bounded < mean - 0.2


@pytest.mark.parametrize("rule", ["krum", "geometric-median"])
def test_the_malicious_node_is_named(rule: str, learnt: Learnt) -> None:
    """In the shares of the summary and in the report, which also names the malicious nodes."""
    run = learnt("sign-flip", rule, 4.0)
    shares = json.loads((run / "summary.json").read_text())["node_shares"]
    assert sorted(shares) == list("01234")
    assert shares[str(MALICIOUS)] == min(shares.values()) < 0.5
    page = write_report(run).read_text()
    assert f"Malicious nodes</dt><dd>{MALICIOUS} (sign-flip); all numbers are of the other nodes" in page


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_an_audit_changes_no_false_update(rule: str, federate: Federate) -> None:
    """Audited clients answer in messages of their own, but a node of several clients is one of them, bit by bit."""
    attack: dict[str, Any] = {ATTACK: "alie", NODES: "0,1" if rule == "mean" else "0", SCALE: 3.0, RULE: rule}
    plain, audited = (
        federate("fedavg", 3, num_rounds=1, **attack, **{"audit.clients": audit, "audit.rounds": "1"})
        for audit in ("", "0,1")
    )
    assert exact(last_checkpoint(plain)[0]) == exact(last_checkpoint(audited)[0])
    honest = federate("fedavg", 3, num_rounds=1, **{"audit.clients": "0", "audit.rounds": "1"})
    false, true = (load_observation(observation_path(run, 1, 0)).reply for run in (audited, honest))
    assert exact(false) != exact(true)


def test_neither_the_order_of_nodes_nor_a_resumption_has_an_effect(federate: Federate) -> None:
    settings: dict[str, Any] = {ATTACK: "ipm", NODES: "1", RULE: "geometric-median", "fraction-train": 0.8}
    run = federate("fedrep", NUM_CLIENTS, **settings)
    permuted = federate("fedrep", NUM_CLIENTS, grid=PermutedGrid, **settings)
    assert outcome(run)["arrays"] == outcome(permuted)["arrays"]
    short = federate("fedrep", NUM_CLIENTS, **settings | {"num_rounds": 1})
    resumed = federate("fedrep", NUM_CLIENTS, resume=str(short), **settings)
    assert outcome(resumed)["arrays"] == outcome(run)["arrays"]


def test_malicious_nodes_that_are_refused_count_as_missing(federate: Federate) -> None:
    """Krum of five nodes needs all: one whose update is refused stops every round, where the median goes on."""
    attack: dict[str, Any] = {ATTACK: "sign-flip", NODES: str(MALICIOUS), SCALE: 1e300, "num_rounds": 1}
    with pytest.raises(RunFailedError, match=r"every client failed: node 1: .* is not finite"):
        federate("fedavg", NUM_CLIENTS, **attack, **{RULE: "krum", "failure_budget": 1.0})
    run = federate("fedavg", NUM_CLIENTS, **attack, **{RULE: "median"})
    assert [row["failed"] for row in metrics(run) if row["kind"] == "train"] == [[MALICIOUS]]


@pytest.mark.parametrize(("nodes", "warned"), [("1", False), ("1,3", True)])
def test_more_malicious_nodes_than_a_rule_allows_are_named(nodes: str, warned: bool, federate: Federate) -> None:
    run = federate("fedavg", NUM_CLIENTS, num_rounds=1, **{ATTACK: "label-flip", NODES: nodes, RULE: "median"})
    text = "2 of 5 nodes are malicious, and up to 2 of the 5 of a round; robust.reduction = median is set for 1 at most"
    assert (text in (run / "server.log").read_text()) == warned
