"""Reconstruct images from the trained encoder that a client of IT-PFL-HN returns, without labels or its model.

In the first phase the server sends the encoder g, and gets it back after SGD on |g(B) - e|^2 / d over batches B, by
default one step on all samples. Its layers below the pooling, phi, are an extractor with a linear last layer:
`hyperfl_flwr.attacks.head_gradient` needs their gradient and nothing above them, neither embedding nor pooling. Several
steps are treated as one step on all samples with their mean gradient. In the second phase the encoder is not sent.

The attack is this project's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction, vmap_ready
from hyperfl_flwr.attacks.head_gradient import invert
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.nothing_to_read import NothingToReadError
from hyperfl_flwr.attacks.readout import EXTRACTOR, Readout, sgd_scalars
from hyperfl_flwr.models.encoder import build_encoder
from hyperfl_flwr.runs.observation import Arrays, Observation
from hyperfl_flwr.training.public_training import LocalSteps

ENCODER, _PHI = "encoder/", "body."


def encoder_gradient(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct the images behind an encoder's update.

    Args:
        observations: Observations with a trained encoder.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; labels are ignored.

    Raises:
        NothingToReadError: If an encoder has not changed.
        ValueError: If no encoder was sent.
    """
    form = knowledge.training.encoder
    if form is None or not all(encoder_arrays(observation.reply) for observation in observations):
        raise ValueError("the clients' replies hold no encoder; encoder-gradient needs one")
    phi = vmap_ready(build_encoder(knowledge.target, knowledge.input_shape, 1, form.pooling)).body

    def read(observation: Observation) -> Readout:
        return _phi_readout(observation, form.steps)

    return invert(observations, read, knowledge, settings, phi)


def read_encoder(observation: Observation, steps: LocalSteps) -> dict[str, Tensor]:
    """Return the mean gradient of the encoder's steps by parameter name, float32; exact after one step.

    Raises:
        NothingToReadError: If the encoder has not changed.
    """
    kept, weights = sgd_scalars(steps, steps.num_steps(observation.num_examples))
    before, after = encoder_arrays(observation.received), encoder_arrays(observation.reply)
    found = {
        name: ((after[name].double() - kept * value.double()) / weights.sum()).float() for name, value in before.items()
    }
    if all(bool((after[name] == value).all()) for name, value in before.items()):
        raise NothingToReadError(
            "the encoder is unchanged in the reply, so it has no gradient to attack", observation.client
        )
    return found


def encoder_arrays(arrays: Arrays) -> dict[str, Tensor]:
    """Return the encoder's arrays of one direction, by parameter name."""
    return {k.removeprefix(ENCODER): torch.from_numpy(v) for k, v in arrays.items() if k.startswith(ENCODER)}


def _phi_readout(observation: Observation, steps: LocalSteps) -> Readout:
    """Return a readout with parameters and gradient of phi under an extractor's names."""
    both = encoder_arrays(observation.received), read_encoder(observation, steps)
    parameters, gradient = (
        {f"{EXTRACTOR}.{k.removeprefix(_PHI)}": value for k, value in values.items() if k.startswith(_PHI)}
        for values in both
    )
    return Readout(
        parameters=parameters,
        gradient=gradient,
        num_steps=steps.num_steps(observation.num_examples),
        num_examples=observation.num_examples,
    )
