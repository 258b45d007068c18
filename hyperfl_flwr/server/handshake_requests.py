"""Ask the nodes of a deployment for the handshake, and keep their replies while they are connected."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.protocol.in_step import MOMENTS, two_at_once
from hyperfl_flwr.protocol.messages import HELLO, NUM_EXAMPLES
from hyperfl_flwr.protocol.secure_sums.messages import handshake_request
from hyperfl_flwr.server.exchange import match
from hyperfl_flwr.server.fetching import LateReplyError, RefusedReplyError, ReplyLimits, SuperLinkError, fetch, repeated
from hyperfl_flwr.server.handshake import Answer, Refusal, parse_handshake_reply, placed

PAUSE_SECONDS = 0.5
"""Pause between two polls for replies, in seconds."""

FETCH_SECONDS = 5.0
"""Longest wait for missing parts of a reply that has begun to arrive, in seconds."""

ASK_AGAIN_SECONDS = 15.0
"""Pause before a refused node is asked again, in seconds: its owner may have restarted it with other data."""

SILENT_SECONDS = 20.0
"""Time without a reply after which a connected node is brought back into step, see `protocol.in_step`, in seconds."""

PROMPT_SECONDS = 10.0
"""Time within which a node that is out of step replies to its first request once it gets others, in seconds."""

SLACK_SECONDS = 3.0
"""Time for which a reply is waited for beyond what the one before took, in seconds."""

_NO_ANSWER = {ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE}


@dataclass(kw_only=True)
class _Asked:
    """The requests to a node without an accepted reply so far.

    Attributes:
        since: Time at which the first was sent, on the clock of `time.monotonic`.
        sent: Message and id of each request without a reply, in the order in which they were sent.
        paired_at: Time at which two were last sent at once; None if that has not happened.
        heard_at: Time of the last reply since then; None if there was none.
    """

    since: float
    sent: list[tuple[Message, str]]
    paired_at: float | None = None
    heard_at: float | None = None

    def is_slow(self, now: float) -> bool:
        """Return whether a node whose first reply comes now is in step: it was slow, or busy with another message."""
        return self.paired_at is not None and self.heard_at is None and now - self.paired_at > PROMPT_SECONDS

    def is_out_of_step(self, now: float) -> bool:
        """Return whether the last of two requests is without a reply for longer than a node in step would take."""
        if self.paired_at is None or self.heard_at is None or len(self.sent) > 1:
            return False
        return now - self.heard_at > self.heard_at - self.paired_at + MOMENTS + SLACK_SECONDS


class HandshakeRequests:
    """The requests for a run's handshake, and the replies to them.

    Args:
        grid: Flower's grid.
        timeout: Seconds after which a request without a reply is sent again.
        session: Identity of this process for secure sums; empty without them.
        num_nodes: Number of nodes of the run; None if the nodes decide about it.

    Attributes:
        answers: Parsed replies of the connected nodes, by Flower's id.
        ask_again: Ids of nodes that are asked again before they take part, such as one that has failed: its owner may
            have restarted it with another node config so quickly that it was never seen to leave.
    """

    def __init__(self, grid: Grid, timeout: float, session: str = "", num_nodes: int | None = None) -> None:
        self.answers: dict[int, Answer] = {}
        self.ask_again: set[int] = set()
        self._grid, self._timeout, self._session, self._num_nodes = grid, timeout, session, num_nodes
        self._waiting: dict[int, _Asked] = {}
        self._paired: set[int] = set()  # nodes that have not replied since they got two requests at once
        self._asked_at: dict[int, float] = {}
        self._barred: dict[int, Refusal] = {}

    def refresh(self, patience: float) -> None:
        """Ask new nodes and, after a pause, refused nodes again; forget nodes that have left.

        Args:
            patience: Longest wait for the replies of new nodes, in seconds.
        """
        there = list(repeated(self._grid.get_node_ids))
        for table in (self.answers, self._waiting, self._asked_at):
            for gone in set(table) - set(there):
                del table[gone]
        self._paired &= set(there)
        self.answers = {node: answer for node, answer in self.answers.items() if node not in self.ask_again}
        self.ask_again.clear()
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
            and now - self._asked_at[node] > ASK_AGAIN_SECONDS
        ]
        self._ask([*new, *again])
        self._collect()
        self._bring_into_step()
        while time.monotonic() < now + patience and any(node in self._waiting for node in new):
            time.sleep(PAUSE_SECONDS)
            self._collect()
            self._bring_into_step()

    def _ask(self, nodes: list[int]) -> None:
        now = time.monotonic()
        self._asked_at |= dict.fromkeys(nodes, now)
        for node, message, name in self._sent([(node, handshake_request(self._session)) for node in nodes]):
            self._waiting[node] = _Asked(since=now, sent=[(message, name)])

    def _bring_into_step(self) -> None:
        """Ask silent nodes twice at once.

        Again only if it was of no use: a node that has not replied since may be busy for an hour.
        """
        now = time.monotonic()
        silent = [
            node
            for node, asked in self._waiting.items()
            if asked.is_out_of_step(now)
            or (asked.paired_at is None and now - asked.since > SILENT_SECONDS and node not in self._paired)
        ]
        for node in silent:
            self._waiting[node].paired_at, self._waiting[node].heard_at = now, None
        self._paired |= set(silent)
        contents = [(node, each) for node in silent for each in two_at_once(lambda: handshake_request(self._session))]
        for node, message, name in self._sent(contents):
            self._waiting[node].sent.append((message, name))

    def _sent(self, contents: Sequence[tuple[int, RecordDict]]) -> list[tuple[int, Message, str]]:
        """Send requests; returns the node, the message and its id of each that Flower has accepted."""
        messages = [Message(content, dst_node_id=node, message_type=HELLO) for node, content in contents]
        names: list[str | None] = list(repeated(lambda: self._grid.push_messages(messages))) if messages else []
        return [  # None: Flower refuses a message to a node that has just left
            (node, message, name)
            for (node, _), message, name in zip(contents, messages, names, strict=True)
            if name is not None
        ]

    def _collect(self) -> None:
        """Collect the replies that have arrived; the next refresh asks nodes without a reply in time again."""
        for node, asked in list(self._waiting.items()):
            if self._collect_from(node, asked) or time.monotonic() > asked.since + self._timeout:
                del self._waiting[node]

    def _collect_from(self, node: int, asked: _Asked) -> bool:
        """Collect a node's replies, and return whether no more are waited for."""
        for sent in list(asked.sent):
            message, name = sent
            now = time.monotonic()
            try:
                replies = fetch(self._grid, name, ReplyLimits(), min(asked.since + self._timeout, now + FETCH_SECONDS))
            except (LateReplyError, SuperLinkError):
                return True
            except RefusedReplyError as error:
                self._barred[node] = self.answers[node] = Refusal(id=node, number=None, reason=str(error))
                return True
            if not replies:
                continue
            is_last, is_slow = sent is asked.sent[-1], asked.is_slow(now)
            asked.sent = asked.sent[asked.sent.index(sent) + 1 :]
            asked.heard_at = now
            self._paired.discard(node)
            if is_last or is_slow:
                if not (replies[0].has_error() and replies[0].error.code in _NO_ANSWER):
                    # Honest nodes send no counts then, and the largest count sets the weights of all clients.
                    hidden = NUM_EXAMPLES if self._session else ""
                    answer = match([message], replies)[0]
                    parsed = parse_handshake_reply(answer, needs_key=bool(self._session), refused=hidden)
                    self.answers[node] = placed(parsed, self._num_nodes)
                return True
        return False
