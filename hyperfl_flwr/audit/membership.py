"""Measure a lower bound on epsilon by a membership game on the noisy steps of local training.

The game checks the noisy steps and their accounting alone: not how data are read and normalised, what else a client
sends (metrics, numbers of samples), the rounds of a run and what is repeated in them, nor private classifiers.

Steinke, Nasr, Jagielski: "Privacy Auditing with One (1) Training Run", NeurIPS 2023. Each of m canaries takes part with
probability 1/2, independently. After one training, the auditor guesses for r of the canaries whether they took part,
and abstains from the rest. If training is (epsilon, delta)-private, at least v guesses are correct with probability at
most (theorem 5.2)

    f(v) + 2 m delta max_{i = 1..m} (f(v - i) - f(v)) / i,    f(v) = P[Binomial(r, e^epsilon / (1 + e^epsilon)) >= v].

The largest epsilon for which this is below 1 - confidence is refuted by v correct guesses. Neither the noise nor the
accountant enters the bound: if it exceeds the stated epsilon, one of the two is wrong.

The game is played on `train_private_epochs`, the function that clients train with. Canary i is a sample of which only
feature i is not zero; a canary that does not take part is a sample of zeros, so that the number of samples stays the
same. The network is one linear layer without biases: the gradients of the canaries are orthogonal, those of zeros are
zero, and all others are longer than the clipping norm. What the auditor sees is the change of the parameters, which is
the sum of all noisy gradients; the score of a canary is its component in the direction of the canary's gradient.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet
from hyperfl_flwr.training.private_sgd import StepNoise, sample_rate, train_private_epochs

GUESSED = 0.2
"""Share of the canaries for which the auditor guesses: half of them those with the largest scores, half the smallest.

It is chosen in advance, so that the bound holds. On 2000 canaries and epsilon 4, shares of 0.05 to 0.2 give bounds
within 0.2 of each other."""

BROKEN = 10.0
"""The noise of a deliberately broken mechanism is divided by it."""

_LENGTH = 4.0
"""Length of a canary. With two classes and parameters near 0 its gradient has the length 4 / sqrt(2), above 1."""

_MOVEMENT = 1e-3
"""About the largest change of a parameter: the predictions, and so the gradients, stay as at the beginning."""


@dataclass(frozen=True, kw_only=True)
class Game:
    """Settings of a membership game on noisy steps.

    Attributes:
        canaries: Number m of canaries, and of samples.
        batch_size: Expected size of a batch.
        steps: Number of steps.
        noise_multiplier: Noise multiplier of the steps, which the stated epsilon belongs to.
        broken: Whether the steps take a tenth of this noise.
    """

    canaries: int
    batch_size: int
    steps: int
    noise_multiplier: float
    broken: bool = False

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a number is out of range.
        """
        if self.canaries < 10 or self.batch_size < 1 or self.steps < 1:
            raise ConfigError(
                f"a membership game needs at least 10 canaries, a batch of at least 1 and at least 1 step, got "
                f"{self.canaries}, {self.batch_size} and {self.steps}"
            )


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Result of a game.

    Attributes:
        canaries: Number m of canaries.
        made: Number r of guesses.
        correct: Number v of correct ones.
    """

    canaries: int
    made: int
    correct: int


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """The samples of a game, as training data."""

    train_images: Tensor
    train_labels: Tensor
    augmentation: None = None


def play(game: Game) -> Guesses:
    """Play a game: draw the canaries that take part, train once, and guess."""
    rng = np.random.default_rng()  # seeded by the operating system, as the noise is
    takes_part = rng.random(game.canaries) < 0.5
    scores = _scores(game, takes_part)
    made = 2 * max(1, round(game.canaries * GUESSED / 2))
    order = np.argsort(scores)
    correct = np.count_nonzero(takes_part[order[-made // 2 :]]) + np.count_nonzero(~takes_part[order[: made // 2]])
    return Guesses(canaries=game.canaries, made=made, correct=int(correct))


def _scores(game: Game, takes_part: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the score [m] of each canary after training with those that take part."""
    noise = game.noise_multiplier / (BROKEN if game.broken else 1)
    samples = _Samples(
        train_images=torch.diag(_LENGTH * torch.from_numpy(takes_part).float()),
        train_labels=torch.zeros(game.canaries, dtype=torch.int64),
    )
    network = nn.Linear(game.canaries, 2, bias=False)
    nn.init.zeros_(network.weight)
    rate = sample_rate(game.canaries, game.batch_size)
    # The sum of T noisy gradients reaches about q T + 4 sigma sqrt(T), in units of the clipping norm 1.
    learning_rate = _MOVEMENT * game.batch_size / (rate * game.steps + 4 * noise * math.sqrt(game.steps))
    train_private_epochs(
        network,
        [ParameterSet(parameters=list(network.parameters()), learning_rate=learning_rate)],
        samples,
        Epochs(epochs=0, batch_size=game.batch_size, steps=game.steps),
        StepNoise(clip_norm=1.0, noise_multiplier=noise),
    )
    # The clipped gradient of a canary of class 0 is (-1, 1) / sqrt(2) in its two weights; steps go the other way.
    change: NDArray[np.float64] = network.weight.detach().double().numpy()
    scores: NDArray[np.float64] = (change[0] - change[1]) * game.batch_size / (math.sqrt(2) * learning_rate)
    return scores


def lower_bound(guesses: Guesses, delta: float, confidence: float) -> float:
    """Return the largest epsilon that a game refutes.

    Args:
        guesses: Result of the game.
        delta: Delta of the differential privacy, in [0, 1).
        confidence: Probability with which the bound holds, in (0, 1).

    Returns:
        A lower bound on epsilon; 0 if no epsilon is refuted.

    Raises:
        ValueError: If an argument is outside its range.
    """
    if not 0 <= delta < 1 or not 0 < confidence < 1:
        raise ValueError(f"delta must be in [0, 1) and confidence in (0, 1), got {delta} and {confidence}")
    if not 0 <= guesses.correct <= guesses.made <= guesses.canaries:
        raise ValueError(f"correct guesses, guesses and canaries must not fall in this order, got {guesses}")
    low, high = 0.0, 1.0
    if chance(guesses, low, delta) >= 1 - confidence:
        return 0.0
    while chance(guesses, high, delta) < 1 - confidence:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        if chance(guesses, middle, delta) < 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def chance(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return the largest probability of so many correct guesses on an (epsilon, delta)-private training."""
    from scipy.special import bdtr, bdtrc

    made, correct = guesses.made, guesses.correct
    if correct == 0:
        return 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    exact = float(bdtrc(correct - 1, made, accuracy))
    fewer = np.arange(1, correct + 1)
    # P[v > W >= v - i] for each i; the binomial distribution function is 0 below 0.
    below = np.where(fewer < correct, bdtr(np.maximum(correct - 1 - fewer, 0), made, accuracy), 0.0)
    between = float(bdtr(correct - 1, made, accuracy)) - below
    return min(1.0, exact + 2 * guesses.canaries * delta * float((between / fewer).max()))
