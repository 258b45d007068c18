"""Find the places of adapters in pre-trained bodies.

Adapters act on the outputs of its stages, which are

- `layer1` to `layer4` of a ResNet and its relatives,
- the MLP of each block of a vision transformer,
- in other networks the last layers before the resolution drops, and the last one of all; of timm's networks those that
  timm lists as features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hyperfl_flwr.models.pretrained.adapters import Layout
from hyperfl_flwr.models.pretrained.libraries import input_side, size_arguments, without_values
from hyperfl_flwr.models.pretrained.names import Body

_BATCH = 2
"""Number of images of the forward pass that finds the shapes."""

_RESNET_STAGES = ("layer1", "layer2", "layer3", "layer4")

_FEWEST_LAYERS = 3
"""Least number of layers of a sequence that is taken for the body's trunk."""


@dataclass(frozen=True)
class Place:
    """The place of an adapter.

    Attributes:
        module: Name of the submodule of the body on whose output the adapter acts.
        channels: Number of channels C of this output.
        layout: Its layout.
    """

    module: str
    channels: int
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class BodyPlan:
    """Shapes of a body.

    Attributes:
        places: Places of the adapters, from the input to the output.
        features: Number F of features that the body computes of an image.
        side: Images are resized to this number of pixels per side; None for images that keep their size.
        is_sized: Whether the library builds the network for this size.
        activations: Number of values that the layers of the body compute of an image.
    """

    places: tuple[Place, ...]
    features: int
    side: int | None
    is_sized: bool
    activations: int


@lru_cache(maxsize=8)
def plan_body(body: Body, image: tuple[int, int]) -> BodyPlan:
    """Return the shapes of a body for images of some height and width; no weights are needed.

    Raises:
        ValueError: If the library has no such image classifier, or it cannot take such images.
        ConfigError: If the library is not installed.
    """
    side = input_side(body)
    network, _ = without_values(body)
    images = torch.empty(_BATCH, 3, *((side, side) if side else image), device="meta")
    stages = _stages(network)
    outputs: dict[str, object] = {}
    hooks = [layer.register_forward_hook(_recorder(outputs, name)) for name, layer in network.named_modules()]
    try:
        with torch.no_grad():
            features = network(images)
    except (RuntimeError, AssertionError, ValueError) as error:
        height, width = images.shape[2:]
        raise ValueError(f"{body} cannot take images of {height}x{width} pixels: {error}") from None
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise ValueError(f"{body} is no network with a linear classifier on features; take another one")
    places = _places(network, {name: outputs[name] for name in stages if isinstance(outputs.get(name), Tensor)})
    if not places:
        raise ValueError(f"no stages or blocks were found in {body}, after which adapters could be; take another one")
    leaves = [name for name, layer in network.named_modules() if next(layer.children(), None) is None]
    sizes = [output.numel() // _BATCH for output in map(outputs.get, leaves) if isinstance(output, Tensor)]
    return BodyPlan(
        places=places,
        features=features.shape[1],
        side=side,
        is_sized=bool(size_arguments(body)),
        activations=sum(sizes),
    )


def _recorder(outputs: dict[str, object], name: str) -> Any:  # noqa: ANN401 - torch's type of hooks
    def record(_layer: nn.Module, _inputs: object, output: object) -> None:
        outputs[name] = output

    return record


def _stages(network: nn.Module) -> list[str]:
    """Return the names of the submodules after which there may be adapters, in the order of the network."""
    if all(hasattr(network, name) for name in _RESNET_STAGES):
        return list(_RESNET_STAGES)
    listed = getattr(network, "feature_info", None)
    if isinstance(listed, list):
        names = [str(info["module"]) for info in listed]
        # Without the stem: one layer, not a stage.
        names = [name for name in names if next(network.get_submodule(name).children(), None) is not None]
        return [_mlp_of(network, name) for name in names]
    if isinstance(blocks := getattr(getattr(network, "encoder", None), "layers", None), nn.Sequential):
        return [_mlp_of(network, f"encoder.layers.{name}") for name, _ in blocks.named_children()]
    sequences = {
        name: part
        for name, part in network.named_children()
        if isinstance(part, (nn.Sequential, nn.ModuleList)) and len(part) >= _FEWEST_LAYERS
    }
    if not sequences:
        return [name for name, _ in network.named_children()]
    trunk = max(sequences, key=lambda name: len(sequences[name]))
    return [f"{trunk}.{name}" for name, _ in sequences[trunk].named_children()]


def _mlp_of(network: nn.Module, block: str) -> str:
    return f"{block}.mlp" if isinstance(getattr(network.get_submodule(block), "mlp", None), nn.Module) else block


def _places(network: nn.Module, outputs: Mapping[str, Any]) -> tuple[Place, ...]:
    """Return the places after stages with maps or tokens: of layers with one resolution the last, of blocks all."""
    channels_last = (
        getattr(network, "output_fmt", "NCHW") == "NHWC" or type(network).__name__ == "SwinTransformer"
    )  # torchvision's has no such attribute
    found: list[tuple[Place, int]] = []
    for name, output in outputs.items():
        if output.ndim == 3:
            found.append((Place(name, output.shape[2], "tokens"), 0))
        elif output.ndim == 4 and channels_last:
            found.append((Place(name, output.shape[3], "tokens"), output.shape[1]))
        elif output.ndim == 4:
            found.append((Place(name, output.shape[1], "maps"), output.shape[2]))
    return tuple(
        place
        for position, (place, side) in enumerate(found)
        if not side or position + 1 == len(found) or found[position + 1][1] < side
    )
