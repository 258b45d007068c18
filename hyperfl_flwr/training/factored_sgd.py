"""SGD on a hypernetwork's linear heads without forming their gradients.

The heads theta = z H + c hold nearly all of a hypernetwork's parameters: H [p, P] has 59 MB for the 28x28 CNN. The
gradient z g^T of H has rank one, so that after t steps of SGD with momentum and (coupled) weight decay

    H_t = a H_0 + e V_0 + sum_j p_j z_j g_j^T        (the weights)
    V_t = b H_0 + f V_0 + sum_j q_j z_j g_j^T        (torch's momentum buffer)

with scalars that follow torch.optim.SGD's recursion: V <- mu V + (z g^T + lambda H), H <- H - eta V gives

    q <- mu q + lambda p  (+ 1 for the new row),  p <- p - eta q,      and (a, b), (e, f) likewise without a new row.

theta and dL/dz are therefore products with one stacked matrix, the rows of H_0 above those of the gradients g_j. A step
reads it twice and writes one row, while autograd and torch.optim.SGD access 59 MB about nineteen times. Under relu a
unit i with z_i = 0 adds nothing to theta and passes no gradient on. Its row of H_0 only decays and is not read at all,
which saves about every second row. The result is the same up to rounding.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.core.device import send
from hyperfl_flwr.core.optimisers import SGD
from hyperfl_flwr.models.hypernetwork import Hypernetwork

SPARE_UNITS = 8
"""Number of units that may become used before the matrix has to be moved."""


class StepFactors:
    """Coefficients of the terms of H and of the momentum buffer V: first H_0, then V_0, then one per step's z g^T."""

    def __init__(self, rows: int, learning_rate: float, momentum: float, weight_decay: float) -> None:
        self._learning_rate, self._momentum, self._weight_decay = learning_rate, momentum, weight_decay
        self.weights = np.zeros(2 + rows)
        self.buffer = np.zeros(2 + rows)
        self.restart()

    def restart(self) -> None:
        """Reset the coefficients to those of H = H_0 and V = V_0."""
        self.weights[:], self.buffer[:] = 0.0, 0.0
        self.weights[0] = self.buffer[1] = 1.0

    def by_age(self) -> Tensor:
        """Return the coefficients of the rows of weights and buffer after all steps [2, rows], then restart.

        A row's coefficients depend on the number of steps since its own, so that after k steps they are the last k.
        """
        number = len(self.weights) - 2
        for row in range(number):
            self.step(row)
        found = torch.from_numpy(np.stack((self.weights[2:], self.buffer[2:])))
        self.restart()
        return found

    def step(self, row: int) -> None:
        """Update the coefficients by a step of torch.optim.SGD with the gradient z g^T of a row."""
        self.buffer *= self._momentum
        self.buffer += self._weight_decay * self.weights
        self.buffer[2 + row] += 1.0
        self.weights -= self._learning_rate * self.buffer


