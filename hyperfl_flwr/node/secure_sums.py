"""A node's part in secure sums: what it checks before it trains, and what it answers.

The server is not trusted. A node refuses a step unless all nodes were sent the same terms, its own row in the header is
what it was asked for, the other nodes are its peers, and every sum that the server could open covers enough honest
nodes. `docs/privacy/secure-sums.md` lists the attacks that each rule prevents.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import RecordDict
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.node.secure_session import Sessions
from hyperfl_flwr.protocol.arrays import SharedArrays, select
from hyperfl_flwr.protocol.hosting import clients_of_node
from hyperfl_flwr.protocol.messages import PER_CLIENT_ARRAYS, Reduction, Request
from hyperfl_flwr.protocol.secure_sums.encoding import Encoding
from hyperfl_flwr.protocol.secure_sums.header import Header, Phase, arrays_digest
from hyperfl_flwr.protocol.secure_sums.keys import agree, is_signed, public_of, sign_key
from hyperfl_flwr.protocol.secure_sums.masks import ID_BYTES, Step, Upload, mask, release
from hyperfl_flwr.protocol.secure_sums.messages import (
    KEY,
    SIGNATURE,
    UnmaskRequest,
    release_content,
    step_in,
)
from hyperfl_flwr.protocol.secure_sums.noise import SumNoise
from hyperfl_flwr.protocol.secure_sums.numbers import SQUARES_FROM
from hyperfl_flwr.protocol.secure_sums.thresholds import MOST_NODES, crowd, unknown_nodes

LARGEST = 1e30
"""Largest magnitude of a received element, so that no range of the encoding overflows."""


@dataclass(frozen=True, kw_only=True)
class SecureTerms:
    """What the run's settings, as this node has received them, say about its secure steps.

    Attributes:
        settings: Their digest, see `hyperfl_flwr.protocol.secure_sums.header.settings_digest`.
        num_clients: Number of clients that all nodes host.
        reductions: Reduction of each shared group.
        range: Range of an array's change, see `Encoding`.
        max_examples: Number of training samples with the weight 1; `auto` to take the header's.
        max_update_ratio: Largest norm of a group's change, relative to the received one; 0 for no bound.
        least_range: Least range, see `Encoding`.
        noise: Noise that the nodes add to the sum; None for none.
        local_noise: Standard deviation of the noise that each client adds to its upload.
        colluding: Number of nodes that the run expects to collude with the server.
        cuts_off: Whether elements of an upload beyond the range are cut off; otherwise their client fails.
        metric_names: Function from phase and round to the names of the metrics that clients report.
    """

    settings: str
    num_clients: int
    reductions: Mapping[str, Reduction]
    range: float
    max_examples: int | Literal["auto"]
    max_update_ratio: float
    least_range: float = 0.0
    noise: SumNoise | None = None
    local_noise: float = 0.0
    colluding: int = 0
    cuts_off: bool = True
    metric_names: Callable[[Phase, int], Collection[str]]


@dataclass(frozen=True, kw_only=True)
class SecureNode:
    """A node that takes part in secure sums.

    Attributes:
        partition: Its number.
        num_nodes: Number P of all nodes.
        sessions: Its keys, and its memory of the newest step.
        peers: Public identity keys of all nodes by number; empty if keys come from the server.
        identity: Its private identity key; None to sign nothing.
        min_cohort: Least number of honest nodes in a sum, at least 2.
        max_colluding: Number of nodes that may collude with the server.
        sends_metrics: Whether metrics of its clients may be part of a sum.
    """

    partition: int
    num_nodes: int
    sessions: Sessions
    peers: Mapping[int, ec.EllipticCurvePublicKey]
    identity: ec.EllipticCurvePrivateKey | None
    min_cohort: int
    max_colluding: int
    sends_metrics: bool = True

    def key_properties(self, session: str) -> dict[str, str]:
        """Return the handshake properties of a session: the node's public key, and its identity's signature.

        Raises:
            StateError: If the key cannot be stored.
        """
        public = public_of(self.sessions.begin(session))
        signature = sign_key(self.identity, session, self.partition, public) if self.identity else ""
        return {KEY: public, SIGNATURE: signature}

    def accept(
        self, content: RecordDict, phase: Phase, request: Request, received: SharedArrays, terms: SecureTerms
    ) -> tuple[Step, Encoding]:
        """Check a TRAIN or EVALUATE message, and record that this node takes part in its step.

        Args:
            content: The message.
            phase: Its type.
            request: Its request.
            received: Its arrays.
            terms: What the run's settings say.

        Returns:
            The step, and the encoding of its sums.

        Raises:
            RefusalError: Naming the rule that the message breaks.
            StateError: If the step cannot be recorded.
        """
        step = _step_in(content)
        header = step.header
        self._check_request(header, phase, request)
        self._check_nodes(header, terms.num_clients)
        self._check_keys(header)
        self._check_crowd(header)
        self._check_metrics(header)
        _check_settings(header, terms, phase)
        if PER_CLIENT_ARRAYS in content:
            _refuse("a secure sum has no arrays for single clients")
        encoding = _encoding(header, received, terms)
        self.sessions.accept(step)
        return step, encoding

    def mask(self, step: Step, vector: NDArray[np.uint32], numbers: NDArray[np.uint64]) -> Upload:
        """Mask this node's sums in place, and record the upload before it leaves.

        Args:
            step: A step that was accepted.
            vector: Encoded parameters [P]; empty in an evaluation.
            numbers: Encoded counts and metrics [K].

        Raises:
            RefusalError: If the node has accepted another step since, or has uploaded too often.
        """
        upload = mask(vector, numbers, step, self.partition, self.sessions.key(step.header.session))
        self.sessions.add_upload(step, upload.id)
        return upload

    def _check_request(self, header: Header, phase: Phase, request: Request) -> None:
        """Refuse a header that is not that of the request beside it."""
        if header.phase != phase:
            _refuse(f"the header is for a message of type {header.phase}, this one is of type {phase}")
        if (header.experiment, header.round) != (request.experiment, request.round):
            _refuse("the header names another run or round than the request")
        row = header.row(self.partition)
        if row is None:
            _refuse("this node is not in the header")
        if (list(row.clients), list(row.versions)) != (list(request.clients), list(request.versions)):
            _refuse("the header names other clients or versions of this node than the request")

    def _check_nodes(self, header: Header, num_clients: int) -> None:
        """Refuse nodes that do not exist, or that do not host the clients in their row."""
        if len(header.nodes) > MOST_NODES:
            _refuse(f"a secure sum has at most {MOST_NODES} nodes, the header has {len(header.nodes)}")
        for row in header.nodes:
            hosted = clients_of_node(row.partition, self.num_nodes, num_clients)
            if row.partition >= self.num_nodes or not set(row.clients) <= set(hosted):
                _refuse(f"the header names clients of node {row.partition} that it does not host")

    def _check_keys(self, header: Header) -> None:
        """Refuse keys that are not this node's own, or not signed by its peers, or known to all."""
        key = self.sessions.key(header.session)
        for row in header.nodes:
            if row.partition == self.partition and row.key != public_of(key):
                _refuse("the header has another key of this node than the node has made")
            if self.peers and row.partition not in self.peers:
                _refuse(f"node {row.partition} is not in this node's peers-file")
            if self.peers and not is_signed(
                self.peers[row.partition], row.signature, header.session, row.partition, row.key
            ):
                _refuse(f"the key of node {row.partition} is not signed by the identity in this node's peers-file")
            try:
                agree(key, row.key)
            except ValueError:
                _refuse(f"the key of node {row.partition} is not a valid public key")

    def _check_crowd(self, header: Header) -> None:
        """Refuse a step in which a malicious server could open the sum of too few honest nodes."""
        honest = crowd(len(header.nodes), header.threshold, self.max_colluding)
        if honest < self.min_cohort:
            _refuse(
                f"with {len(header.nodes)} nodes and the threshold {header.threshold}, a sum could cover only {honest} "
                f"honest nodes if {self.max_colluding} collude (max-colluding of this node), but its owner requires "
                f"min-cohort = {self.min_cohort}; let more nodes take part, or raise secagg.threshold"
            )

    def _check_metrics(self, header: Header) -> None:
        """Refuse metrics that must not leave, and squares of which an attacker may know all but a few nodes."""
        if header.metrics and not self.sends_metrics:
            _refuse("the step sums metrics, which have no noise, but the owner of this node has set max-epsilon")
        unknown = unknown_nodes(len(header.nodes), header.threshold, self.max_colluding)
        if header.squares and unknown < SQUARES_FROM:
            _refuse(
                f"the step sums squares of metrics, but if {self.max_colluding} nodes collude (max-colluding of this "
                f"node), only {unknown} nodes in a sum are not known to them, and squares need {SQUARES_FROM}; set "
                f"secagg.colluding to {self.max_colluding}, or lower max-colluding"
            )


