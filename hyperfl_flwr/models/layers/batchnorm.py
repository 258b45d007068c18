"""BatchNorm for federated training: without a counter of batches, and with running statistics that can be frozen."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

AnyBatchNorm = _BatchNorm
"""Base class of torch's BatchNorm layers, which torch does not export."""


class _BatchNormWithoutCounter(_BatchNorm):
    """BatchNorm without `num_batches_tracked`, an integer that cannot be averaged and that a momentum makes unused."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self.num_batches_tracked = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalise values [B, C, ...]; raises ValueError in training on one value of each channel, saying why."""
        if self.training and input.numel() == input.shape[1]:
            raise ValueError(
                "BatchNorm cannot train on a batch with one value of each channel: with n training samples the last "
                "batch of an epoch is a single one if n modulo batch-size is 1; take another batch-size, or another "
                "data.train-samples"
            )
        return super().forward(input)

    def _load_from_state_dict(self, *args: Any) -> None:  # noqa: ANN401 - torch's signature
        nn.Module._load_from_state_dict(self, *args)  # noqa: SLF001 - BatchNorm's method would require the counter


class BatchNorm1d(_BatchNormWithoutCounter, nn.BatchNorm1d):
    """BatchNorm of features [B, C] or [B, C, L], without a counter."""


class BatchNorm2d(_BatchNormWithoutCounter, nn.BatchNorm2d):
    """BatchNorm of maps [B, C, H, W], without a counter."""


class BatchNorm3d(_BatchNormWithoutCounter, nn.BatchNorm3d):
    """BatchNorm of volumes [B, C, D, H, W], without a counter."""


WITHOUT_COUNTER: dict[type[nn.Module], type[_BatchNormWithoutCounter]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}
"""torch's layer -> the same layer without a counter."""


def has_statistics(module: nn.Module) -> bool:
    """Return whether a network's state holds more than parameters: BatchNorm's running statistics."""
    return len(module.state_dict()) > len(list(module.parameters()))


@contextlib.contextmanager
def preserve_running_statistics(module: nn.Module) -> Iterator[None]:
    """Within this context, normalise by the statistics of each batch and leave the running statistics unchanged."""
    layers = [layer for layer in module.modules() if isinstance(layer, AnyBatchNorm) and layer.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
