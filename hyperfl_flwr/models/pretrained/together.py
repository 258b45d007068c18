"""Let several clients pass a shared, frozen body together, each with adapters of its own.

A small batch costs nearly as much as a large one: the body's weights have to be read. Clients whose networks share a
body therefore gain from one forward and one backward pass for all of them, on their batches one after another. Each
client's training code stays as it is and runs in lockstep with the others, see `hyperfl_flwr.core.lockstep`: at the
body, forward or backward, it waits until all others wait there, too, or have ended; then one pass serves them all.

The clients' networks share one body. They take no gradients of gradients, no gradients of images, and one gradient of
each pass.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hyperfl_flwr.core.lockstep import Member


class OnBody(Protocol):
    """A network on a body, see `hyperfl_flwr.models.pretrained.network.PretrainedExtractor`."""

    @property
    def adapters(self) -> nn.ModuleList:
        """The adapters."""

    def body_features(self, images: Tensor, sizes: Sequence[int], values: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the body's features of the batches of several clients, in one pass."""


def features_of_member(member: Member, extractor: OnBody, images: Tensor) -> Tensor:
    """Return the features of a member's images, from a pass together with the other members."""
    parameters = list(extractor.adapters.parameters())
    device = images.device.type
    # What holds in this thread alone: the pass is computed in another one.
    has_gradient = torch.is_grad_enabled() and any(value.requires_grad for value in parameters)
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    request = _Forward(extractor, images, parameters, has_gradient, autocast)
    features: Tensor = _Together.apply(member, request, *parameters)
    return features


@dataclass(eq=False)
class _Pass:
    """One forward pass of several members, kept for its backward pass.

    Attributes:
        features: The features of all members [B_1 + ... + B_K, F].
        sizes: Batch sizes B_k.
        leaves: The parameters of the adapters of each member.
        waiting: Positions of the members without a backward pass so far.
    """

    features: Tensor
    sizes: list[int]
    leaves: list[list[Tensor]]
    waiting: set[int]


@dataclass(eq=False)
class _Forward:
    extractor: OnBody
    images: Tensor
    parameters: Sequence[Tensor]
    has_gradient: bool
    autocast: torch.dtype | None

    @property
    def kind(self) -> Hashable:
        return self.has_gradient, self.autocast

    @staticmethod
    def serve(requests: Sequence["_Forward"]) -> list[tuple[Tensor, _Pass, int]]:
        return _forward(requests)


@dataclass(eq=False)
class _Backward:
    origin: _Pass
    position: int
    gradient: Tensor

    @property
    def kind(self) -> Hashable:
        return self.origin

    @staticmethod
    def serve(requests: Sequence["_Backward"]) -> list[list[Tensor]]:
        return _backward(requests)


class _Together(torch.autograd.Function):
    """Features of images, computed with the other members; the gradients of the adapters, too."""

    @staticmethod
    def forward(ctx: Any, member: Member, request: _Forward, *_adapters: Tensor) -> Tensor:  # noqa: ANN401
        ctx.member = member
        features, ctx.origin, ctx.position = member.wait(request)
        return features  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return (None, None, *ctx.member.wait(_Backward(ctx.origin, ctx.position, gradient)))


def _forward(requests: Sequence[_Forward]) -> list[tuple[Tensor, _Pass, int]]:
    # Copies: a client may step before others ask for their gradients of this pass.
    leaves = [
        [value.detach().clone().requires_grad_(each.has_gradient) for value in each.parameters] for each in requests
    ]
    sizes = [len(each.images) for each in requests]
    extractor = requests[0].extractor
    images, autocast = torch.cat([each.images for each in requests]), requests[0].autocast
    with (
        torch.set_grad_enabled(requests[0].has_gradient),
        torch.autocast(images.device.type, dtype=autocast, enabled=autocast is not None),
    ):
        features = extractor.body_features(images, sizes, leaves)
    origin = _Pass(features, sizes, leaves, set(range(len(requests))))
    parts = torch.split(features.detach(), sizes)
    return [(part.clone(), origin, position) for position, part in enumerate(parts)]


def _backward(requests: Sequence[_Backward]) -> list[list[Tensor]]:
    origin = requests[0].origin
    gradient = torch.zeros_like(origin.features)
    parts = torch.split(gradient, origin.sizes)
    for each in requests:
        parts[each.position].copy_(each.gradient)
        origin.waiting.discard(each.position)
    wanted = [leaf for each in requests for leaf in origin.leaves[each.position]]
    found = iter(torch.autograd.grad(origin.features, wanted, gradient, retain_graph=bool(origin.waiting)))
    return [[next(found) for _ in origin.leaves[each.position]] for each in requests]
