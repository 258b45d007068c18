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
        if self.base.device.type != "cpu":  # there all of it is formed at once
            whole = torch.addmm(self.base, self.left.t(), self.right, beta=self.factor).cpu().numpy()
            yield slice(0, whole.shape[1]), whole
            return
        width = max(1, FORMED_ELEMENTS // len(self.base))
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
        array = np.empty(self.shape, self.dtype)
        for part, block in self.columns():
            array[:, part] = block
        return array
