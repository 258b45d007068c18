"""Parameters of the clients' local training that follow from a run's settings: steps, and networks besides the target.

A client trains with these parameters. They are public: everyone with the settings knows them, such as the server, and
an attack on a client's uploads.
"""

from dataclasses import dataclass

from hyperfl_flwr.core.setting_types import Initialisation, Pooling
from hyperfl_flwr.training.dual_averaging import DualRule
from hyperfl_flwr.training.local_sgd import Epochs


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Epochs):
    """Steps of SGD on the parameters that a client shares.

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


@dataclass(frozen=True, kw_only=True)
class HypernetworkForm:
    """A hypernetwork that generates the feature extractor from a client's embedding.

    See `hyperfl_flwr.models.hypernetwork`.

    Attributes:
        embedding_dim: Length of the embedding.
        hidden_width: Width of the hidden layer.
        initialisation: Initialisation of the hypernetwork, see `Initialisation`.
        embedding_frozen: Whether embedding and first layer are constants.
    """

    embedding_dim: int
    hidden_width: int
    initialisation: Initialisation
    embedding_frozen: bool = False


@dataclass(frozen=True, kw_only=True)
class EncoderForm:
    """An encoder that computes a descriptor of a client's samples (`hyperfl_flwr.models.encoder`).

    Attributes:
        pooling: Pooling of the sample vectors, see `Pooling`.
        steps: Steps of the encoder's training.
    """

    pooling: Pooling
    steps: LocalSteps


@dataclass(frozen=True, kw_only=True)
class GeneratorForm:
    """A generator of samples (`hyperfl_flwr.models.generator`).

    Attributes:
        width: Number of feature maps.
        pseudo_samples: Number P of pseudo-samples that a client generates in a round.
        class_balance: Factor c in the distribution of their labels, see
            `hyperfl_flwr.training.distillation.label_probabilities`.
    """

    width: int
    pseudo_samples: int
    class_balance: float


@dataclass(frozen=True, kw_only=True)
class DualForm:
    """Dual variables that enforce consensus of the clients' models (`hyperfl_flwr.training.dual_averaging`).

    Attributes:
        rule: Update rule of the multipliers.
        mixed: Whether the exchanged vectors are rotated by a secret that the server does not know.
    """

    rule: DualRule
    mixed: bool = False


@dataclass(frozen=True, kw_only=True)
class PublicTraining:
    """A method's local training.

    Attributes:
        steps: Steps on the target network, or on the hypernetwork that generates it.
        hypernetwork: Hypernetwork that the clients train; None if there is none.
        encoder: Encoder that the clients train; None if there is none.
        generator: Generator that the clients' gradients train; None if there is none.
        dual: Dual variables of the clients; None if there are none.
    """

    steps: LocalSteps
    hypernetwork: HypernetworkForm | None = None
    encoder: EncoderForm | None = None
    generator: GeneratorForm | None = None
    dual: DualForm | None = None
