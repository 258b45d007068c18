"""Images from the trained encoder that a client of IT-PFL-HN returns: no label, and nothing of its model.

In the first phase the server sends the encoder g and an embedding e, and gets g back after SGD on |g(B) - e|^2 / d over
batches B. By default that is one step on all samples, so that the change is the gradient of one known function of the
images, which has no labels in it: candidates are changed until theirs matches (Geiping et al., NeurIPS 2020, on another
loss). The attack is this project's. Several steps are taken for one with their mean gradient, of all samples as one
set. In the second phase the encoder does not travel.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, grad
from torch.nn import functional

from hyperfl_flwr.attacks.encoder_knowledge import EncoderKnowledge
from hyperfl_flwr.attacks.ig import DEFAULTS
from hyperfl_flwr.attacks.inversion import IMAGES, Problems, Tensors
from hyperfl_flwr.attacks.observation import Arrays, Observation, PublicKnowledge
from hyperfl_flwr.attacks.readout import sgd_scalars
from hyperfl_flwr.attacks.reconstruction import (
    AttackSettings,
    Batch,
    IntArray,
    Reconstruction,
    pixel_range,
    reconstruct,
    stack,
    vmap_ready,
)
from hyperfl_flwr.models.encoder import Encoder, build_encoder

ENCODER, EMBEDDING = "encoder/", "embedding/weight"

_TARGET = "embedding"


def encoder_gradient(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct the images behind an encoder's update.

    Args:
        observations: Of IT-PFL-HN's first phase.
        knowledge: The settings.
        settings: Labels are ignored.

    Raises:
        ValueError: If no encoder has travelled, or it has not changed.
    """
    training = knowledge.encoder
    if training is None or not all(any(k.startswith(ENCODER) for k in each.reply) for each in observations):
        raise ValueError("there is no encoder in what the clients send")
    device = settings.device

    def prepare(chosen: Sequence[Observation], labels: Sequence[IntArray | None]) -> Batch:
        low, high = pixel_range(knowledge, device)
        starts = [encoder_arrays(each.received) for each in chosen]
        embeddings = [torch.from_numpy(each.received[EMBEDDING])[0] for each in chosen]
        shape = (knowledge.target, knowledge.input_shape, len(embeddings[0]), training.pooling)
        problems = Problems(
            simulate=_simulation(vmap_ready(build_encoder(*shape)), list(starts[0])),
            observed=stack([read_encoder(each, knowledge, training) for each in chosen], device),
            constants=stack([{**start, _TARGET: row} for start, row in zip(starts, embeddings, strict=True)], device),
            low=low,
            high=high,
        )
        return Batch(problems=problems, labels=[None] * len(chosen), findings=[{}] * len(chosen))

    return reconstruct(observations, knowledge, settings, DEFAULTS, prepare)


def read_encoder(observation: Observation, knowledge: PublicKnowledge, training: EncoderKnowledge) -> dict[str, Tensor]:
    """Return the mean gradient of the encoder's steps by parameter name, float32; exact after one step."""
    kept, weights = sgd_scalars(
        training.num_steps(observation.num_examples),
        learning_rate=training.learning_rate,
        momentum=knowledge.momentum,
        weight_decay=knowledge.weight_decay,
    )
    before, after = encoder_arrays(observation.received), encoder_arrays(observation.reply)
    found = {
        name: ((after[name].double() - kept * value.double()) / weights.sum()).float() for name, value in before.items()
    }
    if not any(bool(value.any()) for value in found.values()):
        raise ValueError("the encoder came back as it was sent: nothing can be read off it")
    return found


def encoder_arrays(arrays: Arrays) -> dict[str, Tensor]:
    """Return the encoder's among the arrays of one direction, by parameter name."""
    return {k.removeprefix(ENCODER): torch.from_numpy(v) for k, v in arrays.items() if k.startswith(ENCODER)}


def _simulation(encoder: Encoder, names: Sequence[str]) -> Callable[[Tensors, Tensors], Tensors]:
    def loss(parameters: dict[str, Tensor], images: Tensor, embedding: Tensor) -> Tensor:
        return functional.mse_loss(functional_call(encoder, parameters, (images,)), embedding)

    gradient_of = grad(loss)

    def simulate(unknowns: Tensors, constants: Tensors) -> Tensors:
        parameters = {name: constants[name] for name in names}
        gradient: Tensors = gradient_of(parameters, unknowns[IMAGES], constants[_TARGET])
        return gradient

    return simulate
