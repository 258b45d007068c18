"""Describe what one upload releases about a client's data: the mechanism, its noise, and who adds it."""

import math
from dataclasses import dataclass
from typing import Literal

from hyperfl_flwr.privacy.accounting import Mechanism

Unit = Literal["record", "client"]

RandomisedResponse = Literal["randomised-response"]
"""Each number that is sent is randomised for itself, without noise on it."""

RANDOMISED: RandomisedResponse = "randomised-response"

Neighbours = Literal["add-or-remove-one", "replace-one"]

BoundedBy = Literal["client", "nodes", "server"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """What one upload releases about a client's data.

    Attributes:
        unit: What is protected: one record, or all that the client contributes.
        mechanism: `sampled-gaussian` for noisy steps on Poisson batches, `gaussian` or `discrete-gaussian` for noise
            on a vector or a sum, `randomised-response` for numbers that are randomised one by one.
        noise_multiplier: Standard deviation of the noise in units of the sensitivity; 0 without noise.
        sample_rate: Probability with which a record is in a batch.
        steps: Number of steps, or of randomised numbers.
        epsilon: Epsilon of each step, without a delta; of randomised response alone, otherwise 0.
        neighbours: Which data sets are neighbours; `replace-one` if their size is the same, and public.
        bounded_by: Who adds the noise that the bound needs: the `client` itself, the honest `nodes` of a secure sum,
            or the `server`, which must then be trusted.

    Raises:
        ValueError: If a number is outside its range.
    """

    unit: Unit
    mechanism: Mechanism | RandomisedResponse
    noise_multiplier: float
    sample_rate: float = 1.0
    steps: int = 1
    epsilon: float = 0.0
    neighbours: Neighbours = "add-or-remove-one"
    bounded_by: BoundedBy = "client"

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf or not 0 < self.sample_rate <= 1 or self.steps < 1:
            raise ValueError(
                f"a release needs a finite noise multiplier of at least 0, a sample rate in (0, 1] and at least one "
                f"step, got {self.noise_multiplier}, {self.sample_rate} and {self.steps}"
            )
        randomised = self.mechanism == RANDOMISED
        if not 0 <= self.epsilon < math.inf or (randomised != (self.epsilon > 0)):
            raise ValueError(
                f"a release needs a finite epsilon above 0 with randomised-response, and 0 with other mechanisms, got "
                f"{self.epsilon} with {self.mechanism}"
            )

    @property
    def is_bounded(self) -> bool:
        """Whether anything is random in it."""
        return bool(self.noise_multiplier or self.epsilon)
