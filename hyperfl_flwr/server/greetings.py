"""Greet the nodes of a deployment, and keep their replies to the handshake while they are connected."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.in_step import two_at_once
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

SILENT_SECONDS = 20.0
"""Time without a reply after which a connected node is brought back into step, see `protocol.in_step`, in seconds."""

_NO_ANSWER = {ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE}


@dataclass(kw_only=True)
class _Greeting:
    """A greeting without a reply so far.

    Attributes:
        message: The message.
        name: Its id.
        sent_at: Time at which it was sent, on the clock of `time.monotonic`.
        first_sent_at: Time at which the node's first greeting without a reply was sent.
        before: Id of the greeting that was sent at the same time, if there is one, else empty: once it is answered and
            this one is not, the node is still out of step.
    """

    message: Message
    name: str
    sent_at: float
    first_sent_at: float
    before: str = ""


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
        self._bring_into_step()
        while time.monotonic() < now + patience and any(node in self._waiting for node in new):
            time.sleep(PAUSE_SECONDS)
            self._collect()
            self._bring_into_step()

    def _greet(self, nodes: list[int]) -> None:
        now = time.monotonic()
        self._greeted_at |= dict.fromkeys(nodes, now)
        for node, message, name in self._sent([(node, greeting(self._session)) for node in nodes]):
            self._waiting[node] = _Greeting(message=message, name=name, sent_at=now, first_sent_at=now)

    def _bring_into_step(self) -> None:
        """Greet nodes without a reply twice at once; again if only the first of two greetings has a reply."""
        now = time.monotonic()
        silent = [
            node
            for node, sent in self._waiting.items()
            if now - sent.sent_at > SILENT_SECONDS and (not sent.before or self._has_reply(sent.before))
        ]
        contents = [(node, each) for node in silent for each in two_at_once(lambda: greeting(self._session))]
        before: dict[int, str] = {}
        for node, message, name in self._sent(contents):
            first = self._waiting[node].first_sent_at
            self._waiting[node] = _Greeting(
                message=message, name=name, sent_at=now, first_sent_at=first, before=before.get(node, "")
            )
            before[node] = name

    def _sent(self, contents: Sequence[tuple[int, RecordDict]]) -> list[tuple[int, Message, str]]:
        """Send greetings; returns the node, the message and its id of each that Flower has accepted."""
        messages = [Message(content, dst_node_id=node, message_type=HELLO) for node, content in contents]
        names: list[str | None] = list(repeated(lambda: self._grid.push_messages(messages))) if messages else []
        return [  # None: Flower refuses a message to a node that has just left
            (node, message, name)
            for (node, _), message, name in zip(contents, messages, names, strict=True)
            if name is not None
        ]

    def _has_reply(self, name: str) -> bool:
        """Return whether a greeting has been answered, whatever the reply says."""
        try:
            return bool(fetch(self._grid, name, ReplyLimits(), time.monotonic() + FETCH_SECONDS))
        except (LateReplyError, SuperLinkError):
            return False
        except RefusedReplyError:
            return True

    def _collect(self) -> None:
        """Collect the replies that have arrived; the next refresh greets nodes without a reply in time again."""
        for node, sent in list(self._waiting.items()):
            end, now = sent.first_sent_at + self._timeout, time.monotonic()
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
