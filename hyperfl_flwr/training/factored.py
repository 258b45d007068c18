"""SGD on a hypernetwork's linear heads without ever forming their gradients.

The heads theta = z H + c hold nearly all of a hypernetwork's parameters: [p, P] 59 MB for the 28x28
CNN. Their gradient g z^T has rank one, so that after t steps of SGD with momentum and (coupled) weight decay

    H_t = a H_0 + e V_0 + sum_j p_j z_j g_j^T        (the weights)
    V_t = b H_0 + f V_0 + sum_j q_j z_j g_j^T        (torch's momentum buffer)

with scalars that follow torch.optim.SGD's own recursion: V <- mu V + (z g^T + lambda H), H <- H - eta V gives

    q <- mu q + lambda p  (+ 1 for the new row),  p <- p - eta q,      and (a, b), (e, f) likewise without a new row.

A step therefore reads H_0 twice (once for theta, once for dL/dz) and writes nothing of its size, where autograd and
torch.optim.SGD touch 59 MB about nineteen times. The result is the same up to rounding.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.models.hypernetwork import Hypernetwork


class _Factors:
    """Coefficients of the terms of H and of the momentum buffer V: first H_0, then V_0, then one per step's z g^T."""

    def __init__(self, rows: int, learning_rate: float, momentum: float, weight_decay: float) -> None:
        self._learning_rate, self._momentum, self._weight_decay = learning_rate, momentum, weight_decay
        self.weights = np.zeros(2 + rows)
        self.buffer = np.zeros(2 + rows)
        self.restart()

    def restart(self) -> None:
        """H is H_0 and V is V_0."""
        self.weights[:], self.buffer[:] = 0.0, 0.0
        self.weights[0] = self.buffer[1] = 1.0

    def step(self, row: int) -> None:
        """Take torch.optim.SGD's step; the new gradient is the row's z g^T."""
        self.buffer *= self._momentum
        self.buffer += self._weight_decay * self.weights
        self.buffer[2 + row] += 1.0
        self.weights -= self._learning_rate * self.buffer


