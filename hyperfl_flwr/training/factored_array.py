"""A matrix as a multiple of another one plus a product of factors, formed only where its elements are needed."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FORMED_ELEMENTS = 1 << 16
"""Number of elements of H_k to form at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FactoredArray:
    """The matrix a H_0 + L^T R, formed by blocks of columns; its elements do not depend on how many are formed.

    Attributes:
        base: H_0 [p, P].
        base_bound: Largest magnitude of its elements.
        factor: a.
        left: L [t, p].
        right: R [t, P].
    """

    base: Tensor
    base_bound: float
    factor: float
    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (p, P)."""
        return tuple(self.base.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return np.dtype(str(self.base.dtype).removeprefix("torch."))

    @cached_property
    def bound(self) -> float:
        """A number that no magnitude of an element exceeds; NaN or infinite if a factor is not finite."""
        if not len(self.left):
            return abs(self.factor) * self.base_bound
        # A row's norm bounds its magnitudes in one pass.
        of_rows = torch.linalg.vector_norm(self.right, dim=1) * self.left.abs().amax(dim=1)
        return (abs(self.factor) * self.base_bound + float(of_rows.sum())) * (1 + 1e-3)  # for rounding

    def columns(self) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield the matrix in blocks of columns [p, w], each with its slice; a block is valid until the next one."""
        width = max(1, FORMED_ELEMENTS // len(self.base))
        if self.base.device.type != "cpu":
            whole = self.on_device().cpu().numpy()
            for first in range(0, whole.shape[1], width):
                yield slice(first, first + width), whole[:, first : first + width]
            return
        buffer = torch.empty(len(self.base) * width, dtype=self.base.dtype)
        transposed = self.left.t()
        for first in range(0, self.base.shape[1], width):
            part = slice(first, first + width)
            base = self.base[:, part]
            block = buffer[: base.numel()].view(base.shape)
            torch.mul(base, self.factor, out=block)
            if len(self.left):
                block.addmm_(transposed, self.right[:, part])
            yield part, block.numpy()

    def formed(self) -> NDArray[Any]:
        """Return the matrix [p, P]."""
        if self.base.device.type != "cpu":
            whole: NDArray[Any] = self.on_device().cpu().numpy()
            return whole
        array = np.empty(self.shape, self.dtype)
        for part, block in self.columns():
            array[:, part] = block
        return array

    def on_device(self) -> Tensor:
        """Return the matrix [p, P] where H_0 is."""
        if not len(self.left):
            return self.base * self.factor
        return torch.addmm(self.base, self.left.t(), self.right, beta=self.factor)

    def new_total(self) -> "FactoredTotal | None":
        """Return an empty sum of such matrices on a GPU; None on a CPU, which adds blocks that are in its cache."""
        return None if self.base.device.type == "cpu" else FactoredTotal(self.base)


class FactoredTotal:
    """A sum of matrices on a GPU, see `hyperfl_flwr.protocol.arrays.DeviceTotal`.

    Args:
        like: A tensor of the same shape [p, P] and device.
    """

    def __init__(self, like: Tensor) -> None:
        self._total = torch.zeros_like(like, dtype=torch.float64)

    def add(self, matrix: FactoredArray, scale: float, grid: float) -> None:
        """Add grid * rint(scale * matrix) to the sum."""
        self._total.add_(matrix.on_device().double().mul_(scale).round_(), alpha=grid)

    def fetch(self) -> NDArray[np.float64]:
        """Return the sum [p, P]."""
        found: NDArray[np.float64] = self._total.cpu().numpy()
        return found
