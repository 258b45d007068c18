"""Clip the gradient of each sample of a batch, and add them up.

This is the sum of DP-SGD (Abadi et al.: "Deep Learning with Differential Privacy", CCS 2016, algorithm 1). It needs
every sample's gradient norm, of which autograd computes none. For convolutions and linear layers, the gradients follow
in closed form from a layer's input a and the gradient g of the sample's loss with respect to the layer's output, so
that one forward and one backward pass suffice:

- linear: the gradient of weight and bias is g (a, 1)^T, its squared norm is |g|^2 (|a|^2 + 1) (Goodfellow: "Efficient
  Per-Example Gradient Computations", 2015), and a clipped sum is one product of matrices;
- convolution: g U^T, with the windows U of the input as columns (Rochette, Manoel, Tramel: "Efficient Per-Example
  Gradient Computations in Convolutional Neural Networks", 2019).

Other layers need `torch.func.vmap`. Layers that mix the samples of a batch are refused: one sample would change the
gradients of the others, and clipping would bound nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from hyperfl_flwr.models.layers.batchnorm import AnyBatchNorm
from hyperfl_flwr.models.layers.dropout import Dropout
from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.training.layer_uses import Use, recording
from hyperfl_flwr.training.sample_gradients import Explicit, Factored, Part, clipped
from hyperfl_flwr.training.window_gradients import convolution_gradients, linear_gradients

LARGEST = 2**26
"""Largest number of gradients that are kept at a time; larger batches are computed in parts."""

_PROBES = 3
"""Number of random samples that test a network."""

_TOLERANCE = 1e-4
"""Largest difference of two results for the random samples, relative to the largest value, that counts as rounding."""


@dataclass(frozen=True, kw_only=True)
class ClippedSums:
    """The sums of a batch.

    Attributes:
        sums: Sum of the clipped gradients for each parameter, of its shape.
        losses: The samples' cross-entropies [B], in nats.
    """

    sums: list[Tensor]
    losses: Tensor


class PerExampleGradients:
    """Computes clipped sums of the gradients of the cross-entropy, sample by sample.

    The network is tested with random samples first, which do not depend on the training data.

    Args:
        network: Maps samples [B, ...] to logits [B, K]; in the mode in which it is trained.
        parameters: Parameters of the network, which require gradients; each sample's gradients of all of them are
            clipped together.
        like: Samples [1, ...] with the shape, type and device of the training samples; their values are not used.

    Raises:
        ValueError: If a sample's logits depend on other samples of its batch or are random, or if a layer is supported
            neither in closed form nor by `torch.func.vmap`.
    """

    def __init__(self, network: nn.Module, parameters: Sequence[Tensor], like: Tensor) -> None:
        self._network, self._parameters = network, list(parameters)
        # A fixed local generator: the test neither depends on nor advances other random numbers.
        probes = torch.randn((_PROBES, *like.shape[1:]), generator=torch.Generator().manual_seed(0)).to(like)
        _refuse_mixing(network, probes)
        labels = _probe_labels(network, probes)
        self._layers = _trained_layers(network, self._parameters)
        self._kept = sum(parameter.numel() for parameter in self._parameters)
        if self._layers is not None and not self._fits(probes, labels):
            self._layers = None
        if self._layers is None:
            self._try_vmap(probes, labels)

    @property
    def in_closed_form(self) -> bool:
        """Whether the gradients are computed in closed form; otherwise by `torch.func.vmap`."""
        return self._layers is not None

    def clipped_sums(self, images: Tensor, labels: Tensor, clip_norm: float) -> ClippedSums:
        """Return the sum over a batch of g min(1, C / |g|), where g is a sample's gradient and |g| its norm.

        A sample of which the gradient is not finite, or the squared norm overflows, counts as zero: an error, or a sum
        that is not finite, would reveal it.

        Args:
            images: Samples [B, ...]; B may be 0.
            labels: Their labels [B].
            clip_norm: Clipping norm C, above 0.

        Raises:
            ValueError: If `clip_norm` is not positive.
        """
        if not clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, got {clip_norm}")
        if not len(images):
            return ClippedSums(sums=[torch.zeros_like(each) for each in self._parameters], losses=images.new_zeros(0))
        size = max(1, LARGEST // max(1, self._kept))
        sums, losses = [], []
        for some, truth in zip(torch.split(images, size), torch.split(labels, size), strict=True):
            parts, found = self._gradients(some, truth)
            sums.append(clipped(parts, clip_norm))
            losses.append(found)
        return ClippedSums(
            sums=[sum(column[1:], column[0]) for column in zip(*sums, strict=True)], losses=torch.cat(losses)
        )

    def norms(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the norm of each sample's gradient [B], float64; arguments are those of `clipped_sums`."""
        size = max(1, LARGEST // max(1, self._kept))
        chunks = zip(torch.split(images, size), torch.split(labels, size), strict=True)
        squares = [
            torch.stack([part.squared_norms() for part in self._gradients(*chunk)[0]]).sum(0) for chunk in chunks
        ]
        return torch.cat(squares).sqrt()

    def _gradients(self, images: Tensor, labels: Tensor) -> tuple[list[Part], Tensor]:
        if self._layers is None:
            return self._by_vmap(images, labels)
        uses, losses = self._recorded(self._layers, images, labels)
        return self._by_layers(self._layers, uses, losses), losses.detach()

    def _recorded(
        self, layers: Mapping[nn.Module, list[int]], images: Tensor, labels: Tensor
    ) -> tuple[list[Use], Tensor]:
        """Run the network, and return the uses of its trained layers and the losses [B], with their graph."""
        with torch.enable_grad(), recording(layers) as uses:
            losses = loss_of(self._network(images), labels, reduction="none")
        return uses, losses

    def _by_layers(
        self, layers: Mapping[nn.Module, list[int]], uses: Sequence[Use], losses: Tensor, *, keep: bool = False
    ) -> list[Part]:
        """Return the gradients of each parameter in closed form; `keep` keeps the graph."""
        edges = [use.edge for use in uses]
        # Only the outputs are asked for, so autograd computes no gradients of weights.
        found = torch.autograd.grad(losses.sum(), edges, retain_graph=keep, allow_unused=True)
        parts: list[Part] = []
        for layer, numbers in layers.items():
            mine = [(use.inputs, g) for use, g in zip(uses, found, strict=True) if use.layer is layer and g is not None]
            parts.append(_part_of(layer, numbers, mine, [self._parameters[number] for number in numbers], len(losses)))
        return parts

    def _fits(self, probes: Tensor, labels: Tensor) -> bool:
        """Return whether the closed form agrees with autograd for each sample; also count the gradients that it keeps.

        It does not if a layer's parameters are used without calling the layer, or if the first dimension of a layer's
        input is not that of the samples.
        """
        assert self._layers is not None
        uses, losses = self._recorded(self._layers, probes, labels)
        if any(len(use.inputs) != _PROBES for use in uses):
            return False
        parts = self._by_layers(self._layers, uses, losses, keep=True)
        self._kept = sum(part.kept for part in parts) // _PROBES
        for row, only in enumerate(torch.eye(_PROBES, dtype=torch.float64, device=probes.device)):
            found: dict[int, Tensor] = {}
            for part in parts:
                found |= part.sums(only)
            right = torch.autograd.grad(losses[row], self._parameters, retain_graph=True, allow_unused=True)
            expected = [torch.zeros_like(p) if g is None else g for p, g in zip(self._parameters, right, strict=True)]
            sides = ([found[number] for number in sorted(found)], expected)
            if not _close(*(torch.cat([each.flatten() for each in side]) for side in sides)):
                return False
        return True

    def _try_vmap(self, probes: Tensor, labels: Tensor) -> None:
        try:
            self._by_vmap(probes, labels)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"torch.func.vmap cannot compute the gradients of single samples through this network: {error}; use "
                f"layers that it supports, for example Conv2d and Linear"
            ) from error

    def _by_vmap(self, images: Tensor, labels: Tensor) -> tuple[list[Part], Tensor]:
        wanted = {id(parameter) for parameter in self._parameters}
        names = {id(value): name for name, value in self._network.named_parameters() if id(value) in wanted}
        values = {names[id(parameter)]: parameter.detach() for parameter in self._parameters}

        def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(self._network, parameters, (image.unsqueeze(0),))
            return loss_of(logits, label.unsqueeze(0))

        each = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")
        with torch.no_grad():
            gradients, losses = each(values, images, labels)
        found = {number: gradients[names[id(parameter)]] for number, parameter in enumerate(self._parameters)}
        return [Explicit(found)], losses