class FactoredHeads:
    """The heads theta = z H + c under SGD; see the module.

    In addition to H and c it holds one matrix of u + k rows of P floats: the rows of H of the u used units (of p), and
    the gradients of the k steps since the start or the last fold, at most `rows`. With the default of p rows and half
    of the units used that is one and a half times the hypernetwork after p steps; from step p + 1 on, with momentum,
    another u rows. A plain loop holds three times the hypernetwork: gradient, momentum buffer and a temporary.

    Args:
        weight: H [p, P], contiguous; out of date until `materialise` changes it in place.
        bias: c [P], changed in place by every step; None for heads without a bias.
        learning_rate: Step size eta.
        momentum: Momentum coefficient mu in [0, 1); the buffer starts empty.
        weight_decay: Coefficient lambda, added to the (clipped) gradient.
        rows: Number of steps after which the factors are folded into H; p by default.
        skip_zeros: Whether dL/dz is not needed for units that are 0, as under relu, so that their rows of H need not
            be read.

    Raises:
        ValueError: If the shapes do not match or `rows` is not positive.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        learning_rate: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        rows: int | None = None,
        skip_zeros: bool = False,
    ) -> None:
        if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[1:]):
            shape = None if bias is None else bias.shape
            raise ValueError(f"weight must be [p, P] and bias [P], got {weight.shape} and {shape}")
        self.rows = weight.shape[0] if rows is None else rows
        if self.rows < 1:
            raise ValueError(f"rows must be positive, got {rows}")
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self._settings = (learning_rate, momentum, weight_decay)
        self._factors = StepFactors(self.rows, *self._settings)
        self._by_age = send(self._factors.by_age().to(weight.dtype), weight.device)
        self._bias_buffer = None if bias is None else torch.zeros_like(bias)
        # Rows of H_0 end where the gradients begin and grow upwards, so that all used rows are contiguous.
        self._begin = 0
        self._stack = weight.new_empty(0, weight.shape[1])
        self._velocity: Tensor | None = None  # rows of V_0 from the first fold on, placed as in H_0
        self._units = torch.empty(0, dtype=torch.int64, device=weight.device)  # units with a row of H_0 in the stack
        self._unused = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
        self._unused_factors = (1.0, 0.0)  # H_0 and V_0 of the other units, in units of `weight`
        self._activations = weight.new_empty(self.rows, len(weight))
        self._count = 0
        self._skip_zeros = skip_zeros
        if not skip_zeros:
            self._add_units(self._unused.nonzero().flatten())

    @classmethod
    def of(cls, hypernetwork: Hypernetwork, optimiser: torch.optim.Optimizer, *, steps: int) -> "FactoredHeads":
        """Take over a hypernetwork's heads from an optimiser, which skips them since they get no gradient.

        Args:
            hypernetwork: The hypernetwork; its heads must not be used otherwise until `materialise`.
            optimiser: Optimiser with the rate, momentum and weight decay of the heads.
            steps: Number of steps to come; memory is reserved for at most p of them.

        Raises:
            ValueError: If the algebra does not hold: theta is computed in another way, or the optimiser's step is not
                linear in gradients and weights, as with Adam.
        """
        plain = "choose head-optimiser = plain"
        if type(hypernetwork).forward is not Hypernetwork.forward:
            name = type(hypernetwork).__name__
            raise ValueError(f"the heads must give theta = z H + c, but {name} computes theta differently; {plain}")
        weight, bias = hypernetwork.head_weight, hypernetwork.head_bias
        groups = [group for tensor in (weight, bias) for group in optimiser.param_groups if _contains(group, tensor)]
        if type(optimiser) not in (SGD, torch.optim.SGD) or len(groups) != 2 or groups[0] is not groups[1]:
            name = type(optimiser).__name__
            raise ValueError(f"the heads must be in one group of a torch.optim.SGD, got {name}; {plain}")
        if wrong := [name for name in ("nesterov", "maximize", "dampening") if groups[0][name]]:
            raise ValueError(f"heads cannot be factored with {' and '.join(wrong)}; {plain}")
        settings = {name: groups[0][name] for name in ("momentum", "weight_decay")}
        # On other devices than the CPU, finding the used units would synchronise in every step.
        is_relu = type(hypernetwork).activation is Hypernetwork.activation
        skip = is_relu and weight.device.type == "cpu"
        rows = max(1, min(len(weight), steps))
        return cls(weight, bias, learning_rate=groups[0]["lr"], **settings, rows=rows, skip_zeros=skip)

    @torch.no_grad()
    def forward(self, hidden: Tensor) -> Tensor:
        """Return theta [P] of the hidden activation z [p] under the current weights."""
        if self._skip_zeros:
            self._add_units(((hidden != 0) & self._unused).nonzero().flatten())
        used = hidden[self._units]
        coefficients = torch.cat(
            (used * self._factors.weights[0], self._step_weights() * (self._past_activations() @ hidden))
        )
        theta = torch.mv(self._in_use(self._stack, self._count).t(), coefficients)
        if self._velocity is not None:
            theta.addmv_(self._in_use(self._velocity).t(), used, alpha=self._factors.weights[1])
        return theta if self.bias is None else theta.add_(self.bias)

    @torch.no_grad()
    def backward(self, gradient: Tensor) -> Tensor:
        """Return dL/dz [p] = H dL/dtheta, of g = dL/dtheta [P]; 0 for units that have never been used."""
        products = torch.mv(self._in_use(self._stack, self._count), gradient)
        of_units, of_steps = torch.split(products, [len(self._units), self._count])
        of_units = of_units * self._factors.weights[0]
        if self._velocity is not None:
            of_units.addmv_(self._in_use(self._velocity), gradient, alpha=self._factors.weights[1])
        return torch.mv(self._past_activations().t(), self._step_weights() * of_steps).index_add_(
            0, self._units, of_units
        )

    @torch.no_grad()
    def squared_norm(self, hidden: Tensor, gradient: Tensor) -> Tensor:
        """Return the squared norm of the gradients of H and c: |g|^2 |z|^2, and |g|^2 with a bias."""
        return torch.dot(gradient, gradient) * (torch.dot(hidden, hidden) + (0.0 if self.bias is None else 1.0))

    @torch.no_grad()
    def step(self, hidden: Tensor, gradient: Tensor, scale: Tensor | float = 1.0) -> None:
        """Take one step of SGD.

        Args:
            hidden: z [p] of the forward pass.
            gradient: dL/dtheta [P].
            scale: Factor of the gradient, from clipping.
        """
        if self._count == self.rows:
            self._fold()
        row = self._stack[self._begin + self._count]
        torch.mul(gradient, scale, out=row)
        self._activations[self._count] = hidden
        self._factors.step(self._count)
        self._count += 1
        if self.bias is not None and self._bias_buffer is not None:
            learning_rate, momentum, weight_decay = self._settings
            self._bias_buffer.mul_(momentum).add_(row).add_(self.bias, alpha=weight_decay)
            self.bias.add_(self._bias_buffer, alpha=-learning_rate)

    @torch.no_grad()
    def materialise(self) -> None:
        """Write the current weights into `weight`; must be the last call."""
        self._combine(self._factors.weights, out=self._in_use(self._stack))
        factor = self._unused_weight(self._factors.weights)
        for unit in self._unused.nonzero().flatten().tolist():  # row by row: the rows of used units are overwritten
            self.weight[unit].mul_(factor)
        self.weight[self._units] = self._in_use(self._stack)

    def _add_units(self, units: Tensor) -> None:
        """Add the rows of further units to the stack, with their values at the last fold."""
        if self._begin and not len(units):
            return
        if not self._begin or len(self._units) + len(units) > self._begin:
            self._grow(min(len(self._units) + len(units) + SPARE_UNITS, len(self.weight)))
        end = self._begin - len(self._units)
        for matrix, factor in zip((self._stack, self._velocity), self._unused_factors, strict=True):
            if matrix is not None:
                rows = matrix[end - len(units) : end]
                torch.index_select(self.weight, 0, units, out=rows)
                rows.mul_(factor)
        self._units = torch.cat((units, self._units))
        self._unused[units] = False

    def _grow(self, begin: int) -> None:
        """Reallocate the stack so that the gradients begin at row `begin`, and copy the rows in use."""
        old = self._in_use(self._stack, self._count)
        stack = self.weight.new_empty(begin + self.rows, self.weight.shape[1])
        stack[begin - len(self._units) : begin + self._count] = old
        if self._velocity is not None:
            velocity = self.weight.new_empty(begin, self.weight.shape[1])
            velocity[begin - len(self._units) :] = self._in_use(self._velocity)
            self._velocity = velocity
        self._stack, self._begin = stack, begin

    def _in_use(self, matrix: Tensor, steps: int = 0) -> Tensor:
        """Return the rows of the used units and, in the stack, of the first `steps` steps after them."""
        return matrix[self._begin - len(self._units) : self._begin + steps]

    def _fold(self) -> None:
        """Make room for further steps: the current weights and momentum buffer become H_0 and V_0."""
        # V first: it is computed from H_0, which the second combination overwrites.
        weights, momentum = self._in_use(self._stack), None
        if self._settings[1] > 0:
            momentum = torch.empty_like(weights)
            self._combine(self._factors.buffer, out=momentum)
        self._combine(self._factors.weights, out=weights)
        if momentum is not None:
            if self._velocity is None:
                self._velocity = self.weight.new_empty(self._begin, self.weight.shape[1])
            self._in_use(self._velocity).copy_(momentum)
        self._unused_factors = self._unused_weight(self._factors.weights), self._unused_weight(self._factors.buffer)
        self._factors.restart()
        self._count = 0

    def _combine(self, factors: NDArray[np.float64], out: Tensor) -> None:
        """Write factors[0] H_0 + factors[1] V_0 + sum_j factors[2 + j] z_j g_j^T to `out` [u, P], of the used units."""
        torch.mul(self._in_use(self._stack), factors[0], out=out)
        if self._velocity is not None:
            out.add_(self._in_use(self._velocity), alpha=factors[1])
        if self._count:
            activations = self._past_activations()[:, self._units] * self._vector(factors)[:, None]
            out.addmm_(activations.t(), self._stack[self._begin : self._begin + self._count])

    def _unused_weight(self, factors: NDArray[np.float64]) -> float:
        """Return factors[0] H_0 + factors[1] V_0 for an unused unit, as a multiple of `weight`."""
        return float(np.dot(factors[:2], self._unused_factors))

    def _past_activations(self) -> Tensor:
        return self._activations[: self._count]

    def _step_weights(self) -> Tensor:
        return self._vector(self._factors.weights)

    def _vector(self, factors: NDArray[np.float64]) -> Tensor:
        """Return the factors of the steps [count], with the weights' type and device."""
        # From a table on the device: sending them would cost two copies in each step.
        return self._by_age[int(factors is self._factors.buffer), self.rows - self._count :]


def _contains(group: Mapping[str, Any], tensor: Tensor) -> bool:
    return any(parameter is tensor for parameter in group["params"])
