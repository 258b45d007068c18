"""The samples of one client, as tensors on a device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hyperfl_flwr.core.device import send
from hyperfl_flwr.data.augmentation import Augmentation


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientData:
    """Samples of one client, ready for a model.

    Attributes:
        train_images: Training samples, normalised: images float32 [n, C, H, W], or feature vectors [n, D].
        train_labels: Training labels int64 [n].
        test_images: Test samples, normalised: images float32 [m, C, H, W], or feature vectors [m, D].
        test_labels: Test labels int64 [m].
        augmentation: Augmentation of training batches; None for no augmentation.
        num_classes: Number of classes K.
        validation: Validation samples and their labels, like the test samples; None if nothing is decided on them.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    augmentation: Augmentation | None
    num_classes: int
    validation: tuple[Tensor, Tensor] | None = None

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
        return ClientData(
            train_images=send(train_images, where),
            train_labels=send(self.train_labels, where),
            test_images=send(test_images, where),
            test_labels=send(self.test_labels, where),
            augmentation=self.augmentation,
            num_classes=self.num_classes,
            validation=self.validation
            and (send(self.validation[0].to(dtype=dtype), where), send(self.validation[1], where)),
        )
