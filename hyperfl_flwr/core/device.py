"""Select the torch device of a node, and send tensors to it."""

import torch
from torch import Tensor

from hyperfl_flwr.core.errors import DeviceError


def resolve_device(name: str) -> torch.device:
    """Return the torch device that the setting `device` names.

    Args:
        name: `auto` (CUDA if available, else the CPU), `cpu`, `cuda`, `cuda:1`, ...

    Returns:
        A device that exists on this machine.

    Raises:
        DeviceError: If this machine does not have the device, or this project does not support it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"device must be auto, cpu or cuda, got {name!r}") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(
                f"device is {name!r}, but torch {torch.__version__} finds no CUDA device here; use device=cpu"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise DeviceError(
                f"device is {name!r}, but this machine has only {torch.cuda.device_count()} CUDA device(s), counted "
                f"from 0; choose one of them, or use device=cpu"
            )
        return device
    if device.type != "cpu":
        raise DeviceError(f"device must be auto, cpu or cuda, got {name!r}: only those two are tested; use device=cpu")
    return device


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for the copy.

    Args:
        tensor: Any tensor; a CPU tensor must not be changed afterwards.
        device: The device.

    Returns:
        The copy; the tensor itself if it is on the device.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # CUDA copies other memory in pieces, during which the CPU waits
    return tensor.to(device, non_blocking=True)