def release_shares(sessions: Sessions, partition: int, content: RecordDict) -> RecordDict:
    """Answer an UNMASK message with this node's shares; a node answers one question in a step.

    Args:
        sessions: The node's keys and memory.
        partition: Its number.
        content: The message.

    Raises:
        RefusalError: Naming the rule that the message breaks.
        StateError: If the question cannot be recorded.
    """
    step = _step_in(content)
    header = step.header
    try:
        question = UnmaskRequest.of(content)
        request = Request.of(content)
    except (ValueError, KeyError, TypeError) as error:
        raise RefusalError(f"the question for shares cannot be read: {type(error).__name__}") from None
    if (header.experiment, header.round) != (request.experiment, request.round):
        _refuse("the header names another run or round than the request")
    if not set(question.uploads) <= set(step.partitions):
        _refuse("the question names nodes that are not in the header")
    if any(len(upload) != ID_BYTES for upload in question.uploads.values()):
        _refuse("the question has an invalid identity of an upload")
    if len(question.uploads) < header.threshold:
        _refuse(f"the sum of {len(question.uploads)} nodes must not be opened, the threshold is {header.threshold}")
    if partition not in question.uploads:
        _refuse("the question leaves out this node's upload")
    key = sessions.key(header.session)
    sessions.answer(step, question.uploads[partition], question.digest)
    answer = release(step, partition, key, question.uploads, question.boxes)
    return release_content(answer, question.digest)


