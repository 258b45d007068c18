"""How a process computes: TF32, deterministic algorithms, and what a device must have for bfloat16."""

import os

import torch

from hyperfl_flwr.core.errors import DeviceError
from hyperfl_flwr.core.setting_types import Precision

BFLOAT16_CAPABILITY = (8, 0)
"""First compute capability of NVIDIA's GPUs with arithmetic in bfloat16."""

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that cuBLAS reads at its first call; without it, equal products may differ on one GPU."""


def set_arithmetic(precision: Precision, *, deterministic: bool, device: torch.device) -> None:
    """Set torch's switches of this process for the settings `precision` and `deterministic`.

    torch computes convolutions on GPUs in TF32 unless it is switched off, which `fp32` and `bf16` do. For `bf16` the
    target network must also be wrapped, see `hyperfl_flwr.models.lowered`.

    Args:
        precision: The run's precision. `tf32` has no effect on a CPU.
        deterministic: Whether operators without a deterministic algorithm raise a RuntimeError.
        device: The device of the process.

    Raises:
        DeviceError: If the device cannot compute in this precision.
    """
    if precision == "bf16" and device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < BFLOAT16_CAPABILITY:
            raise DeviceError(
                f"precision is bf16, but {torch.cuda.get_device_name(device)} has compute capability "
                f"{found[0]}.{found[1]}, below {BFLOAT16_CAPABILITY[0]}.{BFLOAT16_CAPABILITY[1]}; use precision=fp32"
            )
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = False
    if deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    # Not torch.use_deterministic_algorithms, which imports torch's compiler.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
