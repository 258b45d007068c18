"""Train or evaluate a node's clients in a secure step: only masked sums of all of them leave the node."""

from dataclasses import dataclass

import numpy as np
from flwr.app import RecordDict

from hyperfl_flwr.node.array_sums import EncodedSum
from hyperfl_flwr.node.cohort import CohortResult, MakeClient, Received, Trainer, evaluate_cohort, train_cohort
from hyperfl_flwr.node.secure_sums import SecureNode, SecureTerms
from hyperfl_flwr.protocol.messages import Request
from hyperfl_flwr.protocol.secure_sums.encoding import NumbersEncoding
from hyperfl_flwr.protocol.secure_sums.masks import Step
from hyperfl_flwr.protocol.secure_sums.messages import SecureReply


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
        """Answer a TRAIN message with masked sums of parameters, counts and metrics.

        Args:
            trainer: Trains the clients.
            content: The message.
            received: Its arrays.

        Raises:
            RefusalError: If this node must not take part in the step.
            StateError: If its part cannot be recorded.
        """
        request = Request.of(content)
        step, encoding = self.node.accept(content, "train", request, received.shared, self.terms)
        total = EncodedSum(encoding, self.terms.max_update_ratio)
        result = train_cohort(trainer, request, received, total, send_details=False)
        return self._reply(step, result, total)

    def evaluate(self, make_client: MakeClient, content: RecordDict, received: Received) -> RecordDict:
        """Answer an EVALUATE message with masked sums of counts and metrics; see `train`."""
        request = Request.of(content)
        step, _ = self.node.accept(content, "evaluate", request, received.shared, self.terms)
        return self._reply(step, evaluate_cohort(make_client, request, received, send_details=False))

    def _reply(self, step: Step, result: CohortResult, total: EncodedSum | None = None) -> RecordDict:
        upload = None
        # A node without a finished client must not count as one of those that hide each other.
        if result.results:
            encoding = NumbersEncoding(metrics=step.header.metrics, num_clients=step.header.num_clients)
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
