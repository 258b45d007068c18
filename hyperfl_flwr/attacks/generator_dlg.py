"""Recover the pseudo-data behind the gradient of PRIV-HFL's generator, and the private label counts.

A client replies with the gradient of f_g = CE(theta'(x'), y), x' = G(z, y), with respect to omega, at its trained model
theta'. `generator_labels` estimates y from it. The layer on the noise is linear as well; with e_n the gradient of
f_g with respect to its output for pseudo-sample n, the gradients of its weight and bias are

    N = sum_n e_n z_n^T      b = sum_n e_n

With P < 100 pseudo-samples the z_n are in the row space of N, of P dimensions, and their part along pinv(N) b follows:
P (P - 1) unknowns instead of 100 P. The attack searches for values with which the gradient of all of omega matches
(Zhu, Liu, Han: "Deep Leakage from Gradients", NeurIPS 2019). The server knows omega, and theta' as the sum of all
changes.

The images are the pseudo-data; private images affect them only through theta' and omega. The server also wrote the
run's seed, from which z follows; the attack does not use it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from hyperfl_flwr.attacks.base import (
    AttackSettings,
    Batch,
    IntArray,
    Reconstruction,
    pixel_range,
    reconstruct,
    stack,
)
from hyperfl_flwr.attacks.dual_difference import model_after
from hyperfl_flwr.attacks.generator_labels import (
    GENERATOR,
    columns,
    generator_arrays,
    generator_form,
    label_shares,
    labels_of_round,
    networks,
    private_counts,
)
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.optimisation import Optimisation, Tensors
from hyperfl_flwr.attacks.optimiser_loop import Problems
from hyperfl_flwr.models.generator import NOISE_DIM
from hyperfl_flwr.runs.observation import Observation

DEFAULTS = Optimisation(iterations=400, learning_rate=0.3, total_variation=0.0)
"""Defaults, tuned on two to eight pseudo-samples of a fresh generator of width 64 for images of 28x28."""

MOST_SEARCHED = 32
"""Most pseudo-samples to search for: time grows with their number, and the unknowns with its square."""

_MODEL, _LABELS = "model/", "labels"
_DIRECTIONS, _OFFSET, _MIXTURE = "directions", "offset", "mixture"


def generator_dlg(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Estimate each client's label counts, and reconstruct the pseudo-data of the round.

    Args:
        observations: Observations of a generator's gradient, with all earlier ones of the same clients.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; labels are ignored, since they are those of the private images.

    Returns:
        For each client the P pseudo-images (none if P exceeds `MOST_SEARCHED`) and the estimated counts.

    Raises:
        ValueError: If an observation has no gradient of a generator.
    """
    form = generator_form(knowledge)
    shares = [label_shares(observation, knowledge, settings.seed) for observation in observations]
    counts = [
        private_counts(share, observation.num_examples, form.class_balance)
        for share, observation in zip(shares, observations, strict=True)
    ]
    if form.pseudo_samples > MOST_SEARCHED:
        no_images = np.zeros((0, *knowledge.input_shape), dtype=np.float32)
        results = [Reconstruction(images=no_images, findings=_findings(observation)) for observation in observations]
    else:
        results = _search(observations, knowledge, settings)
    return [replace(result, label_counts=count) for result, count in zip(results, counts, strict=True)]


def noise_space(observation: Observation, number: int) -> tuple[Tensor, Tensor]:
    """Return the affine space of the round's noise vectors: each is a combination of directions plus a common offset.

    N = E^T Z and the bias gradient b = E^T 1 give Z a = 1 with a = pinv(N) b, which fixes the component of every z_n
    along a. The rest is in the row space of N.

    Args:
        observation: Observation with a generator's gradient.
        number: Number P of pseudo-samples, at most 100.

    Returns:
        Directions [P, 100], orthogonal to the offset, and the offset [100].
    """
    weight, bias = (
        torch.from_numpy(np.asarray(observation.reply[f"{GENERATOR}noise.{part}"], dtype=np.float64))
        for part in ("weight", "bias")
    )
    left, values, right = (part[:number] for part in _decomposed(weight))
    along = (left @ bias / values) @ right
    offset = along / along.square().sum()
    directions = right - torch.outer(right @ along, offset)
    return directions.float(), offset.float()


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left.T, values, right


