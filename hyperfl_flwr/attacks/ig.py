"""Reconstruct images by gradient inversion, for methods that share the whole network.

Geiping, Bauermeister, Droege, Moeller: "Inverting Gradients", NeurIPS 2020: one minus the cosine between the gradient
of candidate images and the observed one, plus total variation. After several local steps the reply is the known
weighted sum of the steps' gradients; the candidate's steps are simulated with momentum, weight decay, clipping and
FedProx's pull, and differentiated through (section 5 there). The order in which a client drew its batches is unknown:
with more samples than a batch holds, candidates are taken in a fixed order. Memory and time grow with the number of
steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call, grad
from torch.nn import functional

from hyperfl_flwr.attacks.base import (
    AttackSettings,
    Batch,
    IntArray,
    Reconstruction,
    build_structure,
    pixel_range,
    reconstruct,
    stack,
)
from hyperfl_flwr.attacks.idlg import recover_labels
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.optimisation import Optimisation, Tensors
from hyperfl_flwr.attacks.optimiser_loop import IMAGES, Problems
from hyperfl_flwr.attacks.readout import Readout, read_out, sgd_scalars
from hyperfl_flwr.attacks.soft_labels import first_soft_labels, label_constants, labels_in
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.runs.observation import Observation

DEFAULTS = Optimisation(iterations=2000, learning_rate=1.0, signed=True, total_variation=3e-3, polish=500)
"""Defaults, tuned on single images of Fashion-MNIST; they converge further than the paper's (10,000 or more signed
steps at a rate of 0.1, and 1e-6 to 1e-4 for the prior) in a fifth of the time."""

Read = Callable[[Observation, PublicKnowledge], Readout]
"""Reads the whole network's parameters and mean gradient off an observation."""

_FORCE = "force/"
_CLIP_EPSILON = 1e-6


def ig(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct the images behind an update of the whole network.

    Args:
        observations: Observations of whole models.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; without labels, `recover_labels` estimates them.

    Raises:
        ValueError: If the classifier is private.
    """
    return invert(observations, knowledge, settings, read_out)


def invert(
    observations: Sequence[Observation],
    knowledge: PublicKnowledge,
    settings: AttackSettings,
    read: Read,
    *,
    soft_labels: bool = False,
) -> list[Reconstruction]:
    """Reconstruct images from the readout that `read` returns for each observation; see `ig`.

    With `soft_labels` unknown labels are not recovered but searched for, as probabilities of the classes.
    """
    settings = _matched_to_scale(settings, knowledge)
    target, device = build_structure(knowledge), settings.device

    def prepare(chosen: Sequence[Observation], labels: Sequence[IntArray | None]) -> Batch:
        readouts = [read(observation, knowledge) for observation in chosen]
        if not all(readout.shares_classifier for readout in readouts):
            raise ValueError("ig needs the whole network, but this method keeps the classifier private")
        used = labels
        if not soft_labels:
            used = [
                recover_labels(readout, observation.num_examples) if known is None else known
                for readout, observation, known in zip(readouts, chosen, labels, strict=True)
            ]
        low, high = pixel_range(knowledge, device)
        constants = stack([readout.parameters for readout in readouts], device)
        constants |= stack([{_FORCE + n: value for n, value in readout.force.items()} for readout in readouts], device)
        constants |= label_constants(used, device)
        problems = Problems(
            simulate=_simulation(target, knowledge, readouts[0].num_steps),
            observed=stack([readout.gradient for readout in readouts], device),
            constants=constants,
            low=low,
            high=high,
        )
        return Batch(
            problems=problems,
            labels=used,
            findings=[readout.findings for readout in readouts],
            other_unknowns=lambda generator: first_soft_labels(
                used, chosen[0].num_examples, knowledge.num_classes, generator
            ),
        )

    return reconstruct(observations, knowledge, settings, DEFAULTS, prepare)


def _matched_to_scale(settings: AttackSettings, knowledge: PublicKnowledge) -> AttackSettings:
    """Return settings of which no objective uses the norm of a reply, if clipping has changed it."""
    if not knowledge.unknown_scale:
        return settings
    return replace(settings, optimisation=(settings.optimisation or DEFAULTS).for_unknown_scale())


def _simulation(target: Target, knowledge: PublicKnowledge, num_steps: int) -> Callable[[Tensors, Tensors], Tensors]:
    def loss(parameters: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(target, parameters, (images,)), labels)

    names = [name for name, _ in target.named_parameters()]
    gradient_of = grad(loss)
    steps = knowledge.steps
    _, weights = sgd_scalars(steps, num_steps)
    shares = [float(weight) for weight in weights / weights.sum()]

    def simulate(unknowns: Tensors, constants: Tensors) -> Tensors:
        parameters = {name: constants[name] for name in names}
        buffers = {name: torch.zeros_like(value) for name, value in parameters.items()}
        mean = dict(buffers)
        labels = labels_in(unknowns, constants)
        for step, share in enumerate(shares):
            samples = _batch_of(step, unknowns[IMAGES].shape[0], steps.batch_size)
            gradient = gradient_of(parameters, unknowns[IMAGES][samples], labels[samples])
            gradient = _clipped(gradient, steps.clip_norm)
            mean = {name: mean[name] + share * gradient[name] for name in names}
            if step + 1 == num_steps:
                break  # the parameters after the last step are not needed
            for name in names:
                decayed = gradient[name] + steps.weight_decay * parameters[name] + constants.get(_FORCE + name, 0.0)
                if steps.pull > 0:
                    decayed = decayed + steps.pull * (parameters[name] - constants[name])
                buffers[name] = steps.momentum * buffers[name] + decayed
                parameters[name] = parameters[name] - steps.learning_rate * buffers[name]
        return mean

    return simulate


def _batch_of(step: int, num_images: int, batch_size: int) -> slice:
    first = step * batch_size % (-(-num_images // batch_size) * batch_size)
    return slice(first, min(first + batch_size, num_images))


def _clipped(gradient: dict[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    if clip_norm <= 0:
        return gradient
    norm = torch.stack([value.square().sum() for value in gradient.values()]).sum().sqrt()
    scale = (clip_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
    return {name: value * scale for name, value in gradient.items()}
