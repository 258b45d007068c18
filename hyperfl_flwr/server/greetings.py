"""Greet the nodes of a deployment, and keep their replies to the handshake while they are connected."""

import time
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.messages import HELLO, NUM_EXAMPLES
from hyperfl_flwr.protocol.secure_sums.messages import greeting
from hyperfl_flwr.server.exchange import match
from hyperfl_flwr.server.fetching import LateReplyError, RefusedReplyError, ReplyLimits, SuperLinkError, fetch, repeated
from hyperfl_flwr.server.handshake import Node, Refusal, introduce

PAUSE_SECONDS = 0.5
"""Pause between two polls for replies, in seconds."""

FETCH_SECONDS = 5.0
"""Longest wait for missing parts of a reply that has begun to arrive, in seconds."""

ASK_AGAIN_SECONDS = 15.0
"""Pause before a refused node is greeted again, in seconds: its owner may have restarted it with other data."""

_NO_ANSWER = {ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE}


@dataclass(kw_only=True)
class _Greeting:
    """A greeting without a reply so far: the message, its id, and the time at which it was sent."""

    message: Message
    name: str
    sent_at: float


class Greetings:
    """The greetings of a run and the replies to them.

    Args:
        grid: Flower's grid.
        timeout: Seconds after which a greeting without a reply is sent again.
        session: Identity of this process for secure sums; empty without them.

    Attributes:
        answers: Parsed replies of the connected nodes, by Flower's id.
    """

    def __init__(self, grid: Grid, timeout: float, session: str = "") -> None:
        self.answers: dict[int, Node | Refusal] = {}
        self._grid, self._timeout, self._session = grid, timeout, session
        self._waiting: dict[int, _Greeting] = {}
        self._greeted_at: dict[int, float] = {}
        self._barred: dict[int, Refusal] = {}

    def refresh(self, patience: float) -> None:
        """Greet new nodes and, after a pause, refused nodes again; forget nodes that have left.

        Args:
            patience: Longest wait for the replies of new nodes, in seconds.
        """
        there = list(repeated(self._grid.get_node_ids))
        for table in (self.answers, self._waiting, self._greeted_at):
            for gone in set(table) - set(there):
                del table[gone]
        # A node that sent a harmful reply stays refused, even if it leaves and comes back.
        self.answers |= {node: refusal for node, refusal in self._barred.items() if node in there}
        now = time.monotonic()
        new = [node for node in there if node not in self.answers and node not in self._waiting]
        again = [
            node
            for node, answer in self.answers.items()
            if isinstance(answer, Refusal)
            and node not in self._waiting
            and node not in self._barred
            and now - self._greeted_at[node] > ASK_AGAIN_SECONDS
        ]
        self._greet([*new, *again])
        self._collect()
        while time.monotonic() < now + patience and any(node in self._waiting for node in new):
            time.sleep(PAUSE_SECONDS)
            self._collect()

    def _greet(self, nodes: list[int]) -> None:
        messages = [Message(greeting(self._session), dst_node_id=node, message_type=HELLO) for node in nodes]
        names: list[str | None] = list(repeated(lambda: self._grid.push_messages(messages))) if messages else []
        for node, message, name in zip(nodes, messages, names, strict=True):
            self._greeted_at[node] = time.monotonic()
            if name is not None:  # None: Flower refuses a message to a node that has just left
                self._waiting[node] = _Greeting(message=message, name=name, sent_at=time.monotonic())

    def _collect(self) -> None:
        """Collect the replies that have arrived; the next refresh greets nodes without a reply in time again."""
        for node, sent in list(self._waiting.items()):
            end, now = sent.sent_at + self._timeout, time.monotonic()
            try:
                replies = fetch(self._grid, sent.name, ReplyLimits(), min(end, now + FETCH_SECONDS))
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
                # Honest nodes send no counts then, and the largest count sets the weights of all clients.
                hidden = NUM_EXAMPLES if self._session else ""
                answer = match([sent.message], replies)[0]
                self.answers[node] = introduce(answer, needs_key=bool(self._session), refused=hidden)
