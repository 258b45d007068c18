"""Who is there: nodes that come, go, come back, or are refused.

Before each round the server looks which nodes Flower has. A new one is greeted; one that has been away is greeted
again, since it may have started again with other data and, without key authentication, under another id of Flower's.
Its clients' private state is on its own disk, and the server knows the version that each has to go on from.

In a simulation all nodes stay as they were at the handshake.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from hyperfl_flwr.agreement import Agreement, Federation, agree, handshake
from hyperfl_flwr.cohort import clients_of_node
from hyperfl_flwr.errors import RunFailedError
from hyperfl_flwr.grid import is_simulated, match
from hyperfl_flwr.introduction import Node, Refusal, introduce
from hyperfl_flwr.messages import HELLO
from hyperfl_flwr.queries import NOVEL

PAUSE_SECONDS = 0.5
"""Pause between two looks while nodes are waited for."""

GREETING_SECONDS = 30.0
"""Longest wait before a round for the answer of a node that has just come; later, it takes part from the next on."""

ASK_AGAIN_SECONDS = 15.0
"""Pause before a refused node is greeted again: its owner may have started it anew with other data."""

_NO_ANSWER = {ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED, ErrorCode.MESSAGE_UNAVAILABLE}

Say = Callable[[str], None]
"""Prints one line for people."""


@dataclass(kw_only=True)
class _Greeting:
    """A greeting on its way: the message, its id (None if Flower has refused it), and when it was sent."""

    message: Message
    name: str | None
    sent: float


class Roster:
    """The nodes of a run.

    Args:
        grid: Flower's grid.
        num_clients: Number of clients N.
        timeout: Longest wait for nodes that are missing, in seconds.
        min_nodes: How many must be there, at the start and before each round; None: at the start all must have
            answered, and half of them (rounded up) must take part.
        say: Is told what changes.

    Attributes:
        federation: The nodes that are there and fit.
        num_nodes: Number of nodes P, those that are missing included; 0 until a node has told.
        refused: Nodes that do not fit.
        seen: Numbers of the nodes that have taken part.
        simulated: Whether nobody can come or go.
    """

    def __init__(
        self, grid: Grid, *, num_clients: int, timeout: float, min_nodes: int | None = None, say: Say = lambda _: None
    ) -> None:
        self.federation = Federation([])
        self.num_nodes = 0
        self.refused: list[Refusal] = []
        self.seen: set[int] = set()
        self._grid, self._num_clients, self._timeout = grid, num_clients, timeout
        self._min_nodes, self._say = min_nodes, say
        self.simulated = is_simulated(grid)
        self._agreement = Agreement(terms={})
        self._begun, self._num_novel = False, 0
        self._answers: dict[int, Node | Refusal] = {}
        self._greetings: dict[int, _Greeting] = {}
        self._asked: dict[int, float] = {}
        self._told: dict[int, str] = {}
        self._told_notes: set[str] = set()

    def gather(self, *, resumed: bool = False) -> Federation:
        """Wait for the nodes at the start of a run.

        Args:
            resumed: Whether the run has begun before: `min_nodes = None` then asks for half of the nodes only.

        Raises:
            RunFailedError: If too few nodes are there after `timeout`, or no data are those of most nodes; in a
                simulation, if anything is wrong with a node.
        """
        if self.simulated:
            self.federation = handshake(self._grid, self._num_clients, self._timeout)
            self.num_nodes = len(self.federation.nodes)
            self.seen = {node.partition for node in self.federation.nodes}
            return self.federation
        end, waiting = time.monotonic() + self._timeout, ""
        while True:
            left = max(0.0, end - time.monotonic())
            self._look(patience=min(GREETING_SECONDS, left))  # who is the first to answer decides nothing
            if (self._all_are_known() and self._are_enough()) or time.monotonic() > end:
                break
            if (state := self._missing_text()) != waiting:
                self._say(f"waiting for nodes: {state}")
                waiting = state
            time.sleep(PAUSE_SECONDS)
        self._refuse_split()
        all_needed = self._min_nodes is None and not resumed
        if not self._are_enough() or (all_needed and not self._all_are_known()):
            self._fail()
        self._begin()
        return self.federation

    def muster(self) -> Federation:
        """Look who is there before a round, and wait if these are too few.

        Raises:
            RunFailedError: If too few nodes are there after `timeout`.
        """
        if self.simulated:
            return self.federation
        end = time.monotonic() + self._timeout
        self._look(patience=GREETING_SECONDS)
        if not self._are_enough():
            self._say(f"waiting up to {self._timeout:g} s: {self._few()}")
        while not self._are_enough():
            if time.monotonic() > end:
                self._fail()
            time.sleep(PAUSE_SECONDS)
            self._look(patience=0.0)
        return self.federation

    def lose(self, nodes: Iterable[int], why: str = "") -> None:
        """Note that nodes, by Flower's ids, were found to be away; they are greeted again before they take part."""
        if lost := [node for node in nodes if self._answers.pop(node, None)]:
            self._decide(why if len(lost) == 1 else "")

    @property
    def away(self) -> list[int]:
        """Numbers of the nodes that are not there, or refused; ascending."""
        here = {node.partition for node in self.federation.nodes}
        return [number for number in range(self.num_nodes) if number not in here]

    def clients_of(self, number: int) -> list[int]:
        """Return the clients of a node, which need not have answered."""
        node = self._agreement.accepted.get(number)
        return list(node.clients) if node else clients_of_node(number, self.num_nodes, self._num_clients)

    def _look(self, patience: float) -> None:
        """Find out who is there now; wait `patience` seconds at most for the answers of those that are new."""
        there = list(self._grid.get_node_ids())
        for table in (self._answers, self._greetings, self._asked):
            for gone in set(table) - set(there):
                del table[gone]
        now = time.monotonic()
        new = [node for node in there if node not in self._answers and node not in self._greetings]
        again = [
            node
            for node, answer in self._answers.items()
            if isinstance(answer, Refusal)
            and node not in self._greetings
            and now - self._asked[node] > ASK_AGAIN_SECONDS
        ]
        self._greet([*new, *again])
        self._collect()
        while time.monotonic() < now + patience and any(node in self._greetings for node in new):
            time.sleep(PAUSE_SECONDS)
            self._collect()
        self._decide()

    def _greet(self, nodes: Sequence[int]) -> None:
        messages = [Message(RecordDict(), dst_node_id=node, message_type=HELLO) for node in nodes]
        names: Sequence[str | None] = list(self._grid.push_messages(messages)) if messages else []
        for node, message, name in zip(nodes, messages, names, strict=True):
            self._asked[node] = time.monotonic()
            if name is not None:
                self._greetings[node] = _Greeting(message=message, name=name, sent=time.monotonic())

    def _collect(self) -> None:
        """Take the answers that are there; who has not answered in time is greeted anew by the next look."""
        for node, greeting in list(self._greetings.items()):
            replies = list(self._grid.pull_messages([greeting.name])) if greeting.name else []
            if not replies:
                if time.monotonic() - greeting.sent > self._timeout:
                    del self._greetings[node]
                continue
            del self._greetings[node]
            if replies[0].has_error() and replies[0].error.code in _NO_ANSWER:
                continue
            self._answers[node] = introduce(match([greeting.message], replies)[0])

    def _decide(self, why: str = "") -> None:
        """Make of the answers who takes part, and tell what has changed."""
        answered = [answer for answer in self._answers.values() if isinstance(answer, Node)]
        nodes = [node for node in answered if not node.properties.get(NOVEL)]  # those take models on demand only
        self._num_novel = len(answered) - len(nodes)
        here = {node.id for node in self.federation.nodes}
        nodes.sort(key=lambda node: node.id not in here)  # who takes part already comes before who claims the same
        self._agreement = agree(nodes, self._num_clients, self._agreement.terms if self._begun else None)
        found = self._agreement
        if not self._begun:
            self.num_nodes = int(found.terms.get("num-nodes", 0))
        self.refused = [answer for answer in self._answers.values() if isinstance(answer, Refusal)] + found.refused
        self.federation = Federation([found.accepted[number] for number in sorted(found.accepted)])
        self._tell(why)

    def _tell(self, why: str) -> None:
        others = [(node.partition, node.other_versions) for node in self.federation.nodes]
        warnings = [f"node {number} runs {said}: results may differ" for number, said in others if said]
        for line in (notes := [*map(str, self.refused), *warnings]):
            if line not in self._told_notes:
                self._say(line)
        self._told_notes = set(notes)
        if not self._begun:
            return
        for number in range(self.num_nodes):
            state = "away" if number in self.away else "there"
            if state != self._told[number]:
                clients = f"(clients {_listed(self.clients_of(number))})"
                if state == "away":
                    self._say(f"node {number} is away {clients}{f': {why}' if why else ''}")
                else:
                    self._say(f"node {number} {'is back' if number in self.seen else 'joins'} {clients}")
                self._told[number] = state
        self.seen |= {node.partition for node in self.federation.nodes}

    def _begin(self) -> None:
        """Keep what was agreed, and tell who begins."""
        self._begun = True
        self._told = dict.fromkeys(range(self.num_nodes), "away")
        self._told |= {node.partition: "there" for node in self.federation.nodes}
        self.seen = {node.partition for node in self.federation.nodes}
        total = sum(self.federation.num_examples.values())
        for node in self.federation.nodes:
            count = sum(node.num_examples.values())
            share = f", {count} training samples ({count / total:.0%} of all)" if total else ""
            self._say(f"node {node.partition} takes part: clients {_listed(node.clients)}{share}")
        for number in self.away:
            self._say(f"node {number} is missing (clients {_listed(self.clients_of(number))})")

    def _all_are_known(self) -> bool:
        """Say whether as many nodes as there should be have answered."""
        return 0 < self.num_nodes <= len(self.federation.nodes) + len(self.refused) + self._num_novel

    @property
    def min_nodes(self) -> int:
        """Number of nodes that a run needs before a round; one that was asked for stands, whatever the nodes tell."""
        return max(1, -(-self.num_nodes // 2)) if self._min_nodes is None else self._min_nodes

    def _are_enough(self) -> bool:
        return self.num_nodes > 0 and len(self.federation.nodes) >= self.min_nodes

    def _missing_text(self) -> str:
        """Return who is there and who is missing, in words; empty if nobody is."""
        if not self.num_nodes:
            return "none has answered yet"
        here = _listed(node.partition for node in self.federation.nodes) or "none"
        return f"{here} of {self.num_nodes} here, {_listed(self.away)} missing"

    def _few(self) -> str:
        if not self.num_nodes:
            return "no node has answered that fits"
        here = _listed(node.partition for node in self.federation.nodes) or "none"
        return f"{self.min_nodes} of {self.num_nodes} nodes are needed, here are: {here}, missing: {_listed(self.away)}"

    def _refuse_split(self) -> None:
        """Fail if no value of something is that of most nodes: nobody knows who is right.

        Raises:
            RunFailedError: Naming both sides.
        """
        if self._agreement.split:
            sides = [
                f"{name} is " + " but ".join(f"{value} on nodes {_listed(held)}" for value, held in values.items())
                for name, values in self._agreement.split.items()
            ]
            raise RunFailedError(
                f"the nodes' data do not fit together: {'; '.join(sides)}; no side has most nodes: correct one, or "
                f"start the run without it"
            )

    def _fail(self) -> None:
        reasons = "".join(f"\n  - {refusal}" for refusal in self.refused)
        if self._min_nodes is None and not self._begun and self._are_enough():
            few = f"all {self.num_nodes} nodes are waited for, missing: {_listed(self.away)}"
            remedy = f"start them, or set min-nodes={len(self.federation.nodes)} to begin without them"
        else:
            few, remedy = self._few(), "start the missing ones, lower min-nodes, or raise node-timeout"
            if silent := set(self._grid.get_node_ids()) - set(self._answers):
                few += f" ({len(silent)} connected that did not answer in time, which takes ten seconds or more)"
        raise RunFailedError(f"too few nodes within node-timeout = {self._timeout:g} s: {few}; {remedy}{reasons}")


def _listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))
