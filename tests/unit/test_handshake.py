"""Handshake replies with invalid values: each is refused with the reason, and the run continues."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message
from scripted import A, B, C, ScriptedGrid, handshake_reply, nodes_of, says

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.protocol.messages import PROPERTIES, record_of
from hyperfl_flwr.server.exchange import Exchange
from hyperfl_flwr.server.handshake import MOST_EXAMPLES, MOST_NODES, Node, Refusal, parse_handshake_reply
from hyperfl_flwr.server.roster import Roster
from hyperfl_flwr.server.suggested_settings import suggestion_for


def reply_with(**changes: Any) -> Exchange:
    content = handshake_reply(0, 3, 6)
    for key, value in changes.items():
        record_of(content, PROPERTIES, ConfigRecord)[key.replace("_", "-")] = value
    return Exchange(node=A, content=content)


def test_what_our_nodes_tell_is_taken() -> None:
    told = {"classes": ["a", "b"], "num_examples": [10, MOST_EXAMPLES], "model": "", "train_label_counts": [1] * 20}
    found = parse_handshake_reply(reply_with(**told))
    assert isinstance(found, Node)
    assert (found.clients, found.num_examples) == ([0, 3], {0: 10, 3: MOST_EXAMPLES})


@pytest.mark.parametrize(
    "change",
    [
        {"num_nodes": 0}, {"num_nodes": MOST_NODES + 1}, {"num_nodes": "3"}, {"num_nodes": 3.0}, {"num_nodes": True},
        {"clients": "03"}, {"clients": [0, 0]}, {"clients": [-1]}, {"clients": [0.5]}, {"clients": 3},
        {"input_shape": "[1, 8, 8]"}, {"input_shape": [1, 8]}, {"input_shape": [1, 0, 8]}, {"num_classes": "10"},
        {"num_examples": ["many", "more"]}, {"num_examples": 5}, {"num_examples": [-1, 1]}, {"num_examples": [0, 1]},
        {"num_examples": [1, MOST_EXAMPLES + 1]}, {"classes": [1, 2]},
        {"device": 1}, {"partitioned_by": [1]}, {"owners_data": 1}, {"model": b"x"}, {"method": b"x"},
        {"data_reuse": 1},
        {"train_label_counts": [0.5]},
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(change: dict[str, Any]) -> None:
    """Each value is refused under its key; some of them used to end the run, by an exception or for lack of memory."""
    found = parse_handshake_reply(reply_with(**change))
    assert isinstance(found, Refusal)
    (key,) = change
    assert found.reason.startswith(f"its {key.replace('_', '-')} is invalid, got ")


@pytest.mark.parametrize(
    "key",
    ["num-nodes", "clients", "input-shape", "num-classes", "partitioned-by", "owners-data", "device", "num-examples"],
)
def test_what_is_not_told_is_named(key: str) -> None:
    answer = reply_with()
    assert answer.content is not None
    del record_of(answer.content, PROPERTIES, ConfigRecord)[key]
    found = parse_handshake_reply(answer)
    assert isinstance(found, Refusal)
    assert found.reason == f"its handshake lacks {key}"


@pytest.mark.parametrize("counts", [[], [10], [10, 10, 10]])
def test_each_client_has_one_number_of_samples(counts: list[int]) -> None:
    """A client without one could report any number later, and so be all of the mean."""
    found = parse_handshake_reply(reply_with(num_examples=counts))
    assert isinstance(found, Refusal)
    assert found.reason == f"its num-examples has {len(counts)} numbers for 2 clients"


class SlowGrid(ScriptedGrid):
    """Has the answers of B and C at the third query only."""

    def __init__(self, answers: dict[int, Sequence[Callable[[Message], Message | None]]]) -> None:
        super().__init__(answers)
        self.looks: dict[str, int] = {}
        self.slow: set[str] = set()

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        sent = list(messages)
        names = super().push_messages(sent)
        self.slow |= {name for name, message in zip(names, sent, strict=True) if message.metadata.dst_node_id != A}
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        (name,) = message_ids
        self.looks[name] = self.looks.get(name, 0) + 1
        return [] if name in self.slow and self.looks[name] < 3 else super().pull_messages([name])


def test_the_first_to_answer_does_not_decide_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A answers first and reports one node; it is refused, since B and C report three nodes."""
    monkeypatch.setattr("hyperfl_flwr.server.roster.PAUSE_SECONDS", 0.0)
    answers = {**nodes_of(3, 3), A: [says(handshake_reply(0, 1, 3))]}
    roster = Roster(SlowGrid(answers), num_clients=3, timeout=10.0)
    assert [node.id for node in roster.gather().nodes] == [B, C]
    assert roster.num_nodes == 3
    assert [str(refusal) for refusal in roster.refused] == [
        "node 0 is refused: its num-partitions is 1, but the other nodes have 3"
    ]


