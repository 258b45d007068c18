"""Estimate label counts from the gradient of PRIV-HFL's generator, in closed form.

f_g = CE(theta'(x'), y), x' = G(z, y). The generator's layer on the one-hot y is linear; with d_n the gradient of f_g
with respect to its output for pseudo-sample n, the gradient of its weight is L = sum_n d_n onehot(y_n)^T. Column k of L
is the sum over the pseudo-samples with label k, and exactly zero if there are none. Their number follows from the
mean contribution of one: the server makes pseudo-data of all classes itself, since it knows omega, and theta' as the
sum of all changes. (The columns' lengths alone give it with fresh parameters only.) Labels are drawn with p(y)
proportional to R - n_y, R = c max n, so the mean over the rounds gives the private counts n_y.

The attack does not use the run's seed, from which clients draw y and z. The server wrote it, and could draw them again
for any histogram and compare. If changes are rotated (`priv-hfl.mixing`), theta' is wrong, and only exactly zero
columns are meaningful.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.attacks.base import IntArray, build_structure, vmap_ready
from hyperfl_flwr.attacks.dual_difference import model_after
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.nothing_to_read import NothingToReadError
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.generator import NOISE_DIM, Generator
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.runs.observation import Arrays, Observation
from hyperfl_flwr.training.distillation import PseudoData
from hyperfl_flwr.training.public_training import GeneratorForm

GENERATOR = "generator/"

_OWN_SAMPLES = 20
"""Attacker-drawn pseudo-samples per class, to estimate the column that one sample causes."""

_TINY = 1e-30

FloatArray = NDArray[np.float64]


def label_shares(observation: Observation, knowledge: PublicKnowledge, seed: int = 0) -> FloatArray:
    """Return the estimated share of each class among the pseudo-data [K], averaged over all observed rounds.

    A share is exactly zero if no round had a pseudo-sample of the class, unless noise was added.

    Args:
        observation: Observation with a generator's gradient.
        knowledge: Public knowledge of the run.
        seed: Seed of the attacker's pseudo-data.

    Raises:
        NothingToReadError: If the gradient of the generator is zero in all rounds.
        ValueError: If the observation has no gradient of a generator.
    """
    rounds = [*observation.earlier, observation]
    shares = [
        _shares_of_round(replace(seen, earlier=rounds[:number]), knowledge, torch_generator(seed, "labels", number))
        for number, seen in enumerate(rounds)
        if columns(seen).any()
    ]
    if not shares:
        reason = "the gradient of the generator is zero in all rounds, so it gives no label counts"
        raise NothingToReadError(reason, observation.client)
    mean: FloatArray = np.mean(shares, axis=0)
    return mean


def _shares_of_round(observation: Observation, knowledge: PublicKnowledge, rng: torch.Generator) -> FloatArray:
    """Return the class shares [K], summing to 1: observed columns relative to those of class-balanced pseudo-data."""
    seen, own = columns(observation), _own_columns(observation, knowledge, rng)
    shares = ((seen * own).sum(axis=0) / (np.square(own).sum(axis=0) + _TINY)).clip(min=0)
    if not shares.any():  # no observed column points along the simulated one: fall back to the lengths
        shares = np.linalg.norm(seen, axis=0)
    found: FloatArray = shares / shares.sum()
    return found


def _own_columns(observation: Observation, knowledge: PublicKnowledge, rng: torch.Generator) -> FloatArray:
    """Return L [size, K] for pseudo-data that the attacker makes with the client's model and generator."""
    generator, target = networks(knowledge)
    generator.load_state_dict(generator_arrays(observation.received), assign=True)
    target.load_state_dict(model_after(observation, knowledge), assign=True)
    classes = knowledge.num_classes
    labels = torch.arange(classes).repeat(_OWN_SAMPLES)
    noise = torch.randn(len(labels), NOISE_DIM, generator=rng)
    pseudo = PseudoData(generator=generator.requires_grad_(), images=generator(noise, labels), labels=labels)
    found: FloatArray = pseudo.gradients(target)[0]["label.weight"].double().numpy()
    return found


def generator_form(knowledge: PublicKnowledge) -> GeneratorForm:
    """Return the public settings of the clients' generator.

    Raises:
        ValueError: If the clients train no generator.
    """
    if knowledge.training.generator is None:
        raise ValueError("the clients train no generator; this attack needs priv-hfl.distill")
    return knowledge.training.generator


def networks(knowledge: PublicKnowledge) -> tuple[Generator, Target]:
    """Return generator and target without values, for use under `torch.func.vmap`."""
    generator = Generator(knowledge.input_shape, knowledge.num_classes, generator_form(knowledge).width)
    return vmap_ready(generator), build_structure(knowledge)


def private_counts(shares: FloatArray, num_examples: int, balance: float) -> FloatArray:
    """Return the counts n_y [K] that give the label probabilities p; the inverse of `label_probabilities`.

    With n samples and m = max n_y, p_y = (c m - n_y) / (K c m - n): the smallest p gives m, the others follow. Exact
    for true probabilities; for estimated ones m is clipped to its possible range, and negative counts to zero.

    Args:
        shares: Label probabilities p [K], summing to 1.
        num_examples: Number n of the client's training samples.
        balance: Balance factor c, at least 1.
    """
    lowest, classes = float(shares.min()), len(shares)
    rest = classes * balance * lowest - (balance - 1)
    most = num_examples * lowest / rest if rest > 0 else num_examples
    most = float(np.clip(most, num_examples / classes, num_examples))
    counts = (balance * most - shares * (classes * balance * most - num_examples)).clip(min=0)
    total: FloatArray = counts * num_examples / counts.sum()
    return total


def likely_labels(shares: FloatArray, present: NDArray[np.bool_], number: int) -> IntArray:
    """Return P labels, ascending, in proportion to estimated shares [K]; each present class at least once."""
    counts = present.astype(np.int64)
    for _ in range(number - int(counts.sum())):
        counts[np.where(present, shares * number - counts, -np.inf).argmax()] += 1
    return np.repeat(np.arange(len(counts)), counts)[:number]


def labels_of_round(observation: Observation, knowledge: PublicKnowledge, seed: int = 0) -> IntArray:
    """Return the likely labels [P] of one round's pseudo-data, ascending.

    Raises:
        NothingToReadError: If the gradient of the generator is zero in this round.
    """
    if not columns(observation).any():
        reason = "the gradient of the generator is zero in this round, so it gives no pseudo-data"
        raise NothingToReadError(reason, observation.client)
    shares = _shares_of_round(observation, knowledge, torch_generator(seed, "labels", len(observation.earlier)))
    present = (columns(observation) != 0).any(axis=0)
    return likely_labels(shares, np.asarray(present), generator_form(knowledge).pseudo_samples)


def columns(observation: Observation) -> FloatArray:
    """Return the gradient L [size, K] of the label layer's weight.

    Raises:
        ValueError: If the reply has no gradient of a generator.
    """
    key = f"{GENERATOR}label.weight"
    if key not in observation.reply:
        raise ValueError("the reply has no gradient of a generator: the clients do not distil (priv-hfl.distill)")
    return np.asarray(observation.reply[key], dtype=np.float64)


def generator_arrays(arrays: Arrays) -> dict[str, Tensor]:
    """Return the generator's arrays of one direction, by parameter name."""
    return {k.removeprefix(GENERATOR): torch.from_numpy(v) for k, v in arrays.items() if k.startswith(GENERATOR)}
