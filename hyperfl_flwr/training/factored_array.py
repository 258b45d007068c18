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

MOST_WAITING = 8
"""Number of matrices that are added to a sum in one pass. Each keeps its rows in memory until then."""


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
        if self.base.device.type != "cpu":
            whole = self.on_device().cpu().numpy()
            yield from ((part, whole[:, part]) for part in self.parts())
            return
        buffer = torch.empty(len(self.base) * self._width, dtype=self.base.dtype)
        for part in self.parts():
            yield part, self.block(part, buffer).numpy()

    def parts(self) -> Iterator[slice]:
        """Yield the columns of each block."""
        for first in range(0, self.base.shape[1], self._width):
            yield slice(first, first + self._width)

    def block(self, part: slice, buffer: Tensor) -> Tensor:
        """Return columns of the matrix [p, w], formed in a flat buffer of `FORMED_ELEMENTS` or p elements; on a CPU."""
        base = self.base[:, part]
        block = buffer[: base.numel()].view(base.shape)
        torch.mul(base, self.factor, out=block)
        return block.addmm_(self.left.t(), self.right[:, part]) if len(self.left) else block

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

    def new_total(self, sums: NDArray[np.float64]) -> "CacheTotal | DeviceTotal":
        """Return what adds such matrices to sums [p, P]."""
        return CacheTotal(sums) if self.base.device.type == "cpu" else DeviceTotal(sums, self.base.device)

    @property
    def _width(self) -> int:
        return max(1, FORMED_ELEMENTS // len(self.base))


class CacheTotal:
    """Adds matrices to a sum on a CPU, several to a block of its columns while that is in the processor's cache.

    Args:
        sums: The sums [p, P], changed in place.
    """

    def __init__(self, sums: NDArray[np.float64]) -> None:
        self._sums = torch.from_numpy(sums)
        self._waiting: list[tuple[FactoredArray, float, float]] = []

    def add(self, matrix: FactoredArray, scale: float, grid: float) -> None:
        """Add grid * rint(scale * matrix) to the sum, at the latest in `finish`."""
        self._waiting.append((matrix, scale, grid))
        if len(self._waiting) == MOST_WAITING:
            self.finish()

    def finish(self) -> None:
        """Add the matrices that wait."""
        if not self._waiting:
            return
        like = self._waiting[0][0]
        size = max(FORMED_ELEMENTS, len(like.base))
        buffer, terms = torch.empty(size, dtype=like.base.dtype), torch.empty(size, dtype=torch.float64)
        for part in like.parts():
            sums = self._sums[:, part]
            rounded = terms[: sums.numel()].view(sums.shape)
            for matrix, scale, grid in self._waiting:
                sums.add_(rounded.copy_(matrix.block(part, buffer)).mul_(scale).round_(), alpha=grid)
        self._waiting.clear()


class DeviceTotal:
    """Adds matrices to a sum on a GPU, which `finish` adds to that of the CPU.

    Args:
        sums: The sums [p, P] on the CPU, changed by `finish`.
        device: The GPU.
    """

    def __init__(self, sums: NDArray[np.float64], device: torch.device) -> None:
        self._sums = sums
        self._total = torch.zeros(sums.shape, dtype=torch.float64, device=device)

    def add(self, matrix: FactoredArray, scale: float, grid: float) -> None:
        """Add grid * rint(scale * matrix) to the sum."""
        self._total.add_(matrix.on_device().double().mul_(scale).round_(), alpha=grid)

    def finish(self) -> None:
        """Add the sum to that of the CPU, and begin with zeros again."""
        np.add(self._sums, self._total.cpu().numpy(), out=self._sums)
        self._total.zero_()
