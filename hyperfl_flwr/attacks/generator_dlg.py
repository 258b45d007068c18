"""What the gradient of PRIV-HFL's generator tells: of the private labels without a search, and of the pseudo-data.

A client replies the gradient of f_g = CE(theta'(x'), y), x' = G(z, y), with respect to omega, at its trained model
theta'. The generator's two first layers are linear, in z and in the one-hot y. With e_n and d_n, f_g's gradients with
respect to their outputs for pseudo-sample n, the gradients of their weights are

    N = sum_n e_n z_n^T      L = sum_n d_n onehot(y_n)^T

- Column k of L is the sum over the pseudo-samples with label k, and exactly zero where there are none. Without
  knowledge of omega's or the model's values its length says about how many there are: the d_n of a batch are of similar
  length and, within a class, of similar direction. Labels are drawn with p(y) proportional to R - n_y, R = c max n, so
  that classes with short columns, in the mean over the rounds, are those that the client has most of.
- The rows of N span the space of the z_n, so with P pseudo-samples there are P x P unknowns, z = C V with V from N's
  singular vectors, instead of 100 P. They are searched for, so that the gradient of all of omega matches (Zhu, Liu,
  Han: "Deep Leakage from Gradients", NeurIPS 2019). The server knows omega, and theta' as the sum of all changes.

The images are the pseudo-data, which private images enter by way of theta' and omega alone. No use is made of this: the
generator of the run's seed from which a client draws y and z is known to a server that wrote the seed. It can draw them
again for any histogram and compare.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from hyperfl_flwr.attacks.dual_difference import model_after
from hyperfl_flwr.attacks.inversion import Optimisation, Problems, Tensors
from hyperfl_flwr.attacks.observation import Observation, PublicKnowledge
from hyperfl_flwr.attacks.reconstruction import (
    AttackSettings,
    Batch,
    IntArray,
    Reconstruction,
    build_structure,
    pixel_range,
    reconstruct,
    stack,
    vmap_ready,
)
from hyperfl_flwr.models.generator import NOISE_DIM, Generator
from hyperfl_flwr.models.targets import Target
from hyperfl_flwr.rng import torch_generator
from hyperfl_flwr.training.distillation import PseudoData

DEFAULTS = Optimisation(iterations=400, learning_rate=0.3, total_variation=0.0)
"""Tuned on two to eight pseudo-samples of a generator of width 64 for images of 28x28, with fresh parameters."""

MOST_SEARCHED = 32
"""Pseudo-samples above which nothing is searched for: time and unknowns grow with their number and its square."""

_GENERATOR, _MODEL, _LABELS = "generator/", "model/", "labels"
_OWN_SAMPLES = 20
"""Of each class, to see how long a column one of them makes."""

_TINY = 1e-30

_DIRECTIONS, _OFFSET, _MIXTURE = "directions", "offset", "mixture"

FloatArray = NDArray[np.float64]


def generator_dlg(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Estimate each client's label counts, and rebuild the pseudo-data of the round.

    Args:
        observations: Of PRIV-HFL with distillation, with all that was seen of the same clients before.
        knowledge: The settings.
        settings: Labels are ignored, which are the private images'.

    Returns:
        For each client the P pseudo-images, none with more than `MOST_SEARCHED`, and the estimated counts.

    Raises:
        ValueError: If there is no generator's gradient.
    """
    shares = [label_shares(each, knowledge, settings.seed) for each in observations]
    counts = [
        private_counts(each, observation.num_examples, knowledge.class_balance)
        for each, observation in zip(shares, observations, strict=True)
    ]
    if knowledge.pseudo_samples > MOST_SEARCHED:
        nothing = np.zeros((0, *knowledge.input_shape), dtype=np.float32)
        results = [Reconstruction(images=nothing, findings=_findings(each)) for each in observations]
    else:
        results = _search(observations, knowledge, settings)
    return [replace(result, label_counts=each) for result, each in zip(results, counts, strict=True)]


