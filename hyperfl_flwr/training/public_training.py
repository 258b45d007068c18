"""What follows from a run's settings about its clients' local training: the steps, and the networks beside the target.

A client trains by it, and whoever has the settings knows it: the server that wrote them, and an attack on what a client
sends.
"""

import math
from dataclasses import dataclass

from hyperfl_flwr.core.setting_types import Initialisation, Pooling
from hyperfl_flwr.training.dual_averaging import DualRule
from hyperfl_flwr.training.local_sgd import Epochs


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Epochs):
    """The steps of SGD on what a client shares.

    Attributes:
        learning_rate: Step size, above 0.
        clip_norm: Largest gradient norm; 0 does not clip.
        pull: If positive, `pull` times (parameter - received parameter) is added to the clipped gradient.
    """

    learning_rate: float
    clip_norm: float = 0.0
    pull: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: If a number is out of range.
        """
        if not (self.learning_rate > 0 and self.batch_size > 0 and (self.epochs > 0 or self.steps > 0)):
            raise ValueError("learning_rate, batch_size and the number of local epochs or steps must be positive")

    def number(self, num_examples: int) -> int:
        """Return how many steps a client with so many samples takes."""
        return self.steps or self.epochs * math.ceil(num_examples / self.batch_size)


@dataclass(frozen=True, kw_only=True)
class HypernetworkForm:
    """A hypernetwork that makes the feature extractor of a client's embedding (`hyperfl_flwr.models.hypernetwork`).

    Attributes:
        embedding_dim: Length of the embedding.
        hidden_width: Width of the hidden layer.
        initialisation: How it was drawn.
        embedding_frozen: Whether embedding and first layer are constants.
    """

    embedding_dim: int
    hidden_width: int
    initialisation: Initialisation
    embedding_frozen: bool = False


@dataclass(frozen=True, kw_only=True)
class EncoderForm:
    """An encoder that makes a descriptor of a client's samples (`hyperfl_flwr.models.encoder`).

    Attributes:
        pooling: How its vectors of samples become one.
        steps: The steps that train it.
    """

    pooling: Pooling
    steps: LocalSteps


@dataclass(frozen=True, kw_only=True)
class GeneratorForm:
    """A generator that makes samples (`hyperfl_flwr.models.generator`).

    Attributes:
        width: Number of its maps.
        pseudo_samples: Number P of pseudo-data that a client makes in a round.
        class_balance: c, by which a client draws their labels.
    """

    width: int
    pseudo_samples: int
    class_balance: float


@dataclass(frozen=True, kw_only=True)
class DualForm:
    """Dual variables that draw the clients' models together (`hyperfl_flwr.training.dual_averaging`).

    Attributes:
        rule: How the multipliers move.
        mixed: Whether what travels is rotated by a secret that the server does not have.
    """

    rule: DualRule
    mixed: bool = False


@dataclass(frozen=True, kw_only=True)
class PublicTraining:
    """A method's local training.

    Attributes:
        steps: On the target network, or on the hypernetwork that makes it.
        hypernetwork: None where clients train none; likewise the others.
        encoder: See `EncoderForm`.
        generator: See `GeneratorForm`.
        dual: See `DualForm`.
    """

    steps: LocalSteps
    hypernetwork: HypernetworkForm | None = None
    encoder: EncoderForm | None = None
    generator: GeneratorForm | None = None
    dual: DualForm | None = None
