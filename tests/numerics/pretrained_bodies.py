"""Target networks on bodies with random weights, for tests."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.models.pretrained.network import PretrainedTarget, build_pretrained

CIFAR, GREY = (3, 32, 32), (1, 28, 28)


def built(name: str, shape: tuple[int, ...] = CIFAR, *, seed: int = 0) -> PretrainedTarget:
    target = build_pretrained(name, shape, 10)
    target.load_state_dict(initial_model(target, seed), assign=True)
    return target


def timm_weights(name: str, folder: Path) -> Path:
    import timm

    torch.manual_seed(1)
    path = folder / f"{name}.safetensors"
    save_file(timm.create_model(name).state_dict(), path)
    return path
