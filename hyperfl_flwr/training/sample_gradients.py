"""Gradients of the samples of a batch: kept in memory or as factors, and clipped together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_SAFE = (1e-12, 1e12)
"""Norms that float32 computes correctly: squares of values that matter neither under- nor overflow."""


class Part(Protocol):
    """Gradients of some parameters, sample by sample."""

    @property
    def kept(self) -> int:
        """Number of gradients in memory."""

    def squared_norms(self) -> Tensor:
        """Return each sample's squared norm [B], float64."""

    def only(self, rows: Tensor) -> "Part":
        """Return the part of the samples with a True in `rows` [B]."""

    def sums(self, scale: Tensor) -> dict[int, Tensor]:
        """Return the sums of the gradients times `scale` [B] (float64), by the parameter's number."""


@dataclass(frozen=True)
class Explicit:
    """Gradients [B, ...] in memory, by the parameter's number."""

    gradients: Mapping[int, Tensor]

    @property
    def kept(self) -> int:
        """Number of gradients in memory."""
        return sum(gradient.numel() for gradient in self.gradients.values())

    def squared_norms(self) -> Tensor:
        """Return each sample's squared norm [B], float64."""
        return torch.stack([_norms(_rows(each)[0]) for each in self.gradients.values()]).square().sum(0)

    def only(self, rows: Tensor) -> "Explicit":
        """Return the part of the samples with a True in `rows` [B]."""
        return Explicit({number: gradient[rows] for number, gradient in self.gradients.items()})

    def sums(self, scale: Tensor) -> dict[int, Tensor]:
        """Return the sums of the gradients times `scale` [B] (float64), by the parameter's number."""
        found = {}
        for number, gradient in self.gradients.items():
            rows, order = _rows(gradient)
            # A scale below the normal numbers of float32 has few digits there, and could be rounded up by half.
            exact = rows.double() if (scale < torch.finfo(rows.dtype).tiny).any() else rows
            total = (scale.to(exact) @ exact).to(rows).reshape([gradient.shape[1 + dim] for dim in order])
            found[number] = total.permute([order.index(dim) for dim in range(len(order))])
        return found


@dataclass(frozen=True)
class Factored:
    """A linear layer's gradients g (a, 1)^T, kept as factors.

    Attributes:
        inputs: Inputs a [B, I].
        outputs: Gradients g [B, O] with respect to the outputs.
        weight: Number of the weight; None if it is constant.
        bias: Number of the bias; None if it is constant or there is none.
    """

    inputs: Tensor
    outputs: Tensor
    weight: int | None
    bias: int | None

    @property
    def kept(self) -> int:
        """Number of gradients in memory: none."""
        return 0

    def squared_norms(self) -> Tensor:
        """Return each sample's squared norm [B], float64."""
        # In float64, as a product of squares can over- or underflow where the product does not.
        of_inputs, of_outputs = (side.double().square().sum(1) for side in (self.inputs, self.outputs))
        return of_outputs * (of_inputs * (self.weight is not None) + (self.bias is not None))

    def only(self, rows: Tensor) -> "Factored":
        """Return the part of the samples with a True in `rows` [B]."""
        return Factored(self.inputs[rows], self.outputs[rows], self.weight, self.bias)

    def sums(self, scale: Tensor) -> dict[int, Tensor]:
        """Return the sums of the gradients times `scale` [B] (float64), by the parameter's number."""
        scaled, found = self.outputs.double() * scale[:, None], {}
        if self.weight is not None:
            # Inputs of at most 1: otherwise large inputs enlarge the rounding of outputs that are scaled to almost 0.
            largest = self.inputs.abs().amax(1, keepdim=True)
            largest = torch.where(largest > 0, largest, 1)
            found[self.weight] = (scaled * largest).to(self.outputs).T @ (self.inputs / largest)
        if self.bias is not None:
            found[self.bias] = scaled.to(self.outputs).sum(0)
        return found


def _rows(gradients: Tensor) -> tuple[Tensor, list[int]]:
    """Return gradients [B, ...] as rows [B, P], and the order of their dimensions in a row.

    It is the order in memory, so that nothing is copied where the gradients are dense.
    """
    order = sorted(range(gradients.ndim - 1), key=lambda dim: -gradients.stride(1 + dim))
    return gradients.permute(0, *(1 + dim for dim in order)).reshape(len(gradients), -1), order


def _norms(rows: Tensor) -> Tensor:
    """Return the norms of rows [B, P], float64; in float32 the squares of very small values would be 0."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1).double()
    doubtful = ~((norms > _SAFE[0]) & (norms < _SAFE[1]))
    if doubtful.any():  # in float64, which takes longer
        norms[doubtful] = torch.linalg.vector_norm(rows[doubtful], dim=1, dtype=torch.float64)
    return norms


def clipped(parts: Sequence[Part], clip_norm: float) -> list[Tensor]:
    """Return the sums of the gradients, each sample's scaled to a norm of at most C over all parts together.

    A sample of which the squared norm is not finite counts as zero.

    Args:
        parts: The gradients; they cover the parameters' numbers from 0 on.
        clip_norm: Clipping norm C.

    Returns:
        The sums, in the order of the parameters.
    """
    squares = torch.stack([part.squared_norms() for part in parts]).sum(0)
    finite = squares.isfinite()
    if not finite.all():  # zero times infinity is not zero, so the rows must go
        parts, squares = [part.only(finite) for part in parts], squares[finite]
    scale = (clip_norm / squares.sqrt()).clamp(max=1)
    found: dict[int, Tensor] = {}
    for part in parts:
        found |= part.sums(scale)
    return [found[number] for number in sorted(found)]
