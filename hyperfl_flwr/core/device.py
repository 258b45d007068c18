"""The device that a node trains on."""

import torch

from hyperfl_flwr.core.errors import DeviceError


def resolve_device(name: str) -> torch.device:
    """Turn the setting `device` into a torch device.

    Args:
        name: `auto` (CUDA when there is one, else the CPU), `cpu`, `cuda`, `cuda:1`, ...

    Returns:
        A device that exists on this machine.

    Raises:
        DeviceError: If the device does not exist here, or is one that this project does not support.
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
                f"device is {name!r}, but torch {torch.__version__} sees no CUDA device here; use device=cpu"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise DeviceError(f"device is {name!r}, but there are only {torch.cuda.device_count()} CUDA devices here")
        return device
    if device.type != "cpu":
        raise DeviceError(f"device must be auto, cpu or cuda, got {name!r}: only those two are tested; use device=cpu")
    return device