@torch.no_grad()
def _probe_labels(network: nn.Module, probes: Tensor) -> Tensor:
    """Return labels of the probes: classes, or numbers where a single output would make every gradient zero."""
    outputs = network(probes).shape[-1]
    if outputs > 1:
        return torch.zeros(len(probes), dtype=torch.int64, device=probes.device)
    return torch.zeros((len(probes), 1), dtype=probes.dtype, device=probes.device)


def _trained_layers(network: nn.Module, parameters: Sequence[Tensor]) -> dict[nn.Module, list[int]] | None:
    """Return the layers of some parameters, with the parameters' numbers; None if there is no closed form.

    There is none if a parameter belongs to another kind of layer, or to several layers.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    layers: dict[nn.Module, list[int]] = {}
    for layer in network.modules():
        if found := [numbers[id(value)] for value in layer.parameters(recurse=False) if id(value) in numbers]:
            layers[layer] = found
    owned = sorted(number for found in layers.values() for number in found)
    return layers if all(map(_is_known, layers)) and owned == list(range(len(parameters))) else None


def _is_known(layer: nn.Module) -> bool:
    return any(isinstance(layer, kind) and type(layer).forward is kind.forward for kind in (nn.Conv2d, nn.Linear))


def _part_of(
    layer: nn.Module, numbers: Sequence[int], uses: Sequence[tuple[Tensor, Tensor]], like: Sequence[Tensor], batch: int
) -> Part:
    """Return the gradients of a layer's parameters from its inputs and the gradients of its outputs."""
    of = {id(parameter): number for parameter, number in zip(like, numbers, strict=True)}
    weight, bias = (of.get(id(getattr(layer, name))) for name in ("weight", "bias"))
    if isinstance(layer, nn.Linear) and len(uses) == 1 and uses[0][0].ndim == 2:
        return Factored(*uses[0], weight, bias)
    total: dict[int, Tensor] = {}
    for inputs, outputs in uses:
        if isinstance(layer, nn.Conv2d):
            both = convolution_gradients(layer, inputs, outputs)
        else:
            both = linear_gradients(inputs, outputs)
        for number, found in zip((weight, bias), both, strict=True):
            if number is not None:
                # A layer that is used several times has the sum of the gradients of its uses.
                total[number] = total[number] + found if number in total else found
    unused = {number: each.new_zeros(batch, *each.shape) for number, each in zip(numbers, like, strict=True)}
    return Explicit(total or unused)


def _refuse_mixing(network: nn.Module, probes: Tensor) -> None:
    """Refuse a network if a sample's logits depend on the other samples of its batch."""
    norms = [layer for layer in network.modules() if isinstance(layer, AnyBatchNorm)]
    way_out = "use a target whose layers treat each sample separately, for example with GroupNorm"
    if any(layer.training or layer.running_mean is None for layer in norms):
        raise ValueError(
            f"BatchNorm normalises a sample by the other samples of its batch, so that clipping one sample's gradient "
            f"does not bound its effect; {way_out}"
        )
    dropouts = [layer for layer in network.modules() if isinstance(layer, Dropout) and layer.training]
    for layer in dropouts:
        layer.eval()
    try:
        with torch.no_grad():
            together, apart = network(probes), torch.cat([network(probe) for probe in torch.split(probes, 1)])
    finally:
        for layer in dropouts:
            layer.train()
    if not _close(together, apart):
        raise ValueError(
            f"the network's logits of a sample depend on the other samples of its batch, or are random, so that "
            f"clipping one sample's gradient does not bound its effect; {way_out}"
        )


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(other.abs().max()) if other.numel() else 0.0
    return math.isfinite(scale) and bool((one - other).abs().max() <= _TOLERANCE * scale)
