"""Build pre-trained bodies with torchvision and timm, and load their weights.

A body is an image classifier without its last layer: images [B, 3, H, W] -> features [B, F].
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.models.pretrained.names import Body

COUNTER = "num_batches_tracked"
"""End of the name of BatchNorm's counter, which has no effect and which some files lack."""


def input_side(body: Body) -> int | None:
    """Return the side to which images are resized, in pixels; None for images that keep their size."""
    if body.side != "model":
        return body.side
    if body.library == "timm":
        return int(_timm_config(body.model)["input_size"][-1])
    transforms = _torchvision_weights(body.model).transforms()
    return int(transforms.crop_size[0])


def with_values(body: Body, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a body with values in the library's names, without those of the classifier, see `body_values`.

    Raises:
        ValueError: If names are missing or unknown, or shapes differ.
    """
    empty, _ = without_values(body)
    try:
        fitting = _fitted(empty, body, values)
    except Exception as error:  # noqa: BLE001 - the libraries' conversions raise errors of any type
        raise ValueError(f"its values cannot be converted for {body}: {error}") from None
    expected = {name: value.shape for name, value in empty.state_dict().items()}
    needed = {name for name in expected if not name.endswith(COUNTER)}
    for kind, names in (("lacks", needed - fitting.keys()), ("has unknown names:", fitting.keys() - expected.keys())):
        if names:
            listed = sorted(names)
            raise ValueError(f"for {body} it {kind} {', '.join(listed[:3])}{' and others' * (len(listed) > 3)}")
    for name, value in fitting.items():
        if value.shape != expected[name]:
            shapes = f"{tuple(value.shape)} instead of {tuple(expected[name])}"
            raise ValueError(f"its shapes are not those of {body}: {name} has {shapes}")
    # Only now: a network of another size than the file's is not built.
    with torch.random.fork_rng(devices=[]):
        network, _ = _new_network(body)
    network.load_state_dict(dict(fitting), strict=False)
    return network


def body_values(body: Body, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of the whole image classifier without the entries of its classifier."""
    _, heads = without_values(body)
    return {name: value for name, value in values.items() if not name.startswith(heads)}


def download(body: Body) -> Mapping[str, Tensor]:
    """Return the state dict that a body's library downloads, or has downloaded before.

    Raises:
        ValueError: If the library has no weights of it.
        OSError: If the download fails.
    """
    if body.library == "torchvision":
        weights = _torchvision_weights(body.model)
        found: Mapping[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        return found
    try:
        return _timm_network(replace(body, side="model"), pretrained=True).state_dict()
    except RuntimeError as error:
        raise ValueError(f"timm has no weights of {body.model}: {error}") from None


def _new_network(body: Body) -> tuple[nn.Module, tuple[str, ...]]:
    """Build a body on torch's current device, images [B, 3, H, W] -> features [B, F].

    Returns:
        The network, and the prefixes of its classifier's names in a state dict of the whole image classifier.
    """
    if body.library == "timm":
        network, names = _timm_network(body), _timm_config(body.model).get("classifier") or ()
        heads = (names,) if isinstance(names, str) else tuple(names)
    else:
        network = _torchvision_network(body)
        heads = (_take_off_classifier(network, body),)
    for layer in network.modules():  # in-place layers would change tensors that adapters and attacks still need
        if getattr(layer, "inplace", False) is True:
            setattr(layer, "inplace", False)  # noqa: B010 - mypy does not know the type of the activation
    return network.eval().requires_grad_(False), tuple(f"{name}." for name in heads)


@lru_cache(maxsize=8)
def without_values(body: Body) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a body on the meta device, and the prefixes of its classifier's names, see `_new_network`.

    Raises:
        ValueError: If the library has no such image classifier, or not for images of this size.
        ConfigError: If the library is not installed.
    """
    try:
        try:
            with torch.device("meta"):
                return _new_network(body)
        except NotImplementedError:  # some compute their widths with tensors
            with torch.random.fork_rng(devices=[]):
                network, heads = _new_network(body)
            return network.to("meta"), heads
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{body} cannot be built: {error}") from None


def _timm() -> ModuleType:
    try:
        import timm  # deferred: an optional package, which takes a second
    except ImportError as error:
        advice = "install it: python -m pip install 'timm>=1.0.15,<2'"
        public = f"targets lpm:timm/... need the package timm; {advice}"
        raise ConfigError(f"targets lpm:timm/... need the package timm ({error}); {advice}", public=public) from None
    return timm


def _timm_config(model: str) -> Mapping[str, Any]:
    timm = _timm()
    if not timm.is_model(model.partition(".")[0]):
        raise ValueError(f"timm has no model {model!r}; timm.list_models() lists them")
    try:
        config: Mapping[str, Any] = timm.get_pretrained_cfg(model).to_dict()
    except RuntimeError as error:
        raise ValueError(f"timm has no model {model!r}: {error}") from None
    return config


def _timm_network(body: Body, *, pretrained: bool = False) -> nn.Module:
    network: nn.Module = _timm().create_model(body.model, pretrained=pretrained, num_classes=0, **size_arguments(body))
    return network


def _torchvision_network(body: Body) -> nn.Module:
    from torchvision import models  # deferred: it takes a second, which other targets do not need

    _check_torchvision(body.model)
    network: nn.Module = models.get_model(body.model, weights=None, **size_arguments(body))
    return network


def size_arguments(body: Body) -> dict[str, int]:
    """Return the arguments with which the library builds the network for images of the body's size."""
    if not isinstance(body.side, int):
        return {}
    if body.library == "timm":
        return {"img_size": body.side} if _timm_config(body.model).get("fixed_input_size") else {}
    return {"image_size": body.side} if body.model.startswith("vit_") else {}


def _torchvision_weights(model: str) -> Any:  # noqa: ANN401 - torchvision's enumeration of this network's weights
    from torchvision import models

    _check_torchvision(model)
    return models.get_model_weights(model)["DEFAULT"]


def _check_torchvision(model: str) -> None:
    from torchvision import models

    if model not in models.list_models(module=models):
        raise ValueError(f"torchvision has no image classifier {model!r}; torchvision.models.list_models() has all")


def _take_off_classifier(network: nn.Module, body: Body) -> str:
    """Replace the last layer with parameters, which must be linear, by an identity, and return its name."""
    with_parameters = [name for name, layer in network.named_modules() if list(layer.parameters(recurse=False))]
    name = str(with_parameters[-1])
    last = network.get_submodule(name)
    if not isinstance(last, nn.Linear):
        raise ValueError(f"the last layer of {body} is no linear classifier; take another network")
    parent, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(parent), leaf, nn.Identity())
    return name


def _fitted(network: nn.Module, body: Body, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return values in the names and shapes of a body for another size of images, where its library converts them."""
    state = network.state_dict()
    if all(name in values and values[name].shape == value.shape for name, value in state.items()):
        return values
    if body.library == "timm":
        convert = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
        if convert is not None:
            converted: Mapping[str, Tensor] = convert(dict(values), network)
            return converted
    elif (size := size_arguments(body)) and "encoder.pos_embedding" in values:
        from torchvision.models.vision_transformer import interpolate_embeddings

        patch = int(network.get_submodule("conv_proj").kernel_size[0])  # type: ignore[index]
        resized: Mapping[str, Tensor] = interpolate_embeddings(size["image_size"], patch, dict(values))
        return resized
    return values
