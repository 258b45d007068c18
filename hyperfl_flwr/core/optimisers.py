"""torch's optimisers without torch's compiler.

`torch.optim` imports `torch._dynamo` with the first optimiser that is made, so that `torch.compile` leaves some of an
optimiser's methods alone: two seconds of every process that trains, where a SuperNode starts a process for every
message. Nothing here is compiled, and these classes have the methods as they are below those wrappers. What they
compute is torch's own.
"""

from inspect import unwrap

import torch

__all__ = ["SGD", "Adam"]

_add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
_without_grad = torch.no_grad()
"""As torch's wrapper does, for optimisers that are not differentiable."""


class SGD(torch.optim.SGD):
    """`torch.optim.SGD`; it cannot be differentiated through."""

    add_param_group = _add_param_group
    zero_grad = _zero_grad
    step = _without_grad(unwrap(torch.optim.SGD.step))


class Adam(torch.optim.Adam):
    """`torch.optim.Adam`; it cannot be differentiated through."""

    add_param_group = _add_param_group
    zero_grad = _zero_grad
    step = _without_grad(unwrap(torch.optim.Adam.step))
