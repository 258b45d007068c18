"""The server's side of a secure step: its terms, and its checks of what nodes send."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MessageType

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import new_strategy
from hyperfl_flwr.app.secure_sums import secure_context
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.protocol.messages import record_of
from hyperfl_flwr.protocol.secure_sums.messages import SECURE, UNMASK, step_in
from hyperfl_flwr.protocol.secure_sums.numbers import NumbersEncoding
from hyperfl_flwr.server.exchange import exchange
from hyperfl_flwr.server.federation import Federation, handshake
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from strategies.engine.round_outcome import Outcome

LAST = 1004
"""Flower's number of the last one of five nodes, which has the clients 4 and 9."""

MakeSettings = Callable[..., Settings]
Round = Callable[..., Outcome]


class FalseGrid(InProcessGrid):
    """Changes values of some nodes' replies to one type of message."""

    kind: str
    changes: Mapping[int, Mapping[str, Any]]

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if message.metadata.message_type == self.kind and message.metadata.dst_node_id in self.changes:
            values = record_of(reply.content, SECURE, ConfigRecord)
            for key, value in self.changes[message.metadata.dst_node_id].items():
                if value is None or value == []:
                    values.pop(key, None)
                else:
                    values[key] = value
        return reply


@pytest.fixture
def trained(make_settings: MakeSettings) -> Round:
    """Return a function that trains one round of ten clients on five nodes, of which one may collude."""
    settings = make_settings("fedavg", num_clients=10) | {"secagg.enabled": True, "target": "mlp"}
    config = RunConfig.from_flat(settings)

    def run(kind: str = "", changes: Mapping[int, Mapping[str, Any]] | None = None) -> Outcome:
        grid = FalseGrid(app, 5, settings, {"simulated": True})
        grid.kind, grid.changes = kind, changes or {}
        secure = secure_context(config)
        assert secure
        federation = handshake(grid, 10, 10.0, secure.session)
        strategy = new_strategy(config, federation, experiment="e" * 16, run_directory="", secure=secure)
        strategy.reduce(exchange(grid, strategy.configure_train(1, strategy.initial_arrays(), ConfigRecord(), grid), 9))
        return strategy.outcome

    return run


@pytest.mark.parametrize(
    ("num_nodes", "present", "changes", "threshold", "squares"),
    [
        (7, 5, {}, 5, False),  # two of all seven may collude
        (24, 24, {}, 19, True),  # ten nodes that an attacker does not know
        (26, 26, {}, 20, False),  # nine
        (20, 20, {"secagg.colluding": 0}, 13, False),  # six of them may collude in the eyes of an owner
    ],
)
def test_the_terms_of_a_step_hold_for_all_nodes_of_the_federation(
    num_nodes: int, present: int, changes: Settings, threshold: int, squares: bool, make_settings: MakeSettings
) -> None:
    settings = make_settings("fedavg", num_clients=num_nodes, **changes) | {"secagg.enabled": True, "target": "mlp"}
    config, grid = RunConfig.from_flat(settings), InProcessGrid(app, num_nodes, settings, {"simulated": True})
    secure = secure_context(config)
    assert secure
    there = Federation(handshake(grid, num_nodes, 10.0, secure.session).nodes[:present])
    strategy = new_strategy(config, there, experiment="e" * 16, run_directory="", secure=secure)
    messages = list(strategy.configure_train(1, strategy.initial_arrays(), ConfigRecord(), grid))
    header = step_in(messages[0].content).header
    assert (len(header.nodes), header.threshold, header.squares) == (present, threshold, squares)


def reasons(outcome: Outcome) -> set[str]:
    return {failure.reason for failure in outcome.failures}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"transcript": bytes(32)}, "its reply belongs to another step"),
        ({"finished": [3, 8]}, "the reply is about the clients [3, 8], but the message was about [4, 9]"),
        ({"finished": [4]}, "the reply is about the clients [4], but the message was about [4, 9]"),
        ({"finished": [], "failed": [4, 9]}, "a reply must have an upload if a client finished, and none otherwise"),
        ({"upload": None}, "a reply must have an upload if a client finished, and none otherwise"),
    ],
)
def test_a_false_reply_is_refused_and_the_others_are_opened(
    trained: Round, changes: dict[str, Any], reason: str
) -> None:
    outcome = trained(MessageType.TRAIN, {LAST: changes})
    assert {node: refused.reason for node, refused in outcome.blamed.items()} == {LAST: reason}
    assert outcome.finished == [0, 1, 2, 3, 5, 6, 7, 8]
    assert outcome.tally is not None
    assert (outcome.tally.nodes, outcome.tally.clients) == (4, 8)


def test_a_sum_of_other_clients_than_the_replies_name_is_not_used(trained: Round) -> None:
    outcome = trained(MessageType.TRAIN, {LAST: {"finished": [4], "failed": [9]}})
    assert outcome.tally is None
    assert outcome.finished == []
    assert "the secure sum was not opened: the masks do not cancel: a node has uploaded something else" in reasons(
        outcome
    )


@pytest.mark.parametrize("value", [-0.5, 1.5])
def test_a_sum_with_an_impossible_mean_is_not_used(
    trained: Round, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = NumbersEncoding.encode

    def false(self: NumbersEncoding, clients: Sequence[Mapping[str, float]], **counts: int) -> Any:
        return encode(self, [{**metrics, "personalized-accuracy": value} for metrics in clients], **counts)

    monkeypatch.setattr(NumbersEncoding, "encode", false)
    outcome = trained()
    assert outcome.tally is None
    (reason,) = reasons(outcome)
    assert f"the mean personalized-accuracy is {value}: a node has uploaded something else" in reason


@pytest.mark.parametrize("bad", [[0, 0, 1, 1], [0, 99]])
def test_a_node_names_each_damaged_box_once(trained: Round, bad: list[int]) -> None:
    """One node of five may collude, and says the same of a box as often as it likes, or of nodes that do not exist."""
    false = {"bad": bad, "senders": [], "shares": []}
    outcome = trained(UNMASK, {LAST: false, LAST - 1: {**false, "bad": [99]}})
    assert not outcome.finished
    assert outcome.blamed == {}
