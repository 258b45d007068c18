"""Compute a target network in bfloat16, with parameters, outputs and gradients in float32."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hyperfl_flwr.models.target import Target


def in_bfloat16(target: Target) -> Target:
    """Let extractor and classifier of a target compute in bfloat16 by torch's autocast; returns the target.

    Convolutions and matrix products round their inputs to the 8 significant bits of bfloat16 and add in float32. All
    else (losses, normalisation, SGD, hypernetworks, what is sent) stays in float32.

    Args:
        target: The target, changed in place.
    """
    for part in (target.extractor, target.classifier):
        vars(part)["forward"] = _lowered(part.forward)
    return target


def _lowered(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @functools.wraps(forward)
    def lowered(samples: Tensor) -> Tensor:
        with torch.autocast(samples.device.type, dtype=torch.bfloat16):
            return forward(samples).float()

    return lowered
