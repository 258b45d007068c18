"""Report that a reply holds no gradient: the audit then goes on with the other clients, and says so of this one."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from hyperfl_flwr.attacks.knowledge import TrainingKnowledge
from hyperfl_flwr.runs.observation import Observation


class NothingToReadError(ValueError):
    """A reply holds no gradient, so that an attack has nothing to read.

    Args:
        reason: What was seen in the reply.
        client: The client that sent it, or 0 if the reply is a sum.
    """

    def __init__(self, reason: str, client: int = 0) -> None:
        super().__init__(reason)
        self.client = client


def require_gradient(gradients: Mapping[str, Tensor], observation: Observation, knowledge: TrainingKnowledge) -> None:
    """Check that a client has learned something: that one of its arrays differs from what it has received.

    Gradients alone do not tell: in an unchanged array they are what would cancel its weight decay.

    Args:
        gradients: Mean gradients of the parameters that are attacked, by the names of the arrays.
        observation: The observation from which they were read.
        knowledge: Public knowledge, with the form of the reply.

    Raises:
        NothingToReadError: If all gradients are zero, or no array has changed.
    """
    received, reply = observation.received, observation.reply
    is_sent_whole = knowledge.form == "values"
    changed = (not np.array_equal(reply[key], received[key] if is_sent_whole else 0 * reply[key]) for key in gradients)
    if not any(changed) or not any(bool(value.any()) for value in gradients.values()):
        raise NothingToReadError(
            "the reply equals the broadcast: the client has learned nothing to attack", observation.client
        )
