"""Heads of several clients that start from the same H_0, without a copy of it for each client.

In a round all clients start from one H_0 [p, P], and after t steps client k has

    H_k = a H_0 + sum_j p_j z_j g_j^T

(`hyperfl_flwr.training.factored_sgd`). A client only stores its rows g_j. What H_0 contributes to theta and to dL/dz is
computed for all clients in turn on one block of columns after the other, so that H_0 is read from memory once and not
once per client: a block stays in the processor's cache. H_k itself is not formed: `HeadsOnShared.result` is the pair
of factors, from which a sum over clients takes its columns.

Which clients are trained together does not change a bit of the results: each product of one client with one block is
computed alone. The rows of H_0 that are read for all clients are those that `SharedHeads` is given; the rows of other
units belong to the client that uses them.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from hyperfl_flwr.training.factored_array import FactoredArray
from hyperfl_flwr.training.factored_sgd import FactoredHeads

CACHED_BYTES = 1 << 21
"""Size in bytes of p rows of a block of columns; about half of the rows are read."""


class Heads(Protocol):
    """The heads theta = z H + c under SGD, see `FactoredHeads`."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return theta [P] of z [p]."""

    def backward(self, gradient: Tensor) -> Tensor:
        """Return dL/dz [p] of dL/dtheta [P]."""

    def squared_norm(self, hidden: Tensor, gradient: Tensor) -> Tensor:
        """Return the squared norm of the gradients of H and c."""

    def step(self, hidden: Tensor, gradient: Tensor, scale: Tensor | float = 1.0) -> None:
        """Take one step of SGD."""


@dataclass(frozen=True)
class HeadProduct:
    """A product with H that a client's next step needs.

    Attributes:
        heads: The client's heads.
        vector: z [p] for theta, or dL/dtheta [P] for dL/dz.
        is_forward: Whether the product is theta.
    """

    heads: Heads
    vector: Tensor
    is_forward: bool

    def compute(self) -> Tensor:
        """Return the product for this client alone."""
        return self.heads.forward(self.vector) if self.is_forward else self.heads.backward(self.vector)


HeadSteps = Generator[HeadProduct, Tensor, float]
"""A client's local steps: yields products, is sent their values, and returns the mean loss of the last epoch."""


def finish_alone(steps: HeadSteps) -> float:
    """Take all steps of one client; returns its loss."""
    try:
        product = next(steps)
        while True:
            product = steps.send(product.compute())
    except StopIteration as end:
        return float(end.value)


