"""Track the nodes of a run: nodes that join, leave, come back, or are refused.

Before each round the server asks Flower which nodes are connected. It asks new nodes for the handshake, and nodes
that were away again: they may have restarted with other data and, without key authentication, with another Flower id.
The private state of their clients is on the node's disk, and the server knows from which version each client continues.

In a simulation the nodes do not change after the handshake.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from flwr.serverapp import Grid

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.protocol.hosting import clients_of_node
from hyperfl_flwr.protocol.queries import NOVEL
from hyperfl_flwr.server.earlier_answers import EarlierAnswers
from hyperfl_flwr.server.exchange import is_simulated
from hyperfl_flwr.server.exclusions import Exclusions
from hyperfl_flwr.server.federation import Agreement, Federation, agree, handshake, listed
from hyperfl_flwr.server.fetching import repeated
from hyperfl_flwr.server.handshake import Bystander, Node, Refusal, number_of, share_text
from hyperfl_flwr.server.handshake_requests import PAUSE_SECONDS, HandshakeRequests
from hyperfl_flwr.server.suggested_settings import suggestion_for

HANDSHAKE_SECONDS = 30.0
"""Longest wait before a round for a new node's reply, in seconds; a later one takes part from the next round on."""

Announce = Callable[[str], None]
"""Function that prints one line for people."""


