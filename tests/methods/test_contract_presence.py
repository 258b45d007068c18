"""Contract tests for absent nodes: the others continue, and a returning node resumes from its own state."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federations import of_every_method_if_extended, of_representatives
from flwr.app import ConfigRecord, Error, Message, MessageType

from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import last_checkpoint, metrics
from hyperfl_flwr.contract.grids import Settings, round_of
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.messages import CLIENTS, CONFIG, Report, Request, record_of
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid
from strategies.it_pfl import ITPFL

GONE = 1
"""Number of the node that goes away; of two nodes and five clients, it hosts clients 1 and 3."""
ITS_CLIENTS, OTHERS = [1, 3], [0, 2, 4]
ALWAYS = frozenset(range(99))


class Deployment(InProcessGrid):
    """Nodes of different owners with separate state folders; one may be absent, die, crash or report wrongly.

    Args:
        num_nodes: Number of nodes P.
        settings: The run's settings.
        absent: Rounds in which Flower does not list the node.
        dies: Rounds in which it trains and stores its clients' state, but disappears before it replies.
        crashes: Rounds in which its client app crashes on every message.
        false_reports: Rounds in which it reports impossible accuracies.
        all_false: Rounds in which both nodes report impossible accuracies.
        states: Folder that holds the nodes' state folders.
    """

    def __init__(
        self,
        num_nodes: int,
        settings: Settings,
        *,
        states: Path,
        absent: Iterable[int] = (),
        dies: Iterable[int] = (),
        crashes: Iterable[int] = (),
        false_reports: Iterable[int] = (),
        all_false: Iterable[int] = (),
    ) -> None:
        super().__init__(app, num_nodes, settings)
        for number, context in enumerate(self._contexts.values()):
            context.node_config["state-dir"] = str(states / f"node-{number}")
            context.node_config["mixing-key-file"] = str(states / "key")
        self.absent, self.dies, self.crashes = set(absent), set(dies), set(crashes)
        self.false_reports, self.all_false = set(false_reports), set(all_false)
        self.asked: list[tuple[int, int, list[int]]] = []
        self.next_round = 1

    def get_node_ids(self) -> Sequence[int]:
        """Return the nodes that are present in the coming round."""
        return [node for node in self._contexts if node != FIRST_NODE_ID + GONE or self.next_round not in self.absent]

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        messages = list(messages)
        self.next_round = max([self.next_round, *(round_of(message) + 1 for message in messages)])
        return super().push_messages(messages)

    def answer(self, message: Message) -> Message:
        number = message.metadata.dst_node_id - FIRST_NODE_ID
        if CONFIG in message.content and message.metadata.message_type == MessageType.TRAIN:
            self.asked.append((round_of(message), number, list(Request.of(message.content).versions)))
        reply = super().answer(message)
        if number == GONE and message.metadata.message_type == MessageType.TRAIN:
            if round_of(message) in self.dies:
                return Message(Error(code=ErrorCode.NODE_UNAVAILABLE, reason="gone"), reply_to=message)
            if round_of(message) in self.crashes:
                return Message(Error(code=ErrorCode.CLIENT_APP_CRASHED, reason="stopped"), reply_to=message)
        false_reports = self.false_reports if number == GONE else self.all_false
        if message.metadata.message_type == MessageType.TRAIN and round_of(message) in false_reports | self.all_false:
            report = Report.from_record(record_of(reply.content, CLIENTS, ConfigRecord))
            results = [replace(each, metrics={**each.metrics, "personalized-accuracy": 7.0}) for each in report.results]
            reply.content[CLIENTS] = replace(report, results=results).to_record()
        return reply


@pytest.fixture
def deploy(federate: Federate, tmp_path: Path) -> Callable[..., tuple[Path, Deployment]]:
    """Return a function that runs a deployment of two nodes; it returns the run's folder and the grid."""

    def run(method: str, *, num_rounds: int = 4, **changes: Any) -> tuple[Path, Deployment]:
        grids: list[Deployment] = []
        names = ("absent", "dies", "crashes", "false_reports", "all_false")
        grid_changes = {name: changes.pop(name) for name in names if name in changes}

        def make(num_nodes: int, settings: Settings) -> Deployment:
            grids.append(Deployment(num_nodes, settings, states=tmp_path / "states", **grid_changes))
            return grids[-1]

        return federate(method, grid=make, num_rounds=num_rounds, **changes), grids[-1]

    return run