def label_shares(observation: Observation, knowledge: PublicKnowledge, seed: int = 0) -> FloatArray:
    """Return the estimated share of each class among the pseudo-data [K], the mean over all rounds that were seen.

    A share is exactly zero where no round had a pseudo-sample of the class, unless noise was added.

    Args:
        observation: With a generator's gradient.
        knowledge: The settings.
        seed: Of the server's own pseudo-data.

    Raises:
        ValueError: If there is no generator's gradient, or it is zero in all rounds.
    """
    rounds = [*observation.earlier, observation]
    shares = [
        _shares_of_round(replace(seen, earlier=rounds[:number]), knowledge, torch_generator(seed, "labels", number))
        for number, seen in enumerate(rounds)
        if _columns(seen).any()
    ]
    if not shares:
        raise ValueError("the gradient of the generator is zero: nothing can be read off it")
    mean: FloatArray = np.mean(shares, axis=0)
    return mean


def _shares_of_round(observation: Observation, knowledge: PublicKnowledge, rng: torch.Generator) -> FloatArray:
    """Return the columns as multiples of those that pseudo-data with equally many labels give [K], summing to 1."""
    columns, own = _columns(observation), _own_columns(observation, knowledge, rng)
    shares = ((columns * own).sum(axis=0) / (np.square(own).sum(axis=0) + _TINY)).clip(min=0)
    if not shares.any():
        shares = np.linalg.norm(columns, axis=0)
    found: FloatArray = shares / shares.sum()
    return found


def _own_columns(observation: Observation, knowledge: PublicKnowledge, rng: torch.Generator) -> FloatArray:
    """Return L [size, K] of the server's own pseudo-data on the client's model and generator."""
    generator, target = _networks(knowledge)
    generator.load_state_dict(_arrays(observation.received), assign=True)
    target.load_state_dict(model_after(observation, knowledge), assign=True)
    classes = knowledge.num_classes
    labels = torch.arange(classes).repeat(_OWN_SAMPLES)
    noise = torch.randn(len(labels), NOISE_DIM, generator=rng)
    pseudo = PseudoData(generator=generator.requires_grad_(), images=generator(noise, labels), labels=labels)
    found: FloatArray = pseudo.gradients(target)[0]["label.weight"].double().numpy()
    return found


def _networks(knowledge: PublicKnowledge) -> tuple[Generator, Target]:
    generator = Generator(knowledge.input_shape, knowledge.num_classes, knowledge.generator_width)
    return vmap_ready(generator), build_structure(knowledge)


def private_counts(shares: FloatArray, num_examples: int, balance: float) -> FloatArray:
    """Return n_y [K] for which the labels of pseudo-data are drawn with given probabilities; see `label_probabilities`.

    With n samples and m = max n_y, p_y = (c m - n_y) / (K c m - n): the smallest p gives m, the others follow. Exact for
    true probabilities; of estimated ones m is cut to what is possible, and negative counts to zero.

    Args:
        shares: p [K], summing to 1.
        num_examples: n.
        balance: c.
    """
    lowest, classes = float(shares.min()), len(shares)
    rest = classes * balance * lowest - (balance - 1)
    most = num_examples * lowest / rest if rest > 0 else num_examples
    most = float(np.clip(most, num_examples / classes, num_examples))
    counts = (balance * most - shares * (classes * balance * most - num_examples)).clip(min=0)
    total: FloatArray = counts * num_examples / counts.sum()
    return total


def likely_labels(shares: FloatArray, present: NDArray[np.bool_], number: int) -> IntArray:
    """Return P labels, ascending, in proportion to estimated shares [K]; each class that is present at least once."""
    counts = present.astype(np.int64)
    for _ in range(number - int(counts.sum())):
        counts[np.where(present, shares * number - counts, -np.inf).argmax()] += 1
    return np.repeat(np.arange(len(counts)), counts)[:number]


