"""Weights of pre-trained bodies: where this process takes them from, their hash, and the bodies that share them.

A run's setting `lpm.weights` says where they come from: `auto`, the download of torchvision or timm, or a file. Server
and nodes compare the weights by their hash, so that all adapters belong to one body.
"""

import copy
import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.models.pretrained.libraries import COUNTER, body_values, download, with_values
from hyperfl_flwr.models.pretrained.names import Body

_INTEGERS = (torch.int64, torch.int32, torch.bool)
"""Types of constants such as positions in a table."""

AUTO = "auto"
"""Weights that the body's library downloads, or has downloaded before."""


@dataclass(frozen=True, eq=False)
class LoadedBody:
    """A frozen body with its weights; all networks of a process share it.

    Attributes:
        network: The body on the CPU, in evaluation mode.
        sha256: Hash of its weights.
    """

    network: nn.Module
    sha256: str


class _Source:
    """Where this process takes weights from, see `choose`."""

    given: str = AUTO


def choose(source: str) -> None:
    """Choose where this process takes the weights of pre-trained bodies from.

    Args:
        source: `auto`, or the absolute path of a file: a state dict with the names of torchvision or timm, written by
            `torch.save` or by safetensors.
    """
    _Source.given = source


def load_body(body: Body, source: str = "", option: str = "lpm.weights") -> LoadedBody:
    """Return a body with its weights; a process loads them once.

    Args:
        body: The body.
        source: Where the weights come from, see `choose`; empty for what this process has chosen.
        option: Setting or option that names the source, for messages.

    Raises:
        ConfigError: If they cannot be downloaded or read, or are those of another network.
    """
    source = source or _Source.given
    try:
        if source == AUTO:
            return _downloaded(body)
        path = Path(source)
        try:
            status = path.stat()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}; give the path of an existing file") from None
        return _read(body, path, (status.st_size, status.st_mtime_ns))
    except ValueError as error:
        raise ConfigError(f"{option} = {source}, for {body}: {error}") from None


@lru_cache(maxsize=4)
def body_on(body: LoadedBody, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a body's network on a device and in a floating-point type; networks there share it."""
    network = body.network
    if device.type == "cpu" and dtype == torch.float32:
        return network
    return copy.deepcopy(network).to(device, dtype)


@lru_cache(maxsize=4)
def _downloaded(body: Body) -> LoadedBody:
    try:
        return _loaded(body, download(body))
    except ValueError as error:
        raise ValueError(f"{error}; give a file instead") from None
    except OSError as error:
        raise ValueError(f"the download of {body} failed: {error}; give a file instead, or check the network") from None


@lru_cache(maxsize=4)
def _read(body: Body, path: Path, _signature: tuple[int, int]) -> LoadedBody:
    """Load a body from a file; the signature makes a changed file another one."""
    try:
        return _loaded(body, _state_dict(path))
    except (ValueError, OSError) as error:
        advice = "give a state dict with the names of torchvision or timm"
        raise ValueError(f"{path} does not have its weights: {error}; {advice}") from None


def _state_dict(path: Path) -> Mapping[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings(action="ignore"):  # of torch, about files that it then cannot read
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch raises errors of any type for damaged files
        raise ValueError(f"it is damaged, or holds more than tensors ({type(error).__name__})") from None
    # Training scripts save the state dict among other things.
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError("it is not a state dict (tensors by name)")
    return {str(name): value for name, value in found.items()}


def _loaded(body: Body, state: Mapping[str, Tensor]) -> LoadedBody:
    """Return a body with its part of a state dict; the hash is of the values before they are fitted to another size."""
    values = body_values(body, state)
    network, total = with_values(body, values), hashlib.sha256()
    for name, value in sorted(values.items()):
        if name.endswith(COUNTER):
            continue
        if (not value.is_floating_point() and value.dtype not in _INTEGERS) or not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} has values that are no finite numbers")
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return LoadedBody(network, total.hexdigest())