class SharedHeads:
    """H_0 of all clients of a cohort.

    Args:
        weight: H_0 [p, P], contiguous; never changed.
        units: Units [u] whose rows are read for all clients: those that most clients use. They must not depend on
            which clients are trained together.
    """

    def __init__(self, weight: Tensor, units: Tensor) -> None:
        self.weight, self.units = weight.detach(), units
        width = max(1, CACHED_BYTES // (weight.shape[0] * weight.element_size()))
        self._widths = [len(part) for part in torch.split(torch.empty(weight.shape[1], device="meta"), width)]
        self._blocks = [part.index_select(0, units) for part in torch.split(self.weight, width, dim=1)]

    @cached_property
    def bound(self) -> float:
        """Largest magnitude of an element of H_0; NaN if one is NaN."""
        return max(float(-self.weight.amin()), float(self.weight.amax())) if self.weight.numel() else 0.0

    def forward(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum of z_i times row i over `units` [P], for each client's z [p]."""
        used = [z[self.units] for z in hidden]
        found = [z.new_empty(self.weight.shape[1]) for z in hidden]
        parts = [torch.split(theta, self._widths) for theta in found]
        for number, block in enumerate(self._blocks):
            transposed = block.t()
            for z, outputs in zip(used, parts, strict=True):
                torch.mv(transposed, z, out=outputs[number])
        return found

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the scalar products of the rows of `units` with dL/dtheta [u], for each client's dL/dtheta [P]."""
        found = [gradient.new_zeros(len(self.units)) for gradient in gradients]
        parts = [torch.split(gradient, self._widths) for gradient in gradients]
        for number, block in enumerate(self._blocks):
            for total, inputs in zip(found, parts, strict=True):
                total.addmv_(block, inputs[number])
        return found

    def finish(self, clients: Sequence[HeadSteps]) -> list[float | Exception]:
        """Take the steps of several clients together; a client that has finished or failed leaves.

        Args:
            clients: The steps of each client, whose heads are `HeadsOnShared` of this object.

        Returns:
            For each client its loss, or the error that ended its training.
        """
        results: list[float | Exception] = [float("nan")] * len(clients)
        values: dict[int, Tensor | None] = dict.fromkeys(range(len(clients)))
        while values:
            wanted: dict[int, HeadProduct] = {}
            for number, value in values.items():
                try:
                    wanted[number] = clients[number].send(value)  # type: ignore[arg-type]  # None starts it
                except StopIteration as end:
                    results[number] = float(end.value)
                except Exception as error:  # noqa: BLE001 - a failing client must not stop the others
                    results[number] = error
            values = dict(self._products(wanted))
        return results

    def _products(self, wanted: dict[int, HeadProduct]) -> Iterator[tuple[int, Tensor]]:
        """Yield the value of each product; clients of other kinds than the rest are at another point of a step."""
        for is_forward, compute in ((True, self.forward), (False, self.backward)):
            some = {number: product for number, product in wanted.items() if product.is_forward is is_forward}
            of_shared = compute([product.vector for product in some.values()])
            for (number, product), value in zip(some.items(), of_shared, strict=True):
                heads = product.heads
                if not isinstance(heads, HeadsOnShared):
                    raise TypeError(f"the heads of a cohort must be HeadsOnShared, got {type(heads).__name__}")
                finish = heads.forward_from if is_forward else heads.backward_from
                yield number, finish(product.vector, value)


class HeadsOnShared(FactoredHeads):
    """The heads of one client that starts from a shared H_0, under relu; see the module.

    It holds one row of P floats per step, and the rows of H_0 that only this client uses.

    Attributes:
        shared: H_0.

    Args:
        shared: H_0.
        bias: c [P], changed in place by every step.
        learning_rate: Step size eta.
        momentum: Momentum coefficient mu in [0, 1); the buffer starts empty.
        weight_decay: Coefficient lambda, added to the (clipped) gradient.
        steps: Number of steps to come, at least one.
    """

    def __init__(
        self,
        shared: SharedHeads,
        bias: Tensor,
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
        steps: int,
    ) -> None:
        super().__init__(
            shared.weight,
            bias,
            learning_rate=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            rows=steps,
            skip_zeros=True,
        )
        self.shared = shared
        self._unused[shared.units] = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Return theta [P] of the hidden activation z [p] under the current weights."""
        (of_shared,) = self.shared.forward([hidden])
        return self.forward_from(hidden, of_shared)

    def backward(self, gradient: Tensor) -> Tensor:
        """Return dL/dz [p] = H dL/dtheta, of g = dL/dtheta [P]; 0 for units that have never been used."""
        (of_shared,) = self.shared.backward([gradient])
        return self.backward_from(gradient, of_shared)

    @torch.no_grad()
    def forward_from(self, hidden: Tensor, of_shared: Tensor) -> Tensor:
        """Return theta [P] from the part of the shared rows, see `SharedHeads.forward`."""
        return super().forward(hidden).add_(of_shared, alpha=self._factors.weights[0])

    @torch.no_grad()
    def backward_from(self, gradient: Tensor, of_shared: Tensor) -> Tensor:
        """Return dL/dz [p] from the part of the shared rows, see `SharedHeads.backward`."""
        return super().backward(gradient).index_add_(0, self.shared.units, of_shared, alpha=self._factors.weights[0])

    def take(self, rows: Tensor, activations: Tensor) -> None:
        """Take over all steps of a client, which were taken elsewhere; c is changed there, too.

        Args:
            rows: The scaled gradient g_j of each step [t, P].
            activations: The hidden activation z_j of each step [t, p].
        """
        self._stack, self._activations, self._begin, self._count = rows, activations, 0, len(rows)
        for step in range(len(rows)):
            self._factors.step(step)

    def materialise(self) -> None:
        """Refuse to change H_0, which other clients share.

        Raises:
            TypeError: Always; `result` has the weights.
        """
        raise TypeError("heads on a shared H_0 are not written into it; use `result`")

    def result(self) -> FactoredArray:
        """Return the current weights H_k; must be the last call."""
        left = self._past_activations() * self._step_weights()[:, None]
        right = self._stack[self._begin : self._begin + self._count]
        factor = float(self._factors.weights[0])
        return FactoredArray(base=self.weight, base_bound=self.shared.bound, factor=factor, left=left, right=right)