def gathered(properties: Sequence[dict[str, Any]], **settings: Any) -> tuple[str, list[str]]:
    """Return the error with which three nodes cannot begin, and the lines before it."""
    said: list[str] = []
    answers = {node: [says(handshake_reply(place, 3, 3, **properties[place]))] for place, node in enumerate((A, B, C))}
    roster = Roster(ScriptedGrid(answers), num_clients=3, timeout=0.1, announce=said.append, **settings)
    with pytest.raises(RunFailedError) as caught:
        roster.gather()
    return str(caught.value), said


IMAGES = {"input_shape": [3, 32, 32], "num_classes": 2, "classes": ["cat", "dog"]}

SUGGESTIONS = {
    "a class that two nodes lack": (
        [IMAGES, IMAGES, IMAGES | {"num_classes": 3, "classes": ["cat", "dog", "owl"]}],
        "--set data.classes=cat,dog,owl",
    ),
    "other classes of each, and another shape": (
        [IMAGES | {"classes": ["a b", "dog"]}, IMAGES | {"input_shape": [3, 28, 28]}, IMAGES],
        "--set 'data.classes=a b,cat,dog' --set data.input-shape=3x32x32",
    ),
    "numbered classes": ([{}, {}, {"num_classes": 12}], "--set data.classes=0,1,2,3,4,5,6,7,8,9,10,11"),
    "a shape": ([IMAGES, IMAGES, IMAGES | {"input_shape": [3, 28, 28]}], "--set data.input-shape=3x32x32"),
}


@pytest.mark.parametrize("name", SUGGESTIONS)
def test_settings_for_refused_nodes_are_suggested_filled_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log as soon as it is known, and in the error."""
    monkeypatch.setattr("hyperfl_flwr.server.roster.PAUSE_SECONDS", 0.0)
    properties, suggested = SUGGESTIONS[name]
    problem, said = gathered(properties, min_nodes=3)
    assert f"start the run with {suggested}, or" in problem
    assert f"the nodes' data would agree with {suggested}" in said


@pytest.mark.parametrize(
    "properties",
    [
        [{"input_shape": [5]}, {"input_shape": [5]}, {"input_shape": [6]}],  # features are not converted
        [IMAGES, IMAGES, IMAGES | {"classes": ["cat,x", "dog"]}],
        [IMAGES, IMAGES, IMAGES | {"classes": ["cat\n", "dog"]}],
        [IMAGES, IMAGES, {"num_classes": 3, "input_shape": [3, 32, 32]}],
        [{}, {}, {"num_classes": 10**6}],
    ],
)
def test_no_settings_are_suggested_that_would_not_help(
    properties: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyperfl_flwr.server.roster.PAUSE_SECONDS", 0.0)
    problem, said = gathered(properties, min_nodes=3)
    assert "--set" not in problem
    assert "correct what the nodes below report, start the missing nodes" in problem
    assert not any("--set" in line for line in said)


def test_nodes_that_agree_need_no_other_settings() -> None:
    nodes = [parse_handshake_reply(Exchange(node=node, content=handshake_reply(0, 3, 6))) for node in (A, B)]
    assert all(isinstance(node, Node) for node in nodes)
    assert suggestion_for([node for node in nodes if isinstance(node, Node)]) == ""
