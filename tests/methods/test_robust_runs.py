"""Robust reductions in rounds: every method with every rule, what a node is, forged and too few replies."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import of_every_method, setting_of, small_settings
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import check_run, new_strategy
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics, outcome
from hyperfl_flwr.contract.grids import PermutedGrid, Settings, plain_grid, round_of
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import ARRAYS, record_of
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.observation import load_observation, observation_path
from hyperfl_flwr.server.exchange import match
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid

RULES = ("norm-bound", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median")

TINY: Settings = {"data.train-samples": 20, "data.test-samples": 5}


def rules_of(method: str) -> list[str]:
    """Return the rules that a method has, see `tests/unit/test_robust_settings.py`."""
    found = []
    for rule in RULES:
        with contextlib.suppress(ConfigError):
            check_run(RunConfig.from_flat(small_settings(method=method, **{"robust.reduction": rule})), (1, 8, 8), 10)
            found.append(rule)
    return found


def uploads_of(replies: list[Message]) -> list[SharedArrays]:
    return [unpack_arrays(record_of(reply.content, ARRAYS, ArrayRecord)) for reply in replies]


def without_weight(arrays: SharedArrays) -> SharedArrays:
    """Return FedAKD's weighted logits divided by their weight, and other arrays as they are."""
    key = "knowledge/theta"
    return {**arrays, key: arrays[key] / arrays[key][-1]} if key in arrays else arrays


@of_every_method
def test_every_rule_reduces_every_averaging_method(method: str, tmp_path: Path) -> None:
    """The same replies of five nodes by each rule: between the nodes' parameters and those that they received."""
    if not (rules := rules_of(method)):
        pytest.skip("is not robust")
    settings = small_settings(method=method, output=str(tmp_path), **TINY | {"fedakd.held-back": 0.0})
    grid, config = plain_grid(NUM_CLIENTS, settings), RunConfig.from_flat(settings)
    federation = setting_of(config, grid).federation

    def begun(rule: str) -> tuple[Any, list[Message]]:
        chosen = setting_of(RunConfig.from_flat(settings | {"robust.reduction": rule}), grid).config
        strategy = new_strategy(chosen, federation, experiment="e" * 16, run_directory=str(tmp_path))
        return strategy, list(strategy.configure_train(1, strategy.initial_arrays(), ConfigRecord(), grid))

    strategy, messages = begun("mean")
    replies = list(grid.send_and_receive(messages))
    sent = strategy.sent
    nodes = [without_weight(arrays) for arrays in uploads_of(replies)]
    if method != "fedakd":  # which sends no knowledge before the first round
        nodes.append(sent)
    results = set()
    for rule in rules:
        reduced, _ = begun(rule)[0].reduce(match(messages, replies))
        arrays = without_weight(unpack_arrays(reduced))
        for key, value in arrays.items():
            lowest, highest = (bound([node[key] for node in nodes], axis=0) for bound in (np.min, np.max))
            slack = 1e-6 * np.maximum(abs(lowest), abs(highest))
            assert np.all(value >= lowest - slack), (rule, key)
            assert np.all(value <= highest + slack), (rule, key)
        results.add(str(exact(arrays)))
    assert len(results) == len(rules)


def test_a_node_counts_as_one(federate: Federate) -> None:
    """Five clients on three nodes: the median of the nodes' means, weighted by the samples of their clients.

    Audited clients, which answer in messages of their own, count with their node, bit by bit.
    """
    sizes: dict[str, Any] = {"data.partition": "dirichlet-per-label", "data.train-samples": "auto", "num_rounds": 1}
    rule: dict[str, Any] = {"robust.reduction": "median", **sizes}
    seen: dict[str, Any] = {"audit.clients": "all", "audit.rounds": "1"}
    run, audited = (federate("fedavg", 3, **rule, **changes) for changes in ({}, seen))
    assert exact(last_checkpoint(run)[0]) == exact(last_checkpoint(audited)[0])
    uploads = [load_observation(observation_path(audited, 1, client)) for client in range(NUM_CLIENTS)]
    assert len({upload.num_examples for upload in uploads}) > 1
    for key, value in last_checkpoint(run)[0].items():
        means = [
            np.average(
                [uploads[client].reply[key].astype(float) for client in hosted],
                axis=0,
                weights=[uploads[client].num_examples for client in hosted],
            )
            for hosted in ((0, 3), (1, 4), (2,))
        ]
        np.testing.assert_allclose(value, np.median(np.float32(means), axis=0), rtol=1e-6, atol=1e-9)


def test_order_and_ids_of_the_nodes_have_no_effect(federate: Federate) -> None:
    """With random ids, and replies out of order, bit by bit; also resumed after the first of two rounds."""
    settings: dict[str, Any] = TINY | {"robust.reduction": "geometric-median", "num_rounds": 2}
    run, permuted = (federate("fedrep", NUM_CLIENTS, grid=grid, **settings) for grid in (plain_grid, PermutedGrid))
    assert outcome(run)["arrays"] == outcome(permuted)["arrays"]
    assert shares_of(run) == shares_of(permuted)
    short = federate("fedrep", NUM_CLIENTS, **settings | {"num_rounds": 1})
    assert outcome(federate("fedrep", NUM_CLIENTS, resume=str(short), **settings)) == outcome(run)


def shares_of(run: Path) -> list[Mapping[str, float]]:
    return [row.get("node_shares", {}) for row in metrics(run) if row["kind"] == "train"]