def _findings(observation: Observation) -> dict[str, float]:
    return {
        "rounds-read": float(1 + len(observation.earlier)),
        "pseudo-labels-present": float(columns(observation).any(axis=0).sum()),
    }


def _search(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Search for the noise vectors that explain each gradient."""
    number, device = generator_form(knowledge).pseudo_samples, settings.device
    generator, target = networks(knowledge)

    def prepare(chosen: Sequence[Observation], _: Sequence[IntArray | None]) -> Batch:
        labels = [labels_of_round(observation, knowledge, settings.seed) for observation in chosen]
        constants = stack([_constants(observation, knowledge) for observation in chosen], device)
        constants[_LABELS] = torch.from_numpy(np.stack(labels)).to(device)
        observed = stack([generator_arrays(observation.reply) for observation in chosen], device)
        low, high = pixel_range(knowledge, device)
        make = _maker(generator, list(observed))
        return Batch(
            problems=Problems(
                simulate=_simulation(make, target), observed=observed, constants=constants, low=low, high=high
            ),
            labels=[None] * len(chosen),
            findings=[_findings(observation) for observation in chosen],
            other_unknowns=lambda rng: {_MIXTURE: _first_mixture(number, rng)},
            images_of=lambda unknowns: torch.func.vmap(make)(_generator_parameters(constants), unknowns, constants),
        )

    return reconstruct(observations, knowledge, replace(settings, labels=None), DEFAULTS, prepare)


def _first_mixture(number: int, rng: torch.Generator) -> Tensor:
    """Return C [P, P] with orthogonal rows of length 10: Gaussian noise vectors are nearly of that form."""
    mixture: Tensor = NOISE_DIM**0.5 * torch.linalg.qr(torch.randn(number, number, generator=rng))[0]
    return mixture


def _constants(observation: Observation, knowledge: PublicKnowledge) -> dict[str, Tensor]:
    model = {_MODEL + name: value for name, value in model_after(observation, knowledge).items()}
    generator = {GENERATOR + name: value for name, value in generator_arrays(observation.received).items()}
    directions, offset = noise_space(observation, generator_form(knowledge).pseudo_samples)
    return {**model, **generator, _DIRECTIONS: directions, _OFFSET: offset}


def _generator_parameters(constants: Tensors) -> dict[str, Tensor]:
    return {k.removeprefix(GENERATOR): v for k, v in constants.items() if k.startswith(GENERATOR)}


Make = Callable[[Tensors, Tensors, Tensors], Tensor]


def _maker(generator: nn.Module, names: Sequence[str]) -> Make:
    def make(omega: Tensors, unknowns: Tensors, constants: Tensors) -> Tensor:
        noise = unknowns[_MIXTURE] @ constants[_DIRECTIONS] + constants[_OFFSET]
        images: Tensor = functional_call(generator, dict(omega), (noise, constants[_LABELS]))
        return images

    return make


def _simulation(make: Make, target: nn.Module) -> Callable[[Tensors, Tensors], Tensors]:
    def loss(omega: dict[str, Tensor], unknowns: Tensors, constants: Tensors) -> Tensor:
        model = {k.removeprefix(_MODEL): v for k, v in constants.items() if k.startswith(_MODEL)}
        logits = functional_call(target, model, (make(omega, unknowns, constants),))
        return functional.cross_entropy(logits, constants[_LABELS])

    gradient_of = grad(loss)
    return lambda unknowns, constants: gradient_of(_generator_parameters(constants), unknowns, constants)