def noise_space(observation: Observation, number: int) -> tuple[Tensor, Tensor]:
    """Return where the round's noise vectors are: each is a combination of some directions plus a common offset.

    Of N = E^T Z and the bias's gradient b = E^T 1 follows Z a = 1 with a = pinv(N) b, which fixes the part of every z_n
    along a. The rest is in the row space of N.

    Args:
        observation: With a generator's gradient.
        number: P, at most 100.

    Returns:
        Directions [P, 100], orthogonal to the offset, and the offset [100].
    """
    weight, bias = (
        torch.from_numpy(np.asarray(observation.reply[f"{_GENERATOR}noise.{part}"], dtype=np.float64))
        for part in ("weight", "bias")
    )
    left, values, right = (each[:number] for each in _decomposed(weight))
    along = (left @ bias / values) @ right
    offset = along / along.square().sum()
    directions = right - torch.outer(right @ along, offset)
    return directions.float(), offset.float()


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left.T, values, right


def _columns(observation: Observation) -> FloatArray:
    key = f"{_GENERATOR}label.weight"
    if key not in observation.reply:
        raise ValueError("there is no gradient of a generator: the clients do not distil")
    return np.asarray(observation.reply[key], dtype=np.float64)


def _findings(observation: Observation) -> dict[str, float]:
    return {
        "rounds-read": float(1 + len(observation.earlier)),
        "pseudo-labels-present": float(_columns(observation).any(axis=0).sum()),
    }


def _search(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Search for the noise behind each gradient."""
    number, device = knowledge.pseudo_samples, settings.device
    generator, target = _networks(knowledge)

    def prepare(chosen: Sequence[Observation], _: Sequence[IntArray | None]) -> Batch:
        labels = [_labels_of_round(each, knowledge, settings.seed) for each in chosen]
        constants = stack([_constants(each, knowledge) for each in chosen], device)
        constants[_LABELS] = torch.from_numpy(np.stack(labels)).to(device)
        observed = stack([_arrays(each.reply) for each in chosen], device)
        low, high = pixel_range(knowledge, device)
        make = _maker(generator, list(observed))
        return Batch(
            problems=Problems(
                simulate=_simulation(make, target), observed=observed, constants=constants, low=low, high=high
            ),
            labels=[None] * len(chosen),
            findings=[_findings(each) for each in chosen],
            other_unknowns=lambda rng: {_MIXTURE: _first_mixture(number, rng)},
            images_of=lambda unknowns: torch.func.vmap(make)(_of_generator(constants), unknowns, constants),
        )

    return reconstruct(observations, knowledge, replace(settings, labels=None), DEFAULTS, prepare)


def _labels_of_round(observation: Observation, knowledge: PublicKnowledge, seed: int) -> IntArray:
    shares = _shares_of_round(observation, knowledge, torch_generator(seed, "labels", len(observation.earlier)))
    return likely_labels(shares, _columns(observation).any(axis=0), knowledge.pseudo_samples)


def _first_mixture(number: int, rng: torch.Generator) -> Tensor:
    """Return C [P, P] with orthogonal rows of length 10: noise vectors are nearly orthogonal, and so long."""
    return NOISE_DIM**0.5 * torch.linalg.qr(torch.randn(number, number, generator=rng)).Q


def _constants(observation: Observation, knowledge: PublicKnowledge) -> dict[str, Tensor]:
    model = {_MODEL + name: value for name, value in model_after(observation, knowledge).items()}
    generator = {_GENERATOR + name: value for name, value in _arrays(observation.received).items()}
    directions, offset = noise_space(observation, knowledge.pseudo_samples)
    return {**model, **generator, _DIRECTIONS: directions, _OFFSET: offset}


def _arrays(arrays: "Tensors | dict[str, NDArray[np.float32]]") -> dict[str, Tensor]:
    return {k.removeprefix(_GENERATOR): torch.as_tensor(v) for k, v in arrays.items() if k.startswith(_GENERATOR)}


def _of_generator(constants: Tensors) -> dict[str, Tensor]:
    return {k.removeprefix(_GENERATOR): v for k, v in constants.items() if k.startswith(_GENERATOR)}


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
    return lambda unknowns, constants: gradient_of(_of_generator(constants), unknowns, constants)
