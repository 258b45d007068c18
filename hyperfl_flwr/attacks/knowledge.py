"""What an honest-but-curious server knows of a run without any message: architecture, normalisation, hyper-parameters.

An attack gets an `Observation` (`hyperfl_flwr.runs.observation`) and a `PublicKnowledge` and nothing else: no private
group, no image, no label.
"""

import math
from dataclasses import dataclass

from hyperfl_flwr.core.setting_types import Pooling
from hyperfl_flwr.models.layers.dropout import has_dropout
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.dual_averaging import DualRule

GENERATED = ("pfedhn", "pfedhn-pc", "it-pfl")
"""Methods whose server generates the clients' models and gets the change of them (before minus after)."""


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

    def num_steps(self, num_examples: int) -> int:
        """Return how many steps a client with so many samples takes."""
        return self.steps or self.local_epochs * math.ceil(num_examples / self.batch_size)


@dataclass(frozen=True, kw_only=True)
class PublicKnowledge:
    """Architecture, normalisation and hyper-parameters of a run: the server wrote them, or reads them in the code.

    Attributes:
        method: Name of the method, for example `hyperfl`.
        target: Name of the target network, see `hyperfl_flwr.models.targets.TARGETS`.
        input_shape: (channels, height, width); the attacks search for images.
        num_classes: K.
        mean: Per channel, subtracted from pixels in [0, 1].
        std: Per channel, divided by.
        augmented: Whether clients train on randomly cropped and flipped images; an attack then finds those.
        local_epochs: Passes E over the client's data.
        local_steps: If positive, the number of steps instead (`GENERATED`, PRIV-HFL).
        batch_size: Samples per step.
        learning_rate: Step size of what is shared.
        momentum: Of SGD, with buffers that start empty.
        weight_decay: L2 coefficient.
        clip_norm: Largest gradient norm of what is shared; 0 does not clip.
        embedding_dim: Of HyperFL's embedding; 0 without.
        hidden_width: Of HyperFL's hypernetwork; 0 without.
        embedding_frozen: Whether HyperFL's embedding and first layer are constants.
        initialisation: How HyperFL's hypernetwork was drawn, see `hyperfl_flwr.models.hypernetwork.Initialisation`.
        summed_clients: Number N of clients whose mean a reply is, see `mean_observation`; 1 is a client's own upload.
        seed: Of the run; what all clients start from follows from it.
        dual: How PRIV-HFL's multipliers move; None for other methods.
        pseudo_samples: Number P of pseudo-data that PRIV-HFL's client makes; 0 without distillation.
        generator_width: Of its generator; 0 without distillation.
        class_balance: c, by which it draws their labels; 0 without distillation.
        encoder: How IT-PFL-HN's encoder is trained; None for other methods.
    """

    method: str
    target: str
    input_shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    local_epochs: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    local_steps: int = 0
    augmented: bool = False
    embedding_dim: int = 0
    hidden_width: int = 0
    embedding_frozen: bool = False
    initialisation: str = ""
    summed_clients: int = 1
    seed: int = 0
    dual: DualRule | None = None
    pseudo_samples: int = 0
    generator_width: int = 0
    class_balance: float = 0.0
    encoder: EncoderKnowledge | None = None

    def __post_init__(self) -> None:
        """Check lengths and ranges.

        Raises:
            ValueError: If the data are no images, the target network has dropout or no bias in its classifier, mean or
                std do not have one number per channel, or a number is out of range.
        """
        if len(self.input_shape) != 3:
            raise ValueError(f"the attacks search for images, the data are vectors of the shape {self.input_shape}")
        target = build_target(self.target, self.input_shape, self.num_classes)
        if has_dropout(target):
            raise ValueError(f"the attacks cannot repeat local steps with dropout, which the {self.target} target has")
        if target.classifier.bias is None:
            raise ValueError(f"the attacks read labels off the classifier's bias, which the {self.target} target lacks")
        if not len(self.mean) == len(self.std) == self.input_shape[0]:
            raise ValueError(f"mean and std need {self.input_shape[0]} numbers, got {self.mean} and {self.std}")
        if not (self.learning_rate > 0 and self.batch_size > 0 and (self.local_epochs > 0 or self.local_steps > 0)):
            raise ValueError("learning_rate, batch_size and the number of local epochs or steps must be positive")

    def num_steps(self, num_examples: int) -> int:
        """Return how many steps a client takes on what is shared, for a reply that has so many samples behind it."""
        own = math.ceil(num_examples / self.summed_clients)
        return self.local_steps or self.local_epochs * math.ceil(own / self.batch_size)
