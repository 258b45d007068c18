"""Replies in the order of their arrival, of which a caller may take only some."""

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import pytest
from flwr.app import Message, MessageType, RecordDict
from scripted import A, Answer, B, C, ScriptedGrid, fails, is_silent, says
from test_fetching import HONEST, SENT, FakeSuperLink, deployed, message

from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.server.exchange import first_replies


def ask(*nodes: int) -> list[Message]:
    return [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in nodes]


def named(number: int) -> RecordDict:
    return RecordDict({"arrays": pack_arrays({"number": np.array([number])})})


def after(looks: int, answer: Answer) -> list[Answer]:
    """Return answers that are silent for some requests."""
    return [*[is_silent] * looks, answer]


class LateGrid(ScriptedGrid):
    """Asks a silent node again at the next request for its reply."""

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        names = list(message_ids)
        kept = {name: self._waiting[name] for name in names if name in self._waiting}
        replies = super().pull_messages(names)
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        self._waiting |= {name: message for name, message in kept.items() if name not in answered}
        return replies


def test_they_come_in_the_order_of_their_arrival() -> None:
    """Node A is slow and does not hold up the others."""
    grid = LateGrid({A: after(3, says(named(1))), B: [says(named(2))], C: after(1, says(named(3)))})
    assert [answer.node for answer in first_replies(grid, ask(A, B, C), 10.0)] == [B, C, A]


def test_a_caller_takes_as_many_as_it_needs() -> None:
    """Node A never replies; the caller has what it needs at once, without waiting for the time limit."""
    grid = LateGrid({A: [is_silent], B: [says(named(2))], C: [says(named(3))]})
    answers = list(islice(first_replies(grid, ask(A, B, C), 1000.0), 2))
    assert [answer.node for answer in answers] == [B, C]


def test_silent_nodes_are_away_at_the_time_limit() -> None:
    grid = LateGrid({A: [is_silent], B: [says(named(2))]})
    first, second = first_replies(grid, ask(A, B), 0.2)
    assert (first.node, second.node, second.away) == (B, A, True)


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_CRASHED])
def test_a_dead_process_is_asked_again(code: int) -> None:
    grid = LateGrid({A: [fails(code), says(named(1))], B: [says(named(2))]})
    answers = {answer.node: answer for answer in first_replies(grid, ask(A, B), 10.0)}
    assert all(answer.content is not None for answer in answers.values())
    assert grid.asked.count(A) == 2


def test_no_messages_give_no_replies() -> None:
    assert list(first_replies(LateGrid({A: [is_silent]}), [], 1.0)) == []


def test_a_node_that_withholds_a_part_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that never arrives completely must not use up the time of all."""
    monkeypatch.setattr("hyperfl_flwr.server.exchange.PARTS_SECONDS", -1.0)
    superlink = FakeSuperLink(message(HONEST))
    del superlink.contents[missing := max(superlink.contents)]
    grid = deployed(superlink)
    monkeypatch.setattr(grid, "push_messages", lambda messages: ["m"])
    monkeypatch.setattr(grid, "get_nodes", list)
    (answer,) = first_replies(grid, [message(SENT)], timeout=1e6)
    assert (answer.refused, answer.problem) == (True, "parts of its reply did not arrive in time")
    assert superlink.asked.count(missing) == 1