Deploy = Callable[..., tuple[Path, Deployment]]


def rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(run) if row["kind"] == "train"]


@of_every_method_if_extended
def test_a_node_that_is_away_in_a_round_comes_back(
    method: str, deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Away in round 2, its clients resume from round 1's version in round 3; no failure is counted (budget 0).

    State that a node stored in an unfinished round is not used: a node that died after storing gives what an absent one
    does, up to rounding, since pFedHN generates the models of all sampled clients together. IT-PFL-HN's encoder targets
    depend on which clients were sampled, so they are patched to be independent of it.
    """
    monkeypatch.setattr(ITPFL, "_targets", lambda self, clients: self.server.embeddings.detach()[list(clients)])
    results = []
    for way in ("absent", "dies"):
        run, grid = deploy(method, num_rounds=3, failure_budget=0.0, **{way: [2]})
        assert [row["away"] for row in rows(run)] == [[], ITS_CLIENTS, []]
        assert [row["failed"] for row in rows(run)] == [[], [], []]
        assert [row["clients"] for row in rows(run)] == [NUM_CLIENTS, len(OTHERS), NUM_CLIENTS]
        versions = {number: asked for number, node, asked in grid.asked if node == GONE}
        assert versions == {1: [0, 0], **({2: [1, 1]} if way == "dies" else {}), 3: [1, 1]}
        others = {number: asked for number, node, asked in grid.asked if node != GONE}
        assert others == {1: [0, 0, 0], 2: [1, 1, 1], 3: [2, 2, 2]}
        progress = last_checkpoint(run)[1]
        assert progress.versions == dict.fromkeys(range(NUM_CLIENTS), 3)
        assert (progress.trainings, progress.failed_trainings) == (NUM_CLIENTS * 3 - len(ITS_CLIENTS), 0)
        text = (run / "server.log").read_text()
        assert text.count("node 1 takes part: clients 1 3") == 1  # reported in the handshake, before the log exists
        assert text.count("node 1 is away (clients 1 3)") == text.count("node 1 is back (clients 1 3)") == 1
        assert f"{len(OTHERS)} of {NUM_CLIENTS} clients" in text
        assert ", nodes 0, away 1" in text
        assert ", nodes 0 1\n" in text
        lines = [row for row in metrics(run) if row["kind"] == "client"]
        results.append([{key: value for key, value in row.items() if key != "kind"} for row in lines])
    assert len(results[0]) == len(results[1]) == NUM_CLIENTS * 3 - len(ITS_CLIENTS)
    for one, other in zip(*results, strict=True):
        assert one == pytest.approx(other, rel=1e-4), one


@of_representatives
def test_a_malicious_node_is_not_asked_for_ever_longer(method: str, deploy: Deploy) -> None:
    """It is excluded for one round, then for two; refused replies are not failures, and the other node continues."""
    run, grid = deploy(method, num_rounds=6, failure_budget=0.0, exclusion_rounds=1, false_reports=ALWAYS)
    nobody: list[int] = []
    assert [row["failed"] for row in rows(run)] == [ITS_CLIENTS, nobody, ITS_CLIENTS, nobody, nobody, ITS_CLIENTS]
    assert [row["away"] for row in rows(run)] == [nobody, ITS_CLIENTS, nobody, ITS_CLIENTS, ITS_CLIENTS, nobody]
    assert [number for number, node, _ in grid.asked if node == GONE] == [1, 3, 6]
    progress = last_checkpoint(run)[1]
    assert (progress.trainings, progress.failed_trainings) == (len(OTHERS) * 6, 0)
    assert {client: progress.versions[client] for client in ITS_CLIENTS} == dict.fromkeys(ITS_CLIENTS, 0)
    (excluded,) = read_manifest(run)["excluded"]
    reason = excluded.pop("reason")
    assert "the personalized-accuracy of client 1 must be between 0 and 1, got 7" in reason
    assert excluded == {"node": GONE, "round": 6, "until": 10, "times": 3}
    text = (run / "server.log").read_text()
    assert f"node 1 is not asked again until round 3: {reason}" in text
    assert f"node 1 is not asked again until round 6: {reason}" in text
    assert text.count("node 1 is back (clients 1 3)") == 2
    assert "node 1 is away" not in text


@of_representatives
def test_a_run_in_which_most_replies_are_refused_fails(method: str, deploy: Deploy) -> None:
    """Nodes are not excluded, since the server's messages may be the cause, and the failures count."""
    with pytest.raises(RunFailedError, match=r"5 of 10 client trainings failed.*personalized-accuracy of client"):
        deploy(method, all_false=[2])


@of_representatives
def test_a_client_app_that_dies_is_sent_its_message_once_more(method: str, deploy: Deploy) -> None:
    """After a second crash its clients have failed in this round, and the node takes part in the next one."""
    run, grid = deploy(method, crashes=[2], num_rounds=3)
    assert [number for number, node, _ in grid.asked if node == GONE] == [1, 2, 2, 3]
    assert [row["failed"] for row in rows(run)] == [[], ITS_CLIENTS, []]
    assert [row["away"] for row in rows(run)] == [[], [], []]


@of_representatives
def test_a_node_that_fails_again_is_not_asked_for_a_while(method: str, deploy: Deploy) -> None:
    """It is retried in the next round, then excluded; failures do not count (budget 0), as the other node continues."""
    run, grid = deploy(method, crashes=ALWAYS, num_rounds=5, failure_budget=0.0, exclusion_rounds=1)
    assert [number for number, node, _ in grid.asked if node == GONE] == [1, 1, 2, 2, 5, 5]
    assert [row["failed"] for row in rows(run)] == [ITS_CLIENTS, ITS_CLIENTS, [], [], ITS_CLIENTS]
    assert [row["away"] for row in rows(run)] == [[], [], ITS_CLIENTS, ITS_CLIENTS, []]


@of_representatives
def test_a_node_that_fails_once_is_asked_again_at_once(method: str, deploy: Deploy) -> None:
    """It takes part in the evaluation after the last round, and is not listed as excluded."""
    run, _ = deploy(method, crashes=[2], num_rounds=2)
    evaluated = [row for row in read_metrics(run) if row["kind"] == "aggregate"][-1]
    assert (evaluated["round"], evaluated["clients"]) == (2, NUM_CLIENTS)
    assert read_manifest(run)["excluded"] == []
    assert "node 1 is away" not in (run / "server.log").read_text()


@of_representatives
def test_a_late_node_joins(method: str, deploy: Deploy) -> None:
    """A node absent from the handshake and the first two rounds joins in round 3 from the initial version."""
    run, grid = deploy(method, absent={1, 2}, min_nodes=1, node_timeout=0.001)
    assert [row["away"] for row in rows(run)] == [ITS_CLIENTS, ITS_CLIENTS, [], []]
    assert [(number, asked) for number, node, asked in grid.asked if node == GONE] == [(3, [0, 0]), (4, [3, 3])]
    manifest = read_manifest(run)
    assert manifest["nodes"] == [OTHERS, ITS_CLIENTS]
    assert (manifest["present_at_start"], manifest["joined"]) == ([0], [1])
    assert manifest["devices"] == ["cpu", "cpu"]


@of_representatives
def test_a_run_without_a_node_to_its_end(method: str, deploy: Deploy) -> None:
    """A node is missing from round 2 on, also in the last evaluation and when the run is prolonged."""
    run, _ = deploy(method, absent=ALWAYS - {1}, num_rounds=3)
    assert [row["away"] for row in rows(run)] == [[], ITS_CLIENTS, ITS_CLIENTS]
    last = [row for row in read_metrics(run) if row["kind"] == "aggregate"][-1]
    assert (last["round"], last["clients"]) == (3, len(OTHERS))
    longer, _ = deploy(method, absent=ALWAYS, num_rounds=4, resume=str(run), min_nodes=1, node_timeout=0.001)
    assert last_checkpoint(longer)[1].versions == {0: 4, 1: 1, 2: 4, 3: 1, 4: 4}
