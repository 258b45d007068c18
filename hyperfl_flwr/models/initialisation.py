"""Draw the initial values of networks from a given generator: torch's defaults, or He's for rectifiers."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.layers.batchnorm import AnyBatchNorm


class SelfInitialised(ABC):
    """Interface of networks that draw their initial values themselves."""

    @abstractmethod
    def draw_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw initial values from a CPU generator: CPU tensors by name, in the order of `state_dict()`."""


def fan_in(module: nn.Conv2d | nn.Linear) -> int:
    """Return the number of inputs that each output of a layer sums over."""
    return module.weight[0].numel()


def weighted_layers(module: nn.Module, but: tuple[str, ...] = ()) -> dict[str, nn.Conv2d | nn.Linear]:
    """Return a module's convolutions and linear layers, by name.

    Args:
        module: The network.
        but: Names of submodules to skip.

    Raises:
        ValueError: If a parameter belongs to another kind of layer than these and BatchNorm, as no initialisation is
            defined for it.
    """
    aside = tuple(f"{name}." for name in but)
    named = {name: layer for name, layer in module.named_modules() if not f"{name}.".startswith(aside)}
    layers = {name: layer for name, layer in named.items() if isinstance(layer, (nn.Conv2d, nn.Linear))}
    norms = [layer for layer in module.modules() if isinstance(layer, AnyBatchNorm)]
    # Compared by identity, since a parameter that several layers share has several names.
    known = {id(parameter) for layer in (*layers.values(), *norms) for parameter in layer.parameters()}
    unknown = [name for name, parameter in module.named_parameters() if id(parameter) not in known]
    if unknown := [name for name in unknown if not name.startswith(aside)]:
        raise ValueError(
            f"no initialisation is defined for the parameters {unknown}; use Conv2d, Linear and BatchNorm layers"
        )
    return layers


def ordinary_parameters(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a network's ordinary initial values: torch's defaults.

    Weights and biases of convolutions and linear layers are uniform in +-1/sqrt(fan_in), so that their variance is
    1/(3 fan_in). BatchNorm starts with a scale of 1 and a shift of 0.

    Args:
        module: A network of Conv2d, Linear and BatchNorm layers, or one that is `SelfInitialised`, on any device.
        generator: A CPU generator.

    Returns:
        float32 CPU tensors by parameter name, in the order of `module.named_parameters()`.
    """
    if isinstance(module, SelfInitialised):
        state = module.draw_values(generator)
        return {name: state[name] for name, _ in module.named_parameters()}
    values: dict[str, Tensor] = {}
    for name, layer in weighted_layers(module).items():
        bound = 1 / math.sqrt(fan_in(layer))
        for part, parameter in layer.named_parameters():
            values[f"{name}.{part}".lstrip(".")] = torch.empty(parameter.shape).uniform_(
                -bound, bound, generator=generator
            )
    # The remaining parameters belong to BatchNorm: a scale of 1 and a shift of 0.
    for name, parameter in module.named_parameters():
        if name not in values:
            values[name] = torch.full(parameter.shape, float(name.endswith("weight")))
    return {name: values[name] for name, _ in module.named_parameters()}


def initial_state(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a network's initial state: `ordinary_parameters`, and BatchNorm's running means 0 and variances 1.

    Args:
        module: See `ordinary_parameters`.
        generator: A CPU generator.

    Returns:
        float32 CPU tensors by name, in the order of `module.state_dict()`.
    """
    if isinstance(module, SelfInitialised):
        return module.draw_values(generator)
    values = ordinary_parameters(module, generator)
    for name, buffer in module.named_buffers():
        values[name] = torch.full(buffer.shape, float(name.endswith("running_var")))
    return {name: values[name] for name in module.state_dict()}


def initial_model(network: nn.Module, seed: int) -> dict[str, Tensor]:
    """Draw the initial model of a run, which is the same for the server and all clients.

    Args:
        network: The target network, or its feature extractor; see `ordinary_parameters`.
        seed: The run's seed.

    Returns:
        See `initial_state`.
    """
    return initial_state(network, torch_generator(seed, "model"))


def rectifier_parameters(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw initial values that preserve the variance of signals through layers with rectifiers.

    He, Zhang, Ren, Sun: "Delving Deep into Rectifiers", ICCV 2015: weights are normal with variance 2 / fan_in and
    biases are 0. Differences between inputs then keep their size up to the output, while torch's defaults shrink them
    by a factor sqrt(6) per layer.

    Args:
        module: A network of Conv2d and Linear layers and of parts that are `SelfInitialised`, which draw their values
            themselves, on any device.
        generator: A CPU generator.

    Returns:
        float32 CPU tensors by parameter name, in the order of `module.named_parameters()`.
    """
    values: dict[str, Tensor] = {}
    parts = {name: part for name, part in module.named_modules() if isinstance(part, SelfInitialised)}
    for name, part in parts.items():
        values |= {f"{name}.{key}": value for key, value in part.draw_values(generator).items()}
    for name, layer in weighted_layers(module, but=tuple(parts)).items():
        drawn = torch.randn(layer.weight.shape, generator=generator) * math.sqrt(2 / fan_in(layer))
        values |= {f"{name}.weight": drawn, f"{name}.bias": torch.zeros(layer.weight.shape[0])}
    return {name: values[name] for name, _ in module.named_parameters()}
