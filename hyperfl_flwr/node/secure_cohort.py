"""Train or evaluate a node's clients in a secure step: only masked sums of all of them leave the node."""

from dataclasses import dataclass

import numpy as np
from flwr.app import RecordDict

from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.node.array_sums import EncodedSum
from hyperfl_flwr.node.cohort import CohortResult, MakeClient, Received, Trainer, evaluate_cohort, train_cohort
from hyperfl_flwr.node.secure_sums import SecureNode, SecureTerms
from hyperfl_flwr.protocol.messages import Request
from hyperfl_flwr.protocol.secure_sums.encoding import Encoding
from hyperfl_flwr.protocol.secure_sums.header import Header
from hyperfl_flwr.protocol.secure_sums.masks import Step
from hyperfl_flwr.protocol.secure_sums.messages import SecureReply
from hyperfl_flwr.protocol.secure_sums.noise import add_noise
from hyperfl_flwr.protocol.secure_sums.numbers import NumbersEncoding
from hyperfl_flwr.protocol.secure_sums.thresholds import unknown_nodes


@dataclass(frozen=True, kw_only=True)
class SecureCohort:
    """A node's clients in a run with secure sums.

    The reasons of failures stay in the node's log: the server could steer them, and learn about a single client.

    Attributes:
        node: The node.
        terms: What the run's settings say.
    """

    node: SecureNode
    terms: SecureTerms

    def train(self, trainer: Trainer, content: RecordDict, received: Received) -> RecordDict:
        """Answer a TRAIN message with masked sums of parameters, counts and metrics; with `noise=sum` noisy ones.

        Args:
            trainer: Trains the clients.
            content: The message.
            received: Its arrays.

        Raises:
            RefusalError: If this node must not take part in the step.
            StateError: If its part cannot be recorded.
        """
        request = Request.of(content)
        step, encoding = self.node.accept(content, "train", request, received.alike, self.terms)
        share = self._share_of_noise(step.header, encoding)
        # With noise in the sum a part is bounded by its clipping. Whether it is above another bound would leave
        # without noise, as the failure of its client.
        ratio, noise = 0.0 if share else self.terms.max_update_ratio, self.terms.local_noise
        total = EncodedSum(encoding, ratio, noise, cuts_off=self.terms.cuts_off)
        result = train_cohort(trainer, request, received, total, send_details=False)
        if share and result.results:
            add_noise(total.vector, share)
        return self._reply(step, result, total)

    def evaluate(self, make_client: MakeClient, content: RecordDict, received: Received) -> RecordDict:
        """Answer an EVALUATE message with masked sums of counts and metrics; see `train`."""
        request = Request.of(content)
        step, _ = self.node.accept(content, "evaluate", request, received.alike, self.terms)
        return self._reply(step, evaluate_cohort(make_client, request, received, send_details=False))

    def _share_of_noise(self, header: Header, encoding: Encoding) -> float:
        """Return the standard deviation of this node's noise in units of the encoding; 0 in a run without `noise=sum`.

        The shares in any sum that can be opened suffice without those that an attacker knows, for as many colluding
        nodes as the run expects. All nodes count with the same number: the others' shares are part of the noise that
        this node needs.

        Raises:
            RefusalError: If its owner expects more colluding nodes than the run, or no share suffices.
        """
        if encoding.noise is None:
            return 0.0
        colluding = self.terms.colluding
        if self.node.max_colluding > colluding:
            raise RefusalError(
                f"its owner expects up to {self.node.max_colluding} colluding nodes (max-colluding), but the noise of "
                f"this run's sums suffices for {colluding} (secagg.colluding); raise secagg.colluding to "
                f"{self.node.max_colluding}, or lower max-colluding"
            )
        unknown = unknown_nodes(len(header.nodes), header.threshold, colluding)
        if not unknown:
            raise RefusalError(
                f"with {len(header.nodes)} nodes and the threshold {header.threshold}, a sum need not have noise that "
                f"others do not know if {colluding} collude, so no share of its noise suffices; raise "
                f"secagg.threshold, or let more nodes take part"
            )
        try:
            return encoding.noise.share(encoding.largest, encoding.size, unknown)
        except ValueError as error:  # its texts quote only settings and sizes
            raise RefusalError(str(error)) from None

    def _reply(self, step: Step, result: CohortResult, total: EncodedSum | None = None) -> RecordDict:
        upload = None
        # A node without a finished client must not count as one of those that hide each other.
        if result.results:
            header = step.header
            encoding = NumbersEncoding(metrics=header.metrics, num_clients=header.num_clients, squares=header.squares)
            numbers = encoding.encode(
                [client.metrics for client in result.results],
                num_examples=total.num_examples if total else 0,
                saturated=total.saturated if total else 0,
            )
            upload = self.node.mask(step, total.vector if total else np.zeros(0, np.uint32), numbers)
        reply = SecureReply(
            transcript=step.transcript,
            finished=[client.client for client in result.results],
            failed=[failure.client for failure in result.failures],
            upload=upload,
        )
        return reply.to_content()
