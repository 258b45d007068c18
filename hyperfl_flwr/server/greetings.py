"""Asks the nodes of a deployment who they are, and keeps their answers for as long as they are connected."""

import time
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.messages import HELLO
from hyperfl_flwr.server.exchange import match
from hyperfl_flwr.server.fetching import LateReplyError, RefusedReplyError, ReplyLimits, SuperLinkError, fetch, repeated
from hyperfl_flwr.server.handshake import Node, Refusal, introduce

PAUSE_SECONDS = 0.5
"""Pause between two looks at what has arrived."""

FETCH_SECONDS = 5.0
"""Longest wait for the parts of an answer that has arrived otherwise."""

ASK_AGAIN_SECONDS = 15.0
"""Pause before a refused node is greeted again: its owner may have started it again with other data."""

_NO_ANSWER = {ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE}


@dataclass(kw_only=True)
class _Greeting:
    """A greeting on its way: the message, its id, and when it was sent."""

    message: Message
    name: str
    sent: float


class Greetings:
    """The greetings of a run and their answers.

    Args:
        grid: Flower's grid.
        timeout: Seconds after which a greeting without an answer is sent again.

    Attributes:
        answers: What the connected nodes have answered, by Flower's id.
    """

    def __init__(self, grid: Grid, timeout: float) -> None:
        self.answers: dict[int, Node | Refusal] = {}
        self._grid, self._timeout = grid, timeout
        self._waiting: dict[int, _Greeting] = {}
        self._asked: dict[int, float] = {}
        self._barred: dict[int, Refusal] = {}

    def refresh(self, patience: float) -> None:
        """Greet the nodes that are new, and those refused some time ago; forget those that have left.

        Args:
            patience: Longest wait for the answers of new nodes, in seconds.
        """
        there = list(repeated(self._grid.get_node_ids))
        for table in (self.answers, self._waiting, self._asked):
            for gone in set(table) - set(there):
                del table[gone]
        self.answers |= {node: refusal for node, refusal in self._barred.items() if node in there}
        now = time.monotonic()
        new = [node for node in there if node not in self.answers and node not in self._waiting]
        again = [
            node
            for node, answer in self.answers.items()
            if isinstance(answer, Refusal)
            and node not in self._waiting
            and node not in self._barred
            and now - self._asked[node] > ASK_AGAIN_SECONDS
        ]
        self._greet([*new, *again])
        self._collect()
        while time.monotonic() < now + patience and any(node in self._waiting for node in new):
            time.sleep(PAUSE_SECONDS)
            self._collect()

    def _greet(self, nodes: list[int]) -> None:
        messages = [Message(RecordDict(), dst_node_id=node, message_type=HELLO) for node in nodes]
        names: list[str | None] = list(repeated(lambda: self._grid.push_messages(messages))) if messages else []
        for node, message, name in zip(nodes, messages, names, strict=True):
            self._asked[node] = time.monotonic()
            if name is not None:  # Flower refuses a message to a node that has just left
                self._waiting[node] = _Greeting(message=message, name=name, sent=time.monotonic())

    def _collect(self) -> None:
        """Take the answers that have arrived; a node without one in time is greeted again by the next refresh."""
        for node, greeting in list(self._waiting.items()):
            end, now = greeting.sent + self._timeout, time.monotonic()
            try:
                replies = fetch(self._grid, greeting.name, ReplyLimits(), min(end, now + FETCH_SECONDS))
            except (LateReplyError, SuperLinkError):
                del self._waiting[node]
                continue
            except RefusedReplyError as error:
                self._barred[node] = self.answers[node] = Refusal(id=node, number=None, reason=str(error))
                del self._waiting[node]
                continue
            if not replies:
                if time.monotonic() > end:
                    del self._waiting[node]
                continue
            del self._waiting[node]
            if not (replies[0].has_error() and replies[0].error.code in _NO_ANSWER):
                self.answers[node] = introduce(match([greeting.message], replies)[0])
