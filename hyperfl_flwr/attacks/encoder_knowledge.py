"""How IT-PFL-HN's clients train the encoder: the server knows, since it wrote the settings."""

import math
from dataclasses import dataclass

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.models.encoder import Pooling


@dataclass(frozen=True, kw_only=True)
class EncoderKnowledge:
    """Settings of the encoder's local training.

    Attributes:
        pooling: Of the encoder.
        learning_rate: Step size.
        local_epochs: Passes over the client's samples.
        steps: If positive, the number of steps instead.
        batch_size: Samples per step.
    """

    pooling: Pooling
    learning_rate: float
    local_epochs: int
    steps: int
    batch_size: int

    @classmethod
    def of(cls, config: RunConfig) -> "EncoderKnowledge | None":
        """Take the settings of a run; None for other methods than IT-PFL-HN."""
        method = config.it_pfl
        if config.method != "it-pfl":
            return None
        return cls(
            pooling=method.pooling,
            learning_rate=method.encoder_learning_rate,
            local_epochs=config.local_epochs,
            steps=method.encoder_steps or config.pfedhn.local_steps,
            batch_size=method.encoder_batch_size,
        )

    def num_steps(self, num_examples: int) -> int:
        """Return how many steps a client with so many samples takes."""
        return self.steps or self.local_epochs * math.ceil(num_examples / self.batch_size)
