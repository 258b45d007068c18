"""Gradient inversion of HyperFL as in its paper: an attack that searches for everything private.

Guo et al., AAAI 2025, section 5.2 (Table 3): images x, embedding v and classifier phi are optimised together, so that
the hypernetwork's gradient at (x, v, phi) fits the observed one. The server could read v and theta off instead
(`hyperfl_flwr.attacks.readout`). This attack does not; it reproduces the paper's numbers, and its failure proves
nothing.

The heads' gradient z g^T has as many entries as the hypernetwork. It is compared in the basis of the observed
gradient's leading singular vectors, D_H = U S V^T of rank r: there it is the r x r matrix (U^T z)(V^T g)^T plus a
remainder of known norm, with the same inner products.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
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
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.nothing_to_read import require_gradient
from hyperfl_flwr.attacks.optimisation import Optimisation, Tensors
from hyperfl_flwr.attacks.optimiser_loop import IMAGES, Problems
from hyperfl_flwr.attacks.readout import mean_gradients
from hyperfl_flwr.attacks.soft_labels import first_soft_labels, label_constants, labels_in
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.runs.observation import Observation

DEFAULTS = Optimisation(iterations=10_000, signed=True, total_variation=1e-6)
"""The paper's settings."""

MAX_RANK = 8
"""Number of singular vectors of the heads' gradient to keep; one step has a single one."""

_GROUP = "hypernetwork/"
_NEGLIGIBLE = 1e-6
_TINY = 1e-12


def paper_ig(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct images from HyperFL's replies as in the paper; several local steps are treated as one.

    Args:
        observations: Observations of HyperFL, all of one broadcast.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; without labels, soft labels are optimised, too.

    Raises:
        ValueError: If the observations are not of one broadcast of HyperFL.
    """
    _check(observations)
    target, device = build_structure(knowledge), settings.device
    low, high = pixel_range(knowledge, device)
    broadcast = {
        key.removeprefix(_GROUP): torch.tensor(value).float().to(device)
        for key, value in observations[0].received.items()
    }

    def prepare(chosen: Sequence[Observation], labels: Sequence[IntArray | None]) -> Batch:
        rows = [_compressed(_gradients(observation, knowledge)) for observation in chosen]
        constants = stack([bases for bases, _ in rows], device)
        constants |= label_constants(labels, device)
        problems = Problems(
            simulate=_simulation(target),
            observed=stack([parts for _, parts in rows], device),
            constants=constants,
            shared=broadcast,
            low=low,
            high=high,
        )

        def other_unknowns(generator: torch.Generator) -> Tensors:
            private = _first_values(knowledge, target.classifier.in_features, generator)
            return {**private, **first_soft_labels(labels, chosen[0].num_examples, knowledge.num_classes, generator)}

        return Batch(problems=problems, labels=labels, findings=[{}] * len(chosen), other_unknowns=other_unknowns)

    return reconstruct(observations, knowledge, settings, DEFAULTS, prepare)


def _check(observations: Sequence[Observation]) -> None:
    for observation in observations:
        if f"{_GROUP}head_bias" not in observation.received:
            raise ValueError("ig-paper attacks the hypernetwork of HyperFL, but none was sent")
        for key, value in observation.received.items():
            if not np.array_equal(value, observations[0].received[key]):
                raise ValueError("all observations must be of one broadcast; attack each round separately")


def _gradients(observation: Observation, knowledge: PublicKnowledge) -> dict[str, Tensor]:
    found = mean_gradients(observation, knowledge)
    require_gradient(found, observation, knowledge)
    return found


def _compressed(means: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the bases U [p, r] and V [P, r] of the heads' mean gradient, and the observed parts in them."""
    heads = means[f"{_GROUP}head_weight"]
    squared, vectors = torch.linalg.eigh(heads @ heads.T)
    rank = min(MAX_RANK, len(squared))
    singular = squared.flip(0)[:rank].clamp(min=0).sqrt()
    left = vectors.flip(1)[:, :rank]
    right = heads.T @ left / singular.clamp(min=_NEGLIGIBLE * float(singular[0]))
    right = right * (singular > _NEGLIGIBLE * singular[0])
    parts = {name: means[_GROUP + name] for name in ("head_bias", "hidden.weight", "hidden.bias")}
    parts |= {"heads": torch.diag(singular), "rest": torch.zeros(())}
    return (
        {"left": left.float(), "right": right.float()},
        {name: value.float() for name, value in parts.items()},
    )


def _first_values(knowledge: PublicKnowledge, width: int, generator: torch.Generator) -> Tensors:
    """Draw initial v and phi as clients do."""
    form = knowledge.training.hypernetwork
    if form is None:
        raise ValueError("ig-paper searches for the embedding of a hypernetwork, but the clients train none")
    bound = width**-0.5
    embedding = torch.randn(form.embedding_dim, generator=generator)
    return {
        "embedding": embedding / (1.0 if form.initialisation == "torch" else embedding.norm()),
        "weight": torch.empty(knowledge.num_classes, width).uniform_(-bound, bound, generator=generator),
        "bias": torch.empty(knowledge.num_classes).uniform_(-bound, bound, generator=generator),
    }


def _simulation(target: Target) -> Callable[[Tensors, Tensors], Tensors]:
    shapes = {name: parameter.shape for name, parameter in target.extractor.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]

    def simulate(unknowns: Tensors, constants: Tensors) -> Tensors:
        labels = labels_in(unknowns, constants)
        before = constants["hidden.weight"] @ unknowns["embedding"] + constants["hidden.bias"]
        hidden = torch.relu(before)

        def loss(theta: Tensor) -> Tensor:
            cut = zip(shapes.items(), torch.split(theta, sizes), strict=True)
            parameters = {name: part.view(shape) for (name, shape), part in cut}
            features = functional_call(target.extractor, parameters, (unknowns[IMAGES],))
            return functional.cross_entropy(features @ unknowns["weight"].T + unknowns["bias"], labels)

        gradient = grad(loss)(hidden @ constants["head_weight"] + constants["head_bias"])
        of_hidden = (constants["head_weight"] @ gradient) * (before > 0)
        heads = torch.outer(hidden @ constants["left"], gradient @ constants["right"])
        energy = hidden.square().sum() * gradient.square().sum() - heads.square().sum()
        return {
            "heads": heads,
            "rest": energy.clamp(min=_TINY).sqrt(),
            "head_bias": gradient,
            "hidden.weight": torch.outer(of_hidden, unknowns["embedding"]),
            "hidden.bias": of_hidden,
        }

    return simulate
