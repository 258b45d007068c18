"""Target networks on a pre-trained body, whose parameters are those of the adapters and of the classifier alone.

HyperFL-LPM (Guo et al., AAAI 2025, section 3.3) freezes a large network that was trained on other data, and generates
only small adapters in it. The body is no submodule: it is in no `state_dict()`, no message and no exported file, it is
always in evaluation mode, and all clients of a process share it. Without its BatchNorm in training mode, samples of a
batch do not affect each other, and nothing but parameters has to be averaged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from hyperfl_flwr.core.lockstep import current_member
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import SelfInitialised, ordinary_parameters
from hyperfl_flwr.models.pretrained.adapters import ADAPTERS
from hyperfl_flwr.models.pretrained.bodies import BodyPlan, plan_body
from hyperfl_flwr.models.pretrained.names import PretrainedName, parse
from hyperfl_flwr.models.pretrained.together import features_of_member
from hyperfl_flwr.models.pretrained.weights import body_on, load_body
from hyperfl_flwr.models.target import Target

PROJECTION_SEED = 0
"""Seed of a constant projection; one for all runs, since it is a part of the network like the body."""


class PretrainedExtractor(nn.Module, SelfInitialised):
    """A frozen body with adapters, and maybe a linear layer on its features; images [B, C, H, W] -> [B, F].

    Grey images get three equal channels. The weights of the body are loaded at the first forward pass.

    Attributes:
        name: What the target's name means.
        plan: The body's shapes.
    """

    def __init__(self, name: PretrainedName, plan: BodyPlan) -> None:
        super().__init__()
        self.name, self.plan = name, plan
        places = plan.places if name.adapters else ()
        self.adapters = nn.ModuleList(ADAPTERS[place.layout](place.channels) for place in places)
        if name.trains_projection:
            self.projection = nn.Linear(plan.features, name.projection, device="meta")

    @property
    def num_features(self) -> int:
        """Number F of features."""
        return self.name.projection or self.plan.features

    def forward(self, images: Tensor) -> Tensor:
        """Return the features [B, F] of normalised images [B, C, H, W] with one or three channels."""
        member = current_member()
        if member is None or images.requires_grad:
            return self._projected(self.body_features(images, [len(images)], [list(self.adapters.parameters())]))
        return self._projected(features_of_member(member, self, images))

    def body_features(self, images: Tensor, sizes: Sequence[int], values: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the body's features of the batches of several clients with equal networks, in one pass.

        Args:
            images: The batches, one after another [B_1 + ... + B_K, C, H, W].
            sizes: Their sizes B_k.
            values: Parameters of the adapters of each client, in the order of `adapters.parameters()`.

        Returns:
            Features [B_1 + ... + B_K, F], before a projection.
        """
        body = body_on(load_body(self.name.body), images.device, images.dtype)
        remaining = [list(of_client) for of_client in values]
        hooks = []
        for place, adapter in zip(self.plan.places, self.adapters, strict=False):
            names = [name for name, _ in adapter.named_parameters()]
            of_clients = [dict(zip(names, part, strict=False)) for part in remaining]
            remaining = [part[len(names) :] for part in remaining]
            act = _adapting(adapter, sizes, of_clients)
            hooks.append(body.get_submodule(place.module).register_forward_hook(act))
        try:
            features: Tensor = body(self._prepared(images))
        finally:
            for hook in hooks:
                hook.remove()
        return features

    def draw_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the initial values of the adapters, see `hyperfl_flwr.models.pretrained.adapters`."""
        values: dict[str, Tensor] = {}
        for number, adapter in enumerate(self.adapters):
            assert isinstance(adapter, SelfInitialised)
            values |= {f"adapters.{number}.{name}": value for name, value in adapter.draw_values(generator).items()}
        if self.name.trains_projection:
            drawn = ordinary_parameters(self.projection, generator)
            values |= {f"projection.{name}": value for name, value in drawn.items()}
        return values

    def _prepared(self, images: Tensor) -> Tensor:
        """Return images with three channels, in the size of the body."""
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        side = self.plan.side
        if side and images.shape[2:] != (side, side):
            images = functional.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
        return images

    def _projected(self, features: Tensor) -> Tensor:
        if not self.name.projection:
            return features
        if self.name.trains_projection:
            projected: Tensor = self.projection(features)
            return projected
        shape = (self.name.projection, self.plan.features)
        return functional.linear(features, *_constant_projection(shape, features.device, features.dtype))


class PretrainedTarget(Target, SelfInitialised):
    """A target network on a pre-trained body.

    Args:
        name: What the target's name means.
        plan: The body's shapes.
        num_classes: Number of classes K.
    """

    extractor: PretrainedExtractor

    def __init__(self, name: PretrainedName, plan: BodyPlan, num_classes: int) -> None:
        extractor = PretrainedExtractor(name, plan)
        super().__init__(extractor, nn.Linear(extractor.num_features, num_classes, device="meta"))

    def draw_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the initial values of adapters and classifier."""
        parts = {"extractor": self.extractor.draw_values(generator)}
        parts["classifier"] = ordinary_parameters(self.classifier, generator)
        return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def build_pretrained(name: str, input_shape: tuple[int, ...], num_classes: int) -> PretrainedTarget:
    """Build a target network on a pre-trained body; its weights are loaded at the first forward pass.

    Args:
        name: Name of the target, see `hyperfl_flwr.models.pretrained.names`.
        input_shape: (channels, height, width) with one or three channels.
        num_classes: Number of classes K.

    Returns:
        The target on the meta device.

    Raises:
        ValueError: If the name is wrong, the library has no such network, or it cannot take such images.
        ConfigError: If the library is not installed.
    """
    if len(input_shape) != 3 or input_shape[0] not in (1, 3):
        raise ValueError(f"the {name} target needs images of one or three channels, got the shape {input_shape}")
    parsed = parse(name)
    return PretrainedTarget(parsed, plan_body(parsed.body, (int(input_shape[1]), int(input_shape[2]))), num_classes)


def _adapting(
    adapter: nn.Module, sizes: Sequence[int], values: Sequence[dict[str, Tensor]]
) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Return a hook that replaces the output of a stage by what the adapters of the clients make of their parts."""

    def act(_layer: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        parts = [output] if len(sizes) == 1 else torch.split(output, list(sizes))
        adapted = [functional_call(adapter, own, (part,)) for own, part in zip(values, parts, strict=True)]
        return adapted[0] if len(adapted) == 1 else torch.cat(adapted)

    return act


@functools.lru_cache(maxsize=8)
def _constant_projection(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    layer = nn.Linear(shape[1], shape[0], device="meta")
    drawn = ordinary_parameters(layer, torch_generator(PROJECTION_SEED, "projection"))
    return drawn["weight"].to(device, dtype), drawn["bias"].to(device, dtype)
