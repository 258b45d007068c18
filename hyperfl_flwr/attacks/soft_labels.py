"""Labels in an inversion problem: known ones, or probabilities of the classes that are searched for with the images.

Zhu, Liu, Han: "Deep Leakage from Gradients", NeurIPS 2019, section 3.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hyperfl_flwr.attacks.base import IntArray
from hyperfl_flwr.attacks.optimisation import Tensors

_LABELS, _SOFT = "labels", "soft-labels"


def label_constants(labels: Sequence[IntArray | None], device: torch.device) -> dict[str, Tensor]:
    """Return the constants of clients with known labels, each [n]; none if the labels are unknown."""
    known = [row for row in labels if row is not None]
    return {_LABELS: torch.from_numpy(np.stack(known)).to(device)} if known else {}


def first_soft_labels(
    labels: Sequence[IntArray | None], number: int, num_classes: int, generator: torch.Generator
) -> Tensors:
    """Draw the unknowns [number, K] whose softmax are the probabilities; none if the labels are known."""
    if all(row is not None for row in labels):
        return {}
    return {_SOFT: torch.randn(number, num_classes, generator=generator)}


def labels_in(unknowns: Tensors, constants: Tensors) -> Tensor:
    """Return one client's labels for `cross_entropy`: classes int64 [n], or probabilities [n, K]."""
    return unknowns[_SOFT].softmax(dim=1) if _SOFT in unknowns else constants[_LABELS]
