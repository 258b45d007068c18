"""The handshake: which nodes take part, which clients they host, and whether their data agree."""

from typing import Any

import pytest
from scripted import A, Answer, B, C, ScriptedGrid, fails, handshake_reply, is_silent, nodes_of, says

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.server.federation import Federation, handshake


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("federation", "exchange"):
        monkeypatch.setattr(f"hyperfl_flwr.server.{module}.POLL_SECONDS", 0.0)


def hosts(federation: Federation) -> list[tuple[int, list[int]]]:
    return [(node.id, list(node.clients)) for node in federation.nodes]


def test_nodes_come_in_the_order_of_their_numbers() -> None:
    """Node p of 2 hosts clients p, p + 2, ...; node 0 comes first, although the grid lists node 1 first."""
    grid = ScriptedGrid(nodes_of(2, 5))
    grid.present.reverse()
    assert hosts(handshake(grid, 5, 10.0)) == [(A, [0, 2, 4]), (B, [1, 3])]


def test_late_nodes_are_waited_for_and_asked_once() -> None:
    grid = ScriptedGrid(nodes_of(3, 3), arrivals=[C, A, B])
    assert hosts(handshake(grid, 3, 10.0)) == [(A, [0]), (B, [1]), (C, [2])]
    assert grid.asked == [C, A, B]


def test_more_nodes_than_clients() -> None:
    """With 2 clients, nodes 2 and 3 of 4 host no client."""
    assert [clients for _, clients in hosts(handshake(ScriptedGrid(nodes_of(4, 2)), 2, 10.0))] == [[0], [1], [], []]


def test_a_node_that_does_not_come() -> None:
    answers = nodes_of(3, 3)
    grid = ScriptedGrid(answers, arrivals=[A, B])
    with pytest.raises(RunFailedError, match=r"only 2 of 3 nodes replied within node-timeout = 0\.05 s"):
        handshake(grid, 3, 0.05)
    with pytest.raises(RunFailedError, match="only 0 of an unknown number of nodes"):
        handshake(ScriptedGrid({}), 3, 0.05)


def test_two_nodes_that_claim_one_client() -> None:
    answers = {A: [says(handshake_reply(0, 2, 4))], B: [says(handshake_reply(0, 2, 4))]}
    with pytest.raises(RunFailedError, match="both claim client 0; give each node a different partition-id"):
        handshake(ScriptedGrid(answers), 4, 10.0)


def test_clients_that_nobody_hosts() -> None:
    """Two nodes that are set up for 4 clients leave clients 4 and 5 of 6 without a node."""
    with pytest.raises(RunFailedError, match=r"no node hosts the clients \[4, 5\] of 6"):
        handshake(ScriptedGrid(nodes_of(2, 4)), 6, 10.0)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (fails(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no data here"), "no data here"),
        (is_silent, "no reply in time"),
    ],
)
def test_a_node_that_refuses(answer: Answer, text: str) -> None:
    answers = nodes_of(2, 4) | {B: [answer]}
    with pytest.raises(RunFailedError, match=f"node {B} cannot take part: {text}"):
        handshake(ScriptedGrid(answers), 4, 0.05)


@pytest.mark.parametrize("change", [{"input_shape": [3, 8, 8]}, {"num_classes": 11}])
def test_nodes_whose_data_differ(change: dict[str, Any]) -> None:
    answers = nodes_of(2, 4) | {B: [says(handshake_reply(1, 2, 4, **change))]}
    with pytest.raises(RunFailedError, match=f"differ in {next(iter(change)).replace('_', '-')}"):
        handshake(ScriptedGrid(answers), 4, 10.0)


def test_label_counts_are_those_of_the_right_client() -> None:
    """With two classes, node 0 hosts clients 0 and 2, node 1 hosts client 1; expected counts are written by hand."""
    answers = {
        A: [
            says(
                handshake_reply(0, 2, 3, num_classes=2, train_label_counts=[1, 2, 5, 6], test_label_counts=[7, 8, 0, 1])
            )
        ],
        B: [says(handshake_reply(1, 2, 3, num_classes=2, train_label_counts=[3, 4], test_label_counts=[9, 9]))],
    }
    counts = handshake(ScriptedGrid(answers), 3, 10.0).label_counts()
    assert counts == {"train": {0: [1, 2], 1: [3, 4], 2: [5, 6]}, "test": {0: [7, 8], 1: [9, 9], 2: [0, 1]}}
    assert handshake(ScriptedGrid(nodes_of(2, 3)), 3, 10.0).label_counts() == {}