class Roster:
    """The nodes of a run.

    Args:
        grid: Flower's grid.
        num_clients: Number of clients N.
        timeout: Longest wait for missing nodes, in seconds.
        min_nodes: Number of nodes required at the start and before each round. None: at the start all must have
            replied, and half of them (rounded up) must take part.
        announce: Function that receives one line about each change.
        exclusion_rounds: Number of rounds to exclude a node after its first refused reply.
        session: Identity of this process for secure sums; empty without them.
        fewest: Function from the number of nodes P to the least number that a round is possible with.
        num_nodes: Number of nodes P; nodes with larger numbers take no part and are not waited for. None: the number
            that most nodes report.

    Attributes:
        federation: The nodes that are connected and fit.
        num_nodes: Number of nodes P, including missing ones; 0 while it is not known.
        refused: Refusals of the nodes that do not fit.
        exclusions: Nodes that are excluded from some rounds.
        seen: Numbers of the nodes that have taken part.
        simulated: True if the nodes belong to a simulation, where none can join or leave.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        num_clients: int,
        timeout: float,
        min_nodes: int | None = None,
        announce: Announce = lambda _: None,
        exclusion_rounds: int = 5,
        session: str = "",
        fewest: Callable[[int], int] = lambda num_nodes: 1,
        num_nodes: int | None = None,
    ) -> None:
        self.federation = Federation([])
        self.num_nodes, self._given_nodes = num_nodes or 0, num_nodes
        self._known = {"num-nodes": str(num_nodes)} if num_nodes else {}
        self.refused: list[Refusal] = []
        self.exclusions = Exclusions(exclusion_rounds)
        self.seen: set[int] = set()
        self._grid, self._num_clients, self._timeout = grid, num_clients, timeout
        self._min_nodes, self._announce, self._round = min_nodes, announce, 0
        self.simulated = is_simulated(grid)
        self._agreement = Agreement(terms={})
        self._has_begun, self._suggestion = False, ""
        self._session, self._fewest = session, fewest
        self._requests = HandshakeRequests(grid, timeout, session, num_nodes)
        self._earlier = EarlierAnswers()
        self._last_announced: dict[int, str] = {}
        self._announced_notes: set[str] = set()

    def gather(self, *, resumed: Mapping[str, str] | None = None) -> Federation:
        """Wait for the nodes at the start of a run.

        Args:
            resumed: The terms of a run that has begun before; `min_nodes = None` then requires only half of the nodes.

        Raises:
            RunFailedError: If too few nodes take part after `timeout`, or if the nodes' data differ without a majority;
                in a simulation, if anything is wrong with a node.
        """
        if self.simulated:
            self.federation = handshake(self._grid, self._num_clients, self._timeout, self._session)
            self.num_nodes = len(self.federation.nodes)
            if self._given_nodes not in (None, self.num_nodes):
                raise RunFailedError(f"num-nodes is {self._given_nodes}, but the simulation has {self.num_nodes} nodes")
            self.seen = {node.partition for node in self.federation.nodes}
            return self.federation
        self._known |= resumed or {}
        end, waiting = time.monotonic() + self._timeout, ""
        while True:
            left = max(0.0, end - time.monotonic())
            # Wait for all new nodes together, so that the order of their replies does not decide who fits.
            self._poll(patience=min(HANDSHAKE_SECONDS, left))
            if (self._all_have_replied() and self._has_enough()) or time.monotonic() > end:
                break
            if (state := self._missing_text()) != waiting:
                self._announce(f"waiting for nodes: {state}")
                waiting = state
            time.sleep(PAUSE_SECONDS)
        self._refuse_split()
        if not self._has_enough() or (self._min_nodes is None and resumed is None and not self._all_have_replied()):
            self._fail()
        self._fix_terms()
        return self.federation

    def refresh(self, current: int) -> Federation:
        """Return the nodes that take part in a round; wait if there are too few.

        Args:
            current: The round, from 1.

        Raises:
            RunFailedError: If there are too few nodes after `timeout`.
        """
        self._round = current
        if self.simulated:
            return self.federation
        end = time.monotonic() + self._timeout
        self._poll(patience=HANDSHAKE_SECONDS)
        if not self._has_enough():
            self._announce(f"waiting up to {self._timeout:g} s: {self._shortage()}")
        while not self._has_enough():
            if time.monotonic() > end:
                self._fail()
            time.sleep(PAUSE_SECONDS)
            self._poll(patience=0.0)
        return self.federation

    def mark_away(self, nodes: Iterable[int], reason: str = "") -> None:
        """Record that nodes, given by Flower's ids, are away; they are asked again before they take part."""
        if lost := [node for node in nodes if self._requests.answers.pop(node, None)]:
            self._update(reason if len(lost) == 1 else "")

    def exclude(self, node: int, reason: str, *, for_good: bool = False, is_failure: bool = False) -> None:
        """Exclude a node of a deployment from some rounds after the current one.

        Args:
            node: Flower's id of the node, which has replied to the handshake.
            reason: Reason why its reply was refused.
            for_good: True to exclude it for the rest of the run.
            is_failure: True if the node only failed; it is asked again, and its first failure does not exclude it.
        """
        number = next((host.partition for host in self.federation.nodes if host.id == node), None)
        if self.simulated or number is None:
            return
        if is_failure:
            self._requests.ask_again.add(node)
        exclusion = self.exclusions.add(node, number, self._round, reason, for_good=for_good, is_failure=is_failure)
        if exclusion:
            self._announce(str(exclusion))
            self._last_announced[number] = "away"
            self._update()

    @property
    def away(self) -> list[int]:
        """Numbers of the nodes that are not connected, refused, or excluded; ascending."""
        here = {node.partition for node in self.federation.nodes}
        return [number for number in range(self.num_nodes) if number not in here]

    def clients_of(self, number: int) -> list[int]:
        """Return the clients of a node, even if it has not replied."""
        node = self._agreement.accepted.get(number)
        return list(node.clients) if node else clients_of_node(number, self.num_nodes, self._num_clients)

    def _poll(self, patience: float) -> None:
        """Update the connected nodes; wait at most `patience` seconds for the replies of new ones."""
        self._requests.refresh(patience)
        self._update()

    def _update(self, reason: str = "") -> None:
        """Determine from the replies which nodes take part, and report changes."""
        answers = self._requests.answers
        training = [each for each in answers.values() if isinstance(each, Node) and not each.properties.get(NOVEL)]
        nodes = [node for node in training if not self.exclusions.cover(node.id, self._round)]
        here = {node.id for node in self.federation.nodes}
        changed = self._earlier.refusals(nodes)
        nodes = [node for node in nodes if node.id not in {refusal.id for refusal in changed}]
        nodes.sort(key=lambda node: node.id not in here)  # a present node wins over a new one with the same number
        terms = self._agreement.terms if self._has_begun else None
        self._agreement = found = agree(nodes, self._num_clients, terms, self._known)
        self._suggestion = suggestion_for(nodes) if found.refused or found.split else ""
        if not self._has_begun:
            self.num_nodes = int(found.terms.get("num-nodes", 0))
        self.refused = [answer for answer in answers.values() if isinstance(answer, Refusal)] + found.refused + changed
        if self._has_begun:
            self._earlier.note(found.accepted.values())
        self.federation = Federation([found.accepted[number] for number in sorted(found.accepted)])
        self._report_changes(reason)

    def _report_changes(self, reason: str) -> None:
        remarks = [remark for node in self.federation.nodes for remark in node.remarks]
        suggestions = [f"the nodes' data would agree with {self._suggestion}"] if self._suggestion else []
        others = [answer for answer in self._requests.answers.values() if isinstance(answer, Bystander)]
        for line in (notes := [*map(str, (*self.refused, *others)), *suggestions, *remarks]):
            if line not in self._announced_notes:
                self._announce(line)
        self._announced_notes = set(notes)
        if not self._has_begun:
            return
        for number in range(self.num_nodes):
            state = "away" if number in self.away else "there"
            if state != self._last_announced[number]:
                clients = f"(clients {listed(self.clients_of(number))})"
                if state == "away":
                    self._announce(f"node {number} is away {clients}{f': {reason}' if reason else ''}")
                else:
                    is_known = number in self.seen and not self._earlier.differs(self._agreement.accepted[number])
                    share = "" if is_known else share_text(self.federation.nodes, number)
                    self._announce(f"node {number} {'is back' if number in self.seen else 'joins'} {clients}{share}")
                self._last_announced[number] = state
        self.seen |= {node.partition for node in self.federation.nodes}

    def _fix_terms(self) -> None:
        """Fix the agreed terms, and report which nodes take part from the start."""
        self._has_begun = True
        self._last_announced = dict.fromkeys(range(self.num_nodes), "away")
        self._last_announced |= {node.partition: "there" for node in self.federation.nodes}
        self.seen = {node.partition for node in self.federation.nodes}
        self._earlier.note(self.federation.nodes)
        for node in self.federation.nodes:
            share = share_text(self.federation.nodes, node.partition)
            self._announce(f"node {node.partition} takes part: clients {listed(node.clients)}{share}")
        for number in self.away:
            self._announce(f"node {number} is missing (clients {listed(self.clients_of(number))})")

    def _all_have_replied(self) -> bool:
        """Return True if all expected nodes have replied.

        With a given number of nodes, an error without a node's number may come from a node that is not the run's.
        """
        answers = self._requests.answers.values()
        if self._given_nodes is None:
            return 0 < self.num_nodes <= len(answers)
        return set(map(number_of, answers)).issuperset(range(self._given_nodes))

    @property
    def min_nodes(self) -> int:
        """Number of nodes required before a round: the setting or, without it, half of all nodes (rounded up)."""
        chosen = -(-self.num_nodes // 2) if self._min_nodes is None else self._min_nodes
        return max(chosen, self._fewest(self.num_nodes))

    def _has_enough(self) -> bool:
        return self.num_nodes > 0 and len(self.federation.nodes) >= self.min_nodes

    def _missing_text(self) -> str:
        """Return a text for people: how many nodes are present, and which are missing."""
        if not self.num_nodes:
            return "no node has replied yet"
        return f"{len(self.federation.nodes)} of {self.num_nodes} present, missing: {listed(self.away)}"

    def _shortage(self) -> str:
        if not self.num_nodes:
            return "no suitable node has replied"
        here = listed(node.partition for node in self.federation.nodes) or "none"
        return f"{self.min_nodes} of {self.num_nodes} nodes are needed, present: {here}, missing: {listed(self.away)}"

    def _refuse_split(self) -> None:
        """Fail if the nodes differ in a property and no value has a majority: the server cannot know which is right.

        Raises:
            RunFailedError: If there is such a property; the message names the values and their nodes.
        """
        if self._agreement.split:
            remedy = f"start the run with {self._suggestion}, or " if self._suggestion else ""
            raise RunFailedError(
                f"the nodes' data do not agree: {self._agreement.sides()}; no value has a majority: {remedy}correct "
                f"one side, or start the run without its nodes"
            )

    def _fail(self) -> None:
        excluded = [exclusion for exclusion in self.exclusions if exclusion.covers(self._round)]
        reasons = "".join(f"\n  - {reason}" for reason in (*self.refused, *excluded))
        if self._min_nodes is None and not self._has_begun and self._has_enough():
            few = f"all {self.num_nodes} nodes are required, missing: {listed(self.away)}"
            remedy = f"start them, or set min-nodes={len(self.federation.nodes)} to begin without them"
        else:
            few, remedy = self._shortage(), "start the missing nodes, lower min-nodes, or raise node-timeout"
            suggested = f"start the run with {self._suggestion}, or lower min-nodes" if self._suggestion else ""
            remedy = suggested or ("correct what the nodes below report, " if self.refused else "") + remedy
            if silent := set(repeated(self._grid.get_node_ids)) - set(self._requests.answers):
                few += f" ({len(silent)} connected but without a reply in time, which takes ten seconds or more)"
        raise RunFailedError(f"too few nodes within node-timeout = {self._timeout:g} s: {few}; {remedy}{reasons}")
