"""The exchange of messages and replies, with dead processes, absent nodes, late replies and refused messages."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from scripted import A, Answer, B, C, ScriptedGrid, fails, from_the_superlink, is_silent, says

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.flower.grid import NodeInfo
from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.messages import record_of
from hyperfl_flwr.server.exchange import _Watch, exchange, match
from hyperfl_flwr.server.in_process_grid import InProcessGrid


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperfl_flwr.server.exchange.POLL_SECONDS", 0.0)


def test_polls_are_fewer_the_longer_a_reply_takes_and_in_a_deployment() -> None:
    """A reply may be late by a twentieth of the time that it took; a poll costs a deployment's SuperLink time."""
    watch = _Watch(InProcessGrid(ClientApp(), 1, {}, {"simulated": True}), timeout=1.0)
    watch.simulated = False
    assert [watch.pause(waited) for waited in (0.0, 4.0, 1000.0)] == [0.1, 0.2, 1.0]
    watch.simulated = True
    assert watch.pause(0.0) == 0.0  # what this file has in place of 0.02 s
    assert watch.pause(4.0) == 0.2


def ask(*nodes: int) -> list[Message]:
    return [Message(named(node), dst_node_id=node, message_type=MessageType.TRAIN) for node in nodes]


def named(number: int) -> RecordDict:
    return RecordDict({"name": ConfigRecord({"number": number})})


def number_in(content: RecordDict | None) -> int | None:
    return None if content is None else int(str(record_of(content, "name", ConfigRecord)["number"]))


DEADLY = [ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE]


@pytest.mark.parametrize("code", DEADLY)
@pytest.mark.parametrize("death", [fails, from_the_superlink])
def test_the_message_of_a_dead_process_is_sent_once_more(code: int, death: Callable[[int], Answer]) -> None:
    """Only B's process dies: its message is sent again with the same content, and the second reply is used."""
    contents: list[int | None] = []

    def second(message: Message) -> Message:
        contents.append(number_in(message.content))
        return Message(named(2), reply_to=message)

    grid = ScriptedGrid({A: [says(named(1))], B: [death(code), second], C: [says(named(3))]})
    messages = ask(A, B, C)
    answers = list(exchange(grid, messages, 10.0))
    assert grid.asked == [A, B, B, C]  # each runs when its reply is fetched
    assert contents == [B]
    assert [(answer.node, number_in(answer.content)) for answer in answers] == [(A, 1), (B, 2), (C, 3)]
    assert not any(answer.problem or answer.died for answer in answers)


def test_processes_that_die_together_begin_again_together() -> None:
    """A, B and C have died: all messages are sent again before a reply is awaited. C dies again, which ends the run."""
    pushed: list[list[int]] = []

    class Grid(ScriptedGrid):
        def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
            messages = list(messages)
            pushed.append([message.metadata.dst_node_id for message in messages])
            return super().push_messages(messages)

    dead = fails(ErrorCode.UNKNOWN)
    grid = Grid({A: [dead, says(named(1))], B: [dead, says(named(2))], C: [dead, dead]}, simulated=True)
    answers = exchange(grid, ask(A, B, C), 10.0)
    assert number_in(next(answers).content) == 1
    assert pushed == [[A, B, C], [A], [B], [C]]
    assert number_in(next(answers).content) == 2
    with pytest.raises(RunFailedError, match=f"node {C} died twice in a row"):
        next(answers)


@pytest.mark.parametrize("code", [*DEADLY, ErrorCode.NODE_UNAVAILABLE])
def test_a_process_that_dies_twice_ends_a_simulation(code: int) -> None:
    grid = ScriptedGrid({A: [says(named(1))], B: [fails(code)]}, simulated=True)
    with pytest.raises(RunFailedError, match=f"node {B} died twice in a row: out of memory"):
        list(exchange(grid, ask(A, B), 10.0))
    assert grid.asked == [A, B, B]


@pytest.mark.parametrize("code", DEADLY)
def test_a_process_that_dies_twice_is_a_failure_in_a_deployment(code: int) -> None:
    """The node has failed but is not away, and the other nodes' replies are returned."""
    grid = ScriptedGrid({A: [fails(code)], B: [says(named(2))]})
    first, second = exchange(grid, ask(A, B), 10.0)
    assert grid.asked == [A, A, B]
    assert (first.content, first.problem, first.died, first.away) == (None, "out of memory", True, False)
    assert (first.refused, first.has_failed, first.is_harmful) == (True, True, False)
    assert number_in(second.content) == 2


@pytest.mark.parametrize("death", [fails, from_the_superlink])
def test_a_node_that_is_gone_is_away(death: Callable[[int], Answer]) -> None:
    """An unavailable node is away and not asked again; a silent node is away, too, and the third one is not."""
    grid = ScriptedGrid({A: [death(ErrorCode.NODE_UNAVAILABLE)], B: [is_silent], C: [says(named(3))]})
    answers = list(exchange(grid, ask(A, B, C), 0.05))
    assert grid.asked == [A, B, C]
    assert [answer.away for answer in answers] == [True, True, False]
    assert [answer.died for answer in answers] == [False] * 3


def test_a_silent_node_of_a_simulation_has_failed() -> None:
    (answer,) = exchange(ScriptedGrid({A: [is_silent]}, simulated=True), ask(A), 0.05)
    assert (answer.problem, answer.away, answer.died) == ("no reply in time", False, False)


