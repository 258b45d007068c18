"""The handshake with nodes that are slow, busy or out of step, on a clock of the test."""

from collections.abc import Iterable, Sequence

import pytest
from flwr.app import Message, RecordDict
from scripted import A, ScriptedGrid, nodes_of

from hyperfl_flwr.protocol.in_step import IN_STEP, MOMENTS, two_at_once, wait_for_the_other
from hyperfl_flwr.server.handshake_requests import HandshakeRequests

POLL = 3.0
"""Pause of a SuperNode between two requests for a message, in seconds."""

GAP = 0.5
"""Time within which two replies must become ready to be sent together, in seconds."""


class Clock:
    """The clock of the server and of the node."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class NodeGrid(ScriptedGrid):
    """One node, whose SuperNode receives a message, waits until there is a reply, and sends the replies that there are.

    Args:
        clock: The clock.
        hello: Seconds in which a request is handled.
        busy: Seconds until the SuperNode asks for the first message.
        is_late: Whether it is out of step: there is a reply to an earlier message already.
    """

    def __init__(self, clock: Clock, hello: float, busy: float = 0.0, *, is_late: bool = False) -> None:
        super().__init__(nodes_of(1, 1))
        self.clock, self.hello = clock, hello
        self.free_at = clock.now + busy
        self.ready: dict[str, float] = {"earlier": clock.now} if is_late else {}
        self.queue: list[tuple[str, bool]] = []
        self.replies: set[str] = set()
        self.together: list[bool] = []

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        pushed = [*messages]
        ids = super().push_messages(pushed)
        self.together += [IN_STEP in message.content for message in pushed]
        self.queue += zip(ids, [IN_STEP in message.content for message in pushed], strict=True)
        return ids

    def tick(self) -> None:
        """Let the node do what it does at this time."""
        now = self.clock.now
        if now < self.free_at:
            return
        if self.waits:
            if done := [name for name, time in self.ready.items() if time <= now]:
                together = [name for name, time in self.ready.items() if time <= min(self.ready.values()) + GAP]
                self.replies |= {name for name in done if name in together}
                self.ready = {name: time for name, time in self.ready.items() if name not in self.replies}
                self.waits = False
        elif self.queue:
            name, waits_for_the_other = self.queue.pop(0)
            end = now + self.hello
            self.ready[name] = end + MOMENTS - end % MOMENTS if waits_for_the_other else end
            self.waits = True
        else:
            self.free_at = now + POLL

    waits = False

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        return super().pull_messages([name for name in message_ids if name in self.replies])


def joined(clock: Clock, grid: NodeGrid, timeout: float, patience: float) -> float:
    """Return the seconds after which the handshake is answered."""
    requests, began = HandshakeRequests(grid, timeout), clock.now
    while A not in requests.answers:
        requests.refresh(0.0)
        grid.tick()
        clock.now += 0.1
        assert clock.now - began < patience, (grid.together, grid.ready)
    return clock.now - began


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("hyperfl_flwr.server.handshake_requests.time.monotonic", clock)
    return clock


@pytest.mark.parametrize("hello", [0.5, 2.0, 6.0])
def test_a_node_out_of_step_is_brought_back(clock: Clock, hello: float) -> None:
    """It replies to a further message at once, too."""
    grid = NodeGrid(clock, hello, is_late=True)
    assert joined(clock, grid, timeout=120.0, patience=60.0) > 20.0
    assert grid.together == [False, True, True]
    assert grid.ready == {}


@pytest.mark.parametrize("hello", [21.0, 25.0, 40.0, 60.0])
def test_a_slow_node_takes_part(clock: Clock, hello: float) -> None:
    grid = NodeGrid(clock, hello)
    assert joined(clock, grid, timeout=120.0, patience=120.0) >= hello
    assert grid.together == [False, True, True]


@pytest.mark.parametrize("busy", [30.0, 40.0, 80.0])
def test_a_node_that_is_busy_takes_part_as_soon_as_it_replies(clock: Clock, busy: float) -> None:
    grid = NodeGrid(clock, 2.0, busy)
    assert joined(clock, grid, timeout=120.0, patience=busy + 20.0) > busy
    assert grid.together == [False, True, True]


def test_a_node_that_is_busy_for_long_gets_two_requests_at_once_only_once(clock: Clock) -> None:
    """Others follow after each timeout."""
    grid = NodeGrid(clock, 2.0, busy=1000.0)
    assert joined(clock, grid, timeout=120.0, patience=1200.0) > 1000.0
    assert grid.together.count(True) == 2
    assert grid.together.count(False) <= 10


def test_two_replies_wait_for_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply to any other request does not wait."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    for now, content in zip((1003.25, 1004.0), two_at_once(RecordDict), strict=True):
        monkeypatch.setattr("time.time", lambda now=now: now)
        wait_for_the_other(content)
    wait_for_the_other(RecordDict())
    assert waits == [6.75, 6.0]
