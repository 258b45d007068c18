"""The hypernetwork of HyperFL: it generates the weights of a feature extractor from a client embedding.

Guo, Zeng, Chen, Zhang, Ren, Zhou, Qu: "A New Federated Learning Framework Against Gradient Inversion Attacks", AAAI
2025, section 3.2 and appendix D.1: one hidden layer and one linear head per target tensor. All heads are stored as ONE
matrix here, which gives the same numbers in a single pass over memory:

    z = relu(W1 v + b1)        theta = z H + c        H in R^{p x P}, c in R^P

with the embedding v (length d), the hidden activation z (length p) and theta the P extractor weights, flat, in the
order of the extractor's `named_parameters()`.

The scaled initialisations follow Chang, Flokas, Lipson: "Principled Weight Initialization for Hypernetworks", ICLR
2020 ("hyperfan-in"): generated weights should have the variance of the target's ordinary initialisation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import Initialisation
from hyperfl_flwr.models.initialisation import SelfInitialised, fan_in, ordinary_parameters, weighted_layers

HEAD_SCALE: Mapping[str, float] = {"hyperfan-bias": 0.1, "hyperfan-weight": 1.0}
"""Standard deviation that H contributes to a generated weight, relative to that of ordinary initial values."""

FIRST_LAYER_SCALE = 8.0
"""Scale of W1 in the hyperfan initialisations: v lies on the unit sphere instead of at norm sqrt(64) = 8."""


class Hypernetwork(nn.Module):
    """Generates the parameters of a feature extractor from an embedding.

    Args:
        extractor: The network to generate parameters for; only names and shapes are used.
        embedding_dim: Length d of the embedding.
        hidden_width: Width p of the hidden layer.
    """

    def __init__(self, extractor: nn.Module, *, embedding_dim: int = 64, hidden_width: int = 128) -> None:
        super().__init__()
        self.shapes = {name: parameter.shape for name, parameter in extractor.named_parameters()}
        num_weights = sum(shape.numel() for shape in self.shapes.values())
        # H alone takes 59 MB for the 28x28 CNN: no memory is used until values are assigned.
        with torch.device("meta"):
            self.hidden = nn.Linear(embedding_dim, hidden_width)
            self.head_weight = nn.Parameter(torch.empty(hidden_width, num_weights))
            self.head_bias = nn.Parameter(torch.empty(num_weights))

    def activation(self, embedding: Tensor) -> Tensor:
        """Return the hidden activation z [..., p] of embeddings [..., d]."""
        return torch.relu(self.hidden(embedding))

    def forward(self, embedding: Tensor) -> Tensor:
        """Return theta, flat: [P] of an embedding [d], [B, P] of B embeddings [B, d]."""
        hidden = self.activation(embedding)
        if hidden.ndim == 2:
            return torch.addmm(self.head_bias, hidden, self.head_weight)
        return torch.addmv(self.head_bias, self.head_weight.t(), hidden)

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """Return views of a flat theta [P] as the extractor's parameters, by name."""
        parts = torch.split(theta, [shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


@dataclass(frozen=True, kw_only=True)
class HypernetworkHealth:
    """Measurements of the hidden layer: if it is dead (z = 0), every client's theta is the head bias."""

    squared_norm: float
    """|z|^2; the step on theta is (1 + |z|^2) times the learning rate."""
    active_units: int
    """Number of hidden units with z > 0."""
    theta: Tensor
    """The generated weights, flat [P]."""

    @property
    def weight_norm(self) -> float:
        """|theta|_2."""
        return float(self.theta.norm())


@torch.no_grad()
def health(hypernetwork: Hypernetwork, embedding: Tensor, theta: Tensor | None = None) -> HypernetworkHealth:
    """Measure a hypernetwork at an embedding [d].

    Args:
        hypernetwork: The hypernetwork.
        embedding: The embedding.
        theta: The generated weights [P], if they are known; None to generate them.
    """
    hidden = hypernetwork.activation(embedding)
    if theta is None:
        theta = torch.addmv(hypernetwork.head_bias, hypernetwork.head_weight.t(), hidden)
    return HypernetworkHealth(
        squared_norm=float(hidden.square().sum()),
        active_units=int((hidden > 0).sum()),
        theta=theta,
    )


def initial_embedding(embedding_dim: int, initialisation: Initialisation, generator: torch.Generator) -> Tensor:
    """Draw an initial embedding [d]: standard normal, on the unit sphere unless `initialisation` is `torch`."""
    embedding = torch.randn(embedding_dim, generator=generator)
    return embedding if initialisation == "torch" else embedding / embedding.norm()


def common_embedding(embedding_dim: int, initialisation: Initialisation, seed: int) -> Tensor:
    """Return the embedding [d] that all clients of a run start from."""
    return initial_embedding(embedding_dim, initialisation, torch_generator(seed, "embedding"))


def initial_hidden(hidden: nn.Linear, initialisation: Initialisation, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw the initial `weight` [p, d] and `bias` [p] of a hypernetwork's first layer.

    These are the first numbers that are drawn from a run's generator of the hypernetwork, so that `frozen_hidden` can
    draw them again without the heads.

    Args:
        hidden: The first layer; only its shape is used.
        initialisation: See `Initialisation`.
        generator: A CPU generator.
    """
    values = ordinary_parameters(hidden, generator)
    if initialisation != "torch":
        values["weight"] *= FIRST_LAYER_SCALE
    return values


def frozen_hidden(embedding_dim: int, hidden_width: int, initialisation: Initialisation, seed: int) -> Tensor:
    """Return the hidden activation z [p] of a run's common embedding under its initial first layer."""
    layer = nn.Linear(embedding_dim, hidden_width, device="meta")
    values = initial_hidden(layer, initialisation, torch_generator(seed, "hypernetwork"))
    v = common_embedding(embedding_dim, initialisation, seed)
    return torch.relu(values["weight"] @ v + values["bias"])


def initial_hypernetwork(
    hypernetwork: Hypernetwork,
    extractor: nn.Module,
    initialisation: Initialisation,
    embedding: Tensor,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Draw a hypernetwork's initial parameters.

    Args:
        hypernetwork: The hypernetwork; only names and shapes are used.
        extractor: The network to generate parameters for.
        initialisation: See `Initialisation`.
        embedding: The common initial embedding [d], at which the scale of the generated weights is set.
        generator: A CPU generator.

    Returns:
        float32 CPU tensors by parameter name.
    """
    values = initial_hidden(hypernetwork.hidden, initialisation, generator)
    weight, bias = values["weight"], values["bias"]
    hidden = torch.relu(weight @ embedding + bias)
    head_weight = torch.empty(hypernetwork.head_weight.shape)
    if initialisation == "torch":
        bound = 1 / math.sqrt(head_weight.shape[0])
        head_weight.uniform_(-bound, bound, generator=generator)
        head_bias = torch.empty(hypernetwork.head_bias.shape).uniform_(-bound, bound, generator=generator)
    else:
        ordinary = ordinary_parameters(extractor, generator)
        head_bias = torch.cat([value.flatten() for value in ordinary.values()])
        # Uniform in +-bound has the variance bound^2 / 3, and theta - c = z H the variance |z|^2 times that of H.
        # If no unit of a narrow layer is active at the common embedding, H has no effect yet and any scale will do.
        norm = float(hidden.norm()) or 1.0
        bounds = (
            _drawn_bounds(ordinary)
            if isinstance(extractor, SelfInitialised)
            else _ordinary_bounds(hypernetwork, extractor)
        )
        bound_of_weight = HEAD_SCALE[initialisation] * bounds / norm
        head_weight.uniform_(-1, 1, generator=generator).mul_(bound_of_weight)
        if initialisation == "hyperfan-weight":
            head_bias = _means(ordinary) if isinstance(extractor, SelfInitialised) else head_bias.zero_()
    return {"head_weight": head_weight, "head_bias": head_bias, "hidden.weight": weight, "hidden.bias": bias}


def _ordinary_bounds(hypernetwork: Hypernetwork, extractor: nn.Module) -> Tensor:
    """Return the bound 1/sqrt(fan_in) of each generated weight's ordinary uniform distribution, [P]."""
    bounds = {name: 1 / math.sqrt(fan_in(layer)) for name, layer in weighted_layers(extractor).items()}
    return torch.cat(
        [torch.full((shape.numel(),), bounds[name.rpartition(".")[0]]) for name, shape in hypernetwork.shapes.items()]
    )


def _drawn_bounds(values: Mapping[str, Tensor]) -> Tensor:
    """Return each generated weight's bound of a uniform distribution with the parameter's standard deviation, [P].

    The bound is 0 for constant parameters.
    """
    return torch.cat([(math.sqrt(3) * value.std(correction=0)).expand(value.numel()) for value in values.values()])


def _means(values: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of each weight's parameter, [P]; for a constant parameter (a norm's scale) its value."""
    return torch.cat([value.mean().expand(value.numel()) for value in values.values()])