class RestartingGrid(ScriptedGrid):
    """B restarts after the second query of the nodes, and loses the message that it was sent before."""

    looks = 0

    def get_nodes(self) -> list[NodeInfo]:
        self.looks += 1
        stamps = {A: "long ago", B: "long ago" if self.looks < 3 else "just now"}
        return [NodeInfo(node_id=node, last_activated_at=stamp) for node, stamp in stamps.items()]


def test_a_node_that_has_started_again_is_sent_its_message_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A answers at once. B does not answer its first message but its second one; no third one is sent."""
    monkeypatch.setattr("hyperfl_flwr.server.exchange.CHECK_SECONDS", 0.0)
    grid = RestartingGrid({A: [says(named(1))], B: [is_silent, says(named(2))]})
    answers = list(exchange(grid, ask(A, B), 10.0))
    assert [number_in(answer.content) for answer in answers] == [1, 2]
    assert grid.asked == [A, B, B]


def test_messages_that_flower_does_not_take() -> None:
    """A node whose message is refused is away, and messages that are too large end the run.

    Flower's deployment grid returns None for a refused message, and too few ids for messages that are too large.
    """

    class Grid(ScriptedGrid):
        refused: tuple[int, ...] = (A,)
        taken = 2

        def push_messages(self, messages: Iterable[Message]) -> Any:
            messages = list(messages)
            names = super().push_messages(messages)
            pairs = zip(messages, names, strict=True)
            return [None if message.metadata.dst_node_id in self.refused else name for message, name in pairs][
                : self.taken
            ]

    grid = Grid({A: [says(named(1))], B: [says(named(2))]})
    answers = list(exchange(grid, ask(A, B), 10.0))
    assert [answer.problem for answer in answers] == ["the message could not be sent to the node", ""]
    assert [answer.away for answer in answers] == [True, False]
    assert grid.asked == [B]
    grid.taken = 0
    with pytest.raises(RunFailedError, match="Flower accepted 0 of 2 messages"):
        list(exchange(grid, ask(A, B), 10.0))


def test_an_exception_is_no_death() -> None:
    """A client app that raised an exception has answered, and is not asked again."""
    grid = ScriptedGrid({A: [fails(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "line one\n   line two")], B: [is_silent]})
    messages = ask(A, B)
    answers = list(exchange(grid, messages, 0.05))
    assert grid.asked == [A, B]
    assert [answer.problem for answer in answers] == ["line one line two", "no reply in time"]
    assert [answer.content for answer in answers] == [None, None]
    assert not any(answer.died for answer in answers)


def test_a_dead_process_whose_second_reply_is_missing() -> None:
    grid = ScriptedGrid({A: [fails(ErrorCode.UNKNOWN), is_silent]})
    assert [answer.problem for answer in exchange(grid, ask(A), 0.05)] == ["no reply in time"]


class SlowGrid(ScriptedGrid):
    """Has each reply at the second query only, and counts the replies that were fetched."""

    def __init__(self, answers: dict[int, Sequence[Answer]]) -> None:
        super().__init__(answers)
        self.looks: list[str] = []
        self.fetched = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        (name,) = message_ids
        self.looks.append(name)
        replies = super().pull_messages([name]) if self.looks.count(name) == 2 else []
        self.fetched += len(replies)
        return replies


def test_replies_are_waited_for_and_fetched_one_by_one() -> None:
    """A reply is fetched when the caller takes it, so that memory does not grow with the number of nodes."""
    grid = SlowGrid({A: [says(named(1))], B: [says(named(2))], C: [says(named(3))]})
    answers = exchange(grid, ask(A, B, C), 10.0)
    for number, node in enumerate((A, B, C), start=1):
        answer = next(answers)
        assert (answer.node, number_in(answer.content), grid.fetched) == (node, number, number)
    assert len(grid.looks) == 6
    assert list(answers) == []


def test_a_reply_that_is_there_is_fetched_after_the_time_is_over() -> None:
    """A is silent until the time is over; B, which answered long before, is not lost."""
    grid = ScriptedGrid({A: [is_silent], B: [says(named(2))]})
    assert [answer.problem for answer in exchange(grid, ask(A, B), 0.05)] == ["no reply in time", ""]


def test_an_error_of_the_superlink_is_matched_by_its_message() -> None:
    """Such an error names the message but not the node, and replies come in any order."""
    grid = ScriptedGrid({A: [from_the_superlink(ErrorCode.REPLY_MESSAGE_UNAVAILABLE)], B: [says(named(2))]})
    messages = ask(A, B)
    replies = list(grid.send_and_receive(messages))[::-1]
    first, second = match(messages, replies)
    assert (first.node, first.content, first.problem) == (A, None, "gone")
    assert (second.node, number_in(second.content), second.problem) == (B, 2, "")


def test_a_long_reason_is_cut() -> None:
    """2,000 characters are kept, so that a native stack trace does not flood the log."""
    grid = ScriptedGrid({A: [fails(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "x" * 5000)]})
    messages = ask(A)
    assert len(match(messages, grid.send_and_receive(messages))[0].problem) == 2000


def test_an_in_process_grid_turns_exceptions_into_errors() -> None:
    """An exception of a node becomes an error reply, as in Flower's engines; each node has its own context."""
    app = ClientApp()

    @app.query("number")
    def number(message: Message, context: Context) -> Message:
        if context.node_id == B:
            raise ValueError("not here")
        return Message(named(int(str(context.node_config["partition-id"]))), reply_to=message)

    grid = InProcessGrid(app, 2, {})
    messages = [Message(RecordDict(), dst_node_id=node, message_type="query.number") for node in grid.get_node_ids()]
    first, second = match(messages, grid.send_and_receive(messages))
    assert number_in(first.content) == 0
    assert "not here" in second.problem
    assert not second.died
