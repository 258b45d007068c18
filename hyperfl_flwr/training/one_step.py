"""One gradient step as a function of the parameters, for losses after it (Per-FedAvg)."""

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Loss = Callable[[Mapping[str, Tensor]], Tensor]
"""Maps parameters by name to a loss (a scalar)."""


def stepped(parameters: Mapping[str, Tensor], loss: Loss, rate: float, *, first_order: bool) -> dict[str, Tensor]:
    """Return the parameters after one gradient step, u = w - rate * grad loss(w), as functions of w.

    A parameter that the loss does not depend on stays.

    The gradient in w of a loss f at u is (1 - rate H) grad f(u) with the Hessian H of `loss` at w, which automatic
    differentiation computes exactly and without forming H; with `first_order` it is grad f(u).

    Args:
        parameters: The parameters w by name; they require gradients.
        loss: The loss of the step.
        rate: Step size.
        first_order: Whether the gradient of `loss` counts as a constant.
    """
    if not rate:
        return dict(parameters)
    # Torch's fast kernels for attention have no second derivative.
    with contextlib.nullcontext() if first_order else sdpa_kernel(SDPBackend.MATH):
        before = loss(parameters)
    gradients = torch.autograd.grad(
        before, list(parameters.values()), create_graph=not first_order, materialize_grads=True
    )
    return {name: value - rate * g for (name, value), g in zip(parameters.items(), gradients, strict=True)}
