"""Change the training data of malicious clients: flipped labels, and the trigger of a backdoor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hyperfl_flwr.data.client_data import ClientData


def with_flipped_labels(data: ClientData) -> ClientData:
    """Return a client's data with the training label K - 1 - c in the place of class c.

    The mapping is that of Fang, Cao, Jia, Gong: "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning",
    USENIX Security 2020 (label flipping attack).

    Args:
        data: The client's data, with classes as labels.
    """
    return replace(data, train_labels=data.num_classes - 1 - data.train_labels)


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """A white square in the lower right corner of images, which a backdoored network takes for one class.

    The pattern is that of Gu, Liu, Dolan-Gavitt, Garg: "BadNets: Evaluating Backdooring Attacks on Deep Neural
    Networks", IEEE Access 7, 2019.

    Attributes:
        target_class: The class.
        size: Side of the square in pixels.
        white: Value of white after normalisation, per channel.
    """

    target_class: int
    size: int
    white: Sequence[float]

    @classmethod
    def of(cls, target_class: int, size: int, mean: Sequence[float], std: Sequence[float]) -> "Trigger":
        """Return the trigger of normalised images; mean and deviation are those of each channel, scaled to [0, 1]."""
        white = tuple((1 - center) / scale for center, scale in zip(mean, std, strict=True))
        return cls(target_class=target_class, size=size, white=white)

    def stamped(self, images: Tensor) -> Tensor:
        """Return images [n, C, H, W] with the square, as a new tensor."""
        found = images.clone()
        for channel, value in enumerate(self.white):
            found[:, channel, -self.size :, -self.size :] = value
        return found

    def poisoned(self, data: ClientData, share: float, rng: np.random.Generator) -> ClientData:
        """Return a client's data in which a share of the training samples have the trigger and the target class.

        Args:
            data: The client's data, images with classes as labels.
            share: Share of the samples; their number is rounded, and at least 1.
            rng: Source of the choice.
        """
        total = len(data.train_labels)
        chosen = rng.choice(total, max(1, round(share * total)), replace=False)
        positions = torch.from_numpy(np.sort(chosen)).to(data.train_labels.device)
        images, labels = data.train_images.clone(), data.train_labels.clone()
        images[positions] = self.stamped(images[positions])
        labels[positions] = self.target_class
        return replace(data, train_images=images, train_labels=labels)

    def test_samples(self, data: ClientData) -> tuple[Tensor, Tensor]:
        """Return the test images of other classes with the trigger [m, C, H, W], and the target class for each [m].

        The share of them that a network takes for the target class is the success of the backdoor.
        """
        images = self.stamped(data.test_images[data.test_labels != self.target_class])
        return images, torch.full((len(images),), self.target_class, device=images.device)
