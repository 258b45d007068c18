"""BatchNorm in a federation: no counter of batches, and running statistics that can be left as they are."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

AnyBatchNorm = _BatchNorm
"""What all of torch's BatchNorm layers are."""


class _Uncounted(_BatchNorm):
    """torch's layer without its counter of batches, which nothing reads where `momentum` is a number."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self.num_batches_tracked = None

    def _load_from_state_dict(self, *args: Any) -> None:  # noqa: ANN401 - as torch has it
        nn.Module._load_from_state_dict(self, *args)  # noqa: SLF001 - torch's own would ask for the counter


class BatchNorm1d(_Uncounted, nn.BatchNorm1d):
    """Of features [B, C] or [B, C, L]."""


class BatchNorm2d(_Uncounted, nn.BatchNorm2d):
    """Of maps [B, C, H, W]."""


class BatchNorm3d(_Uncounted, nn.BatchNorm3d):
    """Of volumes [B, C, D, H, W]."""


UNCOUNTED: dict[type[nn.Module], type[_Uncounted]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}
"""torch's layer -> ours."""


def has_statistics(module: nn.Module) -> bool:
    """Say whether a network has state that travels and is no parameter: BatchNorm's running statistics."""
    return len(module.state_dict()) > len(list(module.parameters()))


@contextlib.contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm normalise by each batch's own statistics in here, and leave the running ones as they are."""
    layers = [layer for layer in module.modules() if isinstance(layer, AnyBatchNorm) and layer.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