class FactoredHeads:
    """The heads theta = z H + c under SGD; see the module.

    Beyond H and c it holds `rows` * (P + p) floats for the steps' factors and, from step `rows` + 1 on with momentum,
    one more matrix [p, P]. With the default of p rows that is one hypernetwork, in rounds of more than p steps two; a
    plain loop holds the gradient and the momentum buffer, two as well.

    Args:
        weight: H [p, P], contiguous; `materialise` changes it in place.
        bias: c [P], changed in place by every step; None for heads without one.
        learning_rate: eta.
        momentum: mu in [0, 1); the buffer starts empty.
        weight_decay: lambda, added to the (clipped) gradient.
        rows: Steps after which the factors are folded into H; p by default.

    Raises:
        ValueError: If the shapes do not belong together or `rows` is not positive.
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
    ) -> None:
        if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[1:]):
            raise ValueError(f"weight must be [p, P] and bias [P], got {weight.shape} and {bias}")
        self.rows = weight.shape[0] if rows is None else rows
        if self.rows < 1:
            raise ValueError(f"rows must be positive, got {rows}")
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self._settings = (learning_rate, momentum, weight_decay)
        self._factors = _Factors(self.rows, *self._settings)
        self._velocity: Tensor | None = None
        self._gradients = weight.new_empty(self.rows, weight.shape[1])
        self._activations = weight.new_empty(self.rows, weight.shape[0])
        self._count = 0
        self._bias_buffer = None if bias is None else torch.zeros_like(bias)

    @classmethod
    def of(cls, hypernetwork: Hypernetwork, optimiser: torch.optim.Optimizer) -> "FactoredHeads":
        """Take a hypernetwork's heads over from an optimiser, which skips them while they have no gradient.

        Raises:
            ValueError: If the algebra does not hold: another layer computes theta, or the optimiser's step is not
                linear in gradients and weights, as that of Adam.
        """
        plain = "choose head-optimiser = plain"
        if type(hypernetwork).forward is not Hypernetwork.forward:
            name = type(hypernetwork).__name__
            raise ValueError(f"the heads must give theta = z H + c, {name} computes theta in a way of its own; {plain}")
        weight, bias = hypernetwork.head_weight, hypernetwork.head_bias
        groups = [group for tensor in (weight, bias) for group in optimiser.param_groups if _holds(group, tensor)]
        if type(optimiser) is not torch.optim.SGD or len(groups) != 2 or groups[0] is not groups[1]:
            name = type(optimiser).__name__
            raise ValueError(f"the heads must be in one group of a torch.optim.SGD, got {name}; {plain}")
        if wrong := [name for name in ("nesterov", "maximize", "dampening") if groups[0][name]]:
            raise ValueError(f"heads cannot be factored with {' and '.join(wrong)}; {plain}")
        settings = {name: groups[0][name] for name in ("momentum", "weight_decay")}
        return cls(weight, bias, learning_rate=groups[0]["lr"], **settings)

    @torch.no_grad()
    def forward(self, hidden: Tensor) -> Tensor:
        """Return theta [P] of the hidden activation z [p] under the weights as they are now."""
        theta = torch.mv(self.weight.t(), hidden).mul_(self._factors.weights[0])
        if self._velocity is not None:
            theta.addmv_(self._velocity.t(), hidden, alpha=self._factors.weights[1])
        if self._count:
            theta.addmv_(self._gradients[: self._count].t(), self._of_steps() * (self._past() @ hidden))
        return theta if self.bias is None else theta.add_(self.bias)

    @torch.no_grad()
    def backward(self, gradient: Tensor) -> Tensor:
        """Return dL/dz [p] = H dL/dtheta, of g = dL/dtheta [P]."""
        result = torch.mv(self.weight, gradient).mul_(self._factors.weights[0])
        if self._velocity is not None:
            result.addmv_(self._velocity, gradient, alpha=self._factors.weights[1])
        if self._count:
            result.addmv_(self._past().t(), self._of_steps() * torch.mv(self._gradients[: self._count], gradient))
        return result

    @torch.no_grad()
    def squared_norm(self, hidden: Tensor, gradient: Tensor) -> Tensor:
        """Return the squared norm of the gradients of H and c: |g|^2 |z|^2, and |g|^2 with a bias."""
        return gradient.square().sum() * (hidden.square().sum() + (0.0 if self.bias is None else 1.0))

    @torch.no_grad()
    def step(self, hidden: Tensor, gradient: Tensor, scale: Tensor | float = 1.0) -> None:
        """Take one step of SGD.

        Args:
            hidden: z [p] of the forward pass.
            gradient: dL/dtheta [P].
            scale: Factor of the gradient, of clipping.
        """
        if self._count == self.rows:
            self._fold()
        torch.mul(gradient, scale, out=self._gradients[self._count])
        self._activations[self._count] = hidden
        self._factors.step(self._count)
        self._count += 1
        if self.bias is not None and self._bias_buffer is not None:
            learning_rate, momentum, weight_decay = self._settings
            self._bias_buffer.mul_(momentum).add_(self._gradients[self._count - 1]).add_(self.bias, alpha=weight_decay)
            self.bias.add_(self._bias_buffer, alpha=-learning_rate)

    @torch.no_grad()
    def materialise(self) -> None:
        """Write the weights as they are now into `weight`."""
        self._add_terms(self.weight, self._velocity, self._factors.weights)
        # What is left of the momentum buffer is of no use: a round's buffers start empty.
        self._velocity, self._count = None, 0
        self._factors.restart()

    def _fold(self) -> None:
        """Make room for further steps: weights and momentum buffer become dense matrices."""
        velocity = None
        if self._settings[1] > 0:
            velocity = self.weight.clone()
            self._add_terms(velocity, self._velocity, self._factors.buffer)
        self._add_terms(self.weight, self._velocity, self._factors.weights)
        self._velocity, self._count = velocity, 0
        self._factors.restart()

    def _add_terms(self, matrix: Tensor, velocity: Tensor | None, factors: NDArray[np.float64]) -> None:
        """Turn H_0 in `matrix` into factors[0] H_0 + factors[1] V_0 + sum_j factors[2 + j] z_j g_j^T, in place."""
        matrix.mul_(factors[0])
        if velocity is not None:
            matrix.add_(velocity, alpha=factors[1])
        if self._count:
            coefficients = self._vector(factors)
            matrix.addmm_((coefficients[:, None] * self._past()).t(), self._gradients[: self._count])

    def _past(self) -> Tensor:
        return self._activations[: self._count]

    def _of_steps(self) -> Tensor:
        return self._vector(self._factors.weights)

    def _vector(self, factors: NDArray[np.float64]) -> Tensor:
        """Return the steps' factors as a tensor like the weights, [count]."""
        return torch.as_tensor(factors[2 : 2 + self._count]).to(self.weight.dtype).to(self.weight.device)


def _holds(group: Mapping[str, Any], tensor: Tensor) -> bool:
    return any(parameter is tensor for parameter in group["params"])