def _step_in(content: RecordDict) -> Step:
    try:
        return step_in(content)
    except ValueError as error:  # its texts quote nothing of the message
        raise RefusalError(str(error)) from None


def _check_settings(header: Header, terms: SecureTerms, phase: Phase) -> None:
    """Refuse a step of which the settings or the metrics are not those that this node has received."""
    if header.settings != terms.settings:
        _refuse("the header is for other settings of the run than this node has received")
    if terms.max_examples not in ("auto", header.max_examples):
        _refuse("the header has another secagg.max-examples than the run's settings")
    if unknown := sorted(set(header.metrics) - set(terms.metric_names(phase, header.round))):
        _refuse(f"the header names metrics that this method's clients do not send: {', '.join(unknown)}")


def _encoding(header: Header, received: SharedArrays, terms: SecureTerms) -> Encoding:
    """Return the step's encoding; refuses arrays that are not the header's, or cannot be encoded."""
    if header.arrays != arrays_digest(received):
        _refuse("the header is for other arrays than this node has received")
    try:
        encoding = Encoding(
            received=select(received, terms.reductions, lambda each: each is not Reduction.DOWN),
            reductions=terms.reductions,
            num_clients=header.num_clients,
            max_examples=header.max_examples,
            range=terms.range,
            least_range=terms.least_range,
            noise=terms.noise,
            num_nodes=len(header.nodes),
        )
    except KeyError:
        _refuse("the message has arrays of groups that the method does not share")
    except ValueError as error:
        raise RefusalError(f"the arrays cannot be summed: {error}") from None
    if max(encoding.magnitudes.values(), default=0.0) > LARGEST:
        _refuse(f"the message has arrays with elements above {LARGEST:g}")
    return encoding


def _refuse(reason: str) -> NoReturn:
    raise RefusalError(reason)
