"""torch's optimisers without the import of torch's compiler, which takes two seconds per process.

The first optimiser of a process makes `torch.optim` import `torch._dynamo`, whose wrappers exclude some methods from
`torch.compile`. A SuperNode starts a process for every message, so each message would pay for that import. This project
compiles nothing: the classes below use torch's own methods without these wrappers and compute the same results.
"""

from inspect import unwrap

import torch

__all__ = ["LBFGS", "SGD", "Adam"]

_add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
_without_grad = torch.no_grad()
"""Disables gradients in `step`, as torch's wrapper does for optimisers that are not differentiable."""


class SGD(torch.optim.SGD):
    """`torch.optim.SGD` without compiler support and without `differentiable`."""

    add_param_group = _add_param_group
    zero_grad = _zero_grad
    step = _without_grad(unwrap(torch.optim.SGD.step))


class Adam(torch.optim.Adam):
    """`torch.optim.Adam` without compiler support and without `differentiable`."""

    add_param_group = _add_param_group
    zero_grad = _zero_grad
    step = _without_grad(unwrap(torch.optim.Adam.step))


class LBFGS(torch.optim.LBFGS):
    """`torch.optim.LBFGS` without compiler support."""

    add_param_group = _add_param_group
    zero_grad = _zero_grad
    step = _without_grad(unwrap(torch.optim.LBFGS.step))
