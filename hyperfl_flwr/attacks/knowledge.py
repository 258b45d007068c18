"""Knowledge of a curious server about a run: architecture, normalisation and hyper-parameters.

An attack gets `Observation`s (`hyperfl_flwr.runs.observation`) and a `PublicKnowledge` and nothing else: no private
group, no image, no label.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.method import Form
from hyperfl_flwr.models.layers.dropout import has_dropout
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.public_training import LocalSteps, PublicTraining


@dataclass(frozen=True, kw_only=True, eq=False)
class PublicImages:
    """Images of the clients' kind that anyone can get, for a malicious server.

    Attributes:
        images: float32 [m, C, H, W], pixels in [0, 1].
        labels: int64 [m], their classes.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def of_class(self, number: int) -> NDArray[np.float32]:
        """Return the images of a class."""
        found: NDArray[np.float32] = self.images[self.labels == number]
        return found


@dataclass(frozen=True, kw_only=True)
class TrainingKnowledge:
    """What it takes to read parameters and gradients off a reply, of any samples and any target network.

    Attributes:
        target: Name of the target network, see `hyperfl_flwr.models.names.TARGETS`.
        input_shape: Shape of a sample: (channels, height, width) of an image, or (D,) of a feature vector.
        num_classes: Number K of classes.
        training: Public settings of the clients' local training.
        form: Form in which the target network, or the hypernetwork that generates it, is sent.
        summed_clients: Number N of clients in the mean that a reply is, see `mean_observation`; 1 for a single upload.
    """

    target: str
    input_shape: tuple[int, ...]
    num_classes: int
    training: PublicTraining
    form: Form = "values"
    summed_clients: int = 1

    @property
    def steps(self) -> LocalSteps:
        """Local steps on the shared parameters."""
        return self.training.steps

    def num_steps(self, num_examples: int) -> int:
        """Return a client's number of steps on the shared parameters, for a reply about `num_examples` samples."""
        return self.steps.num_steps(math.ceil(num_examples / self.summed_clients))


@dataclass(frozen=True, kw_only=True)
class PublicKnowledge(TrainingKnowledge):
    """Architecture, normalisation and hyper-parameters of a run, which the server sets or reads in the code.

    It is for the attacks that search for images, and for those that read labels off the classifier's bias.

    Attributes:
        mean: Mean of each channel, subtracted from pixels in [0, 1].
        std: Standard deviation of each channel, the divisor.
        private_classifier: Whether clients keep the classifier, so that no server sends it.
        unknown_scale: Whether uploads or single samples' gradients are clipped, so that a reply is the change that the
            attacks simulate times an unknown factor.
        seed: Seed of the run; the initial parameters of all clients follow from it.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    private_classifier: bool = False
    unknown_scale: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check lengths and ranges.

        Raises:
            ValueError: If the data are not images, the target network has dropout or a classifier without bias, or mean
                or std do not have one number per channel.
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

    def with_steps(self, steps: LocalSteps) -> "PublicKnowledge":
        """Return a copy with other local steps."""
        return replace(self, training=replace(self.training, steps=steps))