Forge = Callable[[SharedArrays, SharedArrays], SharedArrays]
"""Returns a false upload from what a node received and what it has trained."""

LIAR = 1


class ForgingGrid(InProcessGrid):
    """A grid of which one node sends false uploads."""

    def __init__(self, num_nodes: int, settings: Settings, *, forge: Forge) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.forge = forge

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        is_training = message.metadata.message_type == MessageType.TRAIN
        if is_training and message.metadata.dst_node_id == FIRST_NODE_ID + LIAR:
            received, trained = (
                unpack_arrays(record_of(each.content, ARRAYS, ArrayRecord)) for each in (message, reply)
            )
            reply.content[ARRAYS] = pack_arrays(self.forge(received, trained))
        return reply


def away(received: SharedArrays, trained: SharedArrays) -> SharedArrays:
    """Return the received parameters after a change of nine times their norm, which `max-update-ratio` accepts."""
    return {key: -8 * value for key, value in received.items()}


def test_a_malicious_node_is_kept_out_and_named(federate: Federate) -> None:
    """It ruins the mean; under each rule the model stays near that of the honest nodes alone."""
    plan: dict[str, Any] = TINY | {"num_rounds": 1, "num_clients": 6}
    plain, start = (federate("fedavg", 6, **plan, **rate) for rate in ({}, {"learning_rate": 1e-30}))
    forged = federate("fedavg", 6, grid=partial(ForgingGrid, forge=away), **plan)
    step = distance(plain, start)
    assert distance(forged, start) > 20 * step
    for rule in RULES:
        run = federate("fedavg", 6, grid=partial(ForgingGrid, forge=away), **plan, **{"robust.reduction": rule})
        assert distance(run, start) < 4 * step, rule
        assert [row["failed"] for row in metrics(run) if row["kind"] == "train"] == [[]]
        (shares,) = shares_of(run)
        if rule in ("median", "trimmed-mean"):
            assert shares == {}
            continue
        assert sorted(shares) == list("012345")
        assert shares[str(LIAR)] == min(shares.values()) < 0.05
    text = write_report(run).read_text()  # of the geometric median
    assert re.search(rf"Nodes that counted least</dt><dd>node {LIAR} \(0\.0", text)


def distance(one: Path, other: Path) -> float:
    arrays, others = last_checkpoint(one)[0], last_checkpoint(other)[0]
    return float(np.linalg.norm(np.concatenate([(value - others[key]).ravel() for key, value in arrays.items()])))


class FailingGrid(InProcessGrid):
    """A grid of which some nodes do not train in round 2."""

    def __init__(self, num_nodes: int, settings: Settings, *, lost: tuple[int, ...]) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.lost = {FIRST_NODE_ID + node for node in lost}

    def answer(self, message: Message) -> Message:
        is_training = message.metadata.message_type == MessageType.TRAIN and round_of(message) == 2
        if is_training and message.metadata.dst_node_id in self.lost:
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason="no power"), reply_to=message)
        return super().answer(message)


def test_a_round_with_too_few_replies_changes_nothing(federate: Federate) -> None:
    """Krum of five nodes needs all of them: without one, round 2 counts for no client, and round 3 goes on from 1."""
    settings: dict[str, Any] = TINY | {"robust.reduction": "krum", "failure_budget": 1.0, "checkpoint_every": 1}
    run = federate("fedrep", 5, grid=partial(FailingGrid, lost=(3,)), num_rounds=3, **settings)
    rows = [row for row in metrics(run) if row["kind"] == "train"]
    assert [row["failed"] for row in rows] == [[], [0, 1, 2, 3, 4], []]
    assert [row["clients"] for row in rows] == [5, 0, 5]
    assert [sorted(shares) for shares in shares_of(run)] == [list("01234"), [], list("01234")]
    texts = [path.read_text() for path in sorted((run / "failures").iterdir())]
    assert (
        sum("needs 5 nodes, if 1 of 5 may be malicious (robust.byzantine), and 4 replied" in text for text in texts)
        == 4
    )
    first = federate("fedrep", 5, num_rounds=1, **settings)
    assert exact(arrays_after(run, 2)) == exact(last_checkpoint(first)[0])
    assert last_checkpoint(run)[1].versions == dict.fromkeys(range(5), 3)
    enough = federate(
        "fedrep", 5, grid=partial(FailingGrid, lost=(3,)), num_rounds=2, **settings | {"robust.reduction": "median"}
    )
    assert [row["failed"] for row in metrics(enough) if row["kind"] == "train"] == [[], [3]]


def arrays_after(run: Path, number: int) -> SharedArrays:
    return Checkpoints(run / "checkpoints").load(number)[0]


def test_the_server_checks_the_nodes_that_are_there(federate: Federate, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"median needs 3 nodes .*got 2"):
        federate("fedavg", 2, **{"robust.reduction": "median"})
    assert not list(tmp_path.iterdir())


def test_a_run_says_how_its_nodes_counted(federate: Federate) -> None:
    """summary.json has the mean share of each node over the rounds; no other run has the key."""
    run = federate("fedavg", NUM_CLIENTS, **TINY | {"robust.reduction": "multi-krum"})
    shares = shares_of(run)
    means = {node: np.mean([each[node] for each in shares]) for node in shares[0]}
    assert json.loads((run / "summary.json").read_text())["node_shares"] == pytest.approx(means)
    assert "; robust.byzantine 1\n" in (run / "server.log").read_text()
    assert "node_shares" not in json.loads((federate("fedavg", **TINY) / "summary.json").read_text())
