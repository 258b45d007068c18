"""Measure a lower bound on epsilon by a membership game on a mechanism of this project.

Steinke, Nasr, Jagielski: "Privacy Auditing with One (1) Training Run", NeurIPS 2023. Each of m canaries takes part with
probability 1/2, independently. After one training, the auditor guesses for r of the canaries whether they took part,
and abstains from the rest. If training is (epsilon, delta)-private, at least v guesses are correct with probability at
most (theorem 5.2)

    f(v) + 2 m delta max_{i = 1..m} (f(v - i) - f(v)) / i,    f(v) = P[Binomial(r, e^epsilon / (1 + e^epsilon)) >= v].

The largest epsilon for which this is below 1 - confidence is refuted by v correct guesses. Neither the noise nor the
accountant enters the bound: if it exceeds the stated epsilon, one of the two is wrong.

Canaries are records in `hyperfl_flwr.audit.membership.record_game` and clients in
`hyperfl_flwr.audit.membership.client_game`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import ConfigError

GUESSED = 0.2
"""Share of the canaries for which the auditor guesses: half of them those with the largest scores, half the smallest.

It is chosen in advance, so that the bound holds. On 2000 canaries and epsilon 4, shares of 0.05 to 0.2 give bounds
within 0.2 of each other."""

BROKEN = 10.0
"""The noise of a deliberately broken mechanism is divided by it."""


@dataclass(frozen=True, kw_only=True)
class Game(ABC):
    """A membership game.

    Attributes:
        canaries: Number m of canaries.
        noise_multiplier: Noise multiplier that the stated epsilon belongs to.
        broken: Whether the mechanism takes a tenth of this noise.
    """

    canaries: int
    noise_multiplier: float
    broken: bool = False
    unit: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a number is out of range.
        """
        if self.canaries < 10:
            raise ConfigError(f"a membership game needs at least 10 canaries, got {self.canaries}")

    @property
    @abstractmethod
    def length(self) -> dict[str, int]:
        """Number of releases, by their name in the plural."""

    @property
    def noise(self) -> float:
        """The noise multiplier that the mechanism takes."""
        return self.noise_multiplier / (BROKEN if self.broken else 1)

    @abstractmethod
    def scores(self, takes_part: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the score [m] of each canary after a training with those that take part [m]; large for these."""

    def play(self) -> "Guesses":
        """Draw the canaries that take part, train once, and guess."""
        rng = np.random.default_rng()  # seeded by the operating system, as the noise is
        takes_part = rng.random(self.canaries) < 0.5
        made = 2 * max(1, round(self.canaries * GUESSED / 2))
        order = np.argsort(self.scores(takes_part))
        correct = np.count_nonzero(takes_part[order[-made // 2 :]]) + np.count_nonzero(~takes_part[order[: made // 2]])
        return Guesses(canaries=self.canaries, made=made, correct=int(correct))


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
