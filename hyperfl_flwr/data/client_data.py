"""The samples of one client, as tensors on a device."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hyperfl_flwr.core.device import send
from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.augmentation import Augmentation


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientData:
    """Samples of one client, ready for a model.

    Attributes:
        train_images: Training samples, normalised: images float32 [n, C, H, W], or feature vectors [n, D].
        train_labels: Training labels: classes int64 [n], labels bool [n, K], or standardised targets float32 [n, K].
        test_images: Test samples, normalised: images float32 [m, C, H, W], or feature vectors [m, D].
        test_labels: Test labels, like the training labels.
        augmentation: Augmentation of training batches; None for no augmentation.
        num_classes: Number K of classes, labels or targets.
        validation: Validation samples and their labels, like the test samples; None if nothing is decided on them.
        train_weights: Weights [n] of the training samples, float64 on the CPU, see
            `hyperfl_flwr.training.local_sgd.TrainingData`; None if all have the same.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    augmentation: Augmentation | None
    num_classes: int
    validation: tuple[Tensor, Tensor] | None = None
    train_weights: npt.NDArray[np.float64] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        trained, tested = (self.train_images, self.train_labels), (self.test_images, self.test_labels)
        return sum(each.nbytes for each in (*trained, *tested, *(self.validation or ())))

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "ClientData":
        """Return the same data on a device.

        Args:
            device: The target device.
            dtype: Type of the images; None to keep it.

        Returns:
            A new object; it shares tensors that are already on the device.
        """
        where = torch.device(device)
        train_images, test_images = (images.to(dtype=dtype) for images in (self.train_images, self.test_images))
        return replace(
            self,
            train_images=send(train_images, where),
            train_labels=send(self.train_labels, where),
            test_images=send(test_images, where),
            test_labels=send(self.test_labels, where),
            validation=self.validation
            and (send(self.validation[0].to(dtype=dtype), where), send(self.validation[1], where)),
        )

    def num_held_back(self, share: float) -> int:
        """Return how many training samples are to be held back: a share of them, and at most all but one."""
        size = len(self.train_labels)
        return max(0, min(size - 1, round(share * size)))

    def with_training(self, indices: Tensor) -> "ClientData":
        """Return the same data with some of the training samples, for example without those that are held back.

        Args:
            indices: Positions of these samples, on the device of the data.

        Raises:
            DataError: If none of them has a weight above 0.
        """
        weights = None if self.train_weights is None else self.train_weights[indices.cpu().numpy()]
        if weights is not None and not weights.any():
            text = "no sample that is trained on has a weight above 0; change class-weights or the key weights"
            raise DataError(text, public=text)
        return replace(
            self,
            train_images=self.train_images[indices],
            train_labels=self.train_labels[indices],
            train_weights=weights,
        )
