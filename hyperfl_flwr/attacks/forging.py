"""Shared parts of the attacks of a malicious server, which sends forged parameters and reads images off the reply.

A fully connected layer a = W u + b has for each of its rows j the gradients

    dL/dW_j = sum_n delta_nj u_n      dL/db_j = sum_n delta_nj      delta_nj = dL/da_nj

If the server arranges that a single image n contributes to a row, the ratio of the two is u_n, exactly. The attacks
forge the first fully connected layer of the feature extractor for that. No server can add a layer, as the clients build
the network from the run's settings, so what is below this layer decides what u_n says about the image:

- Nothing with parameters (perceptrons): u_n is the image.
- Convolutions: `pass_through` forges them so that rectifiers change nothing. Max pooling cannot be undone: each number
  that passes is the largest of four. So at most as many numbers come through as the layer has inputs, 800 of the 784
  pixels at 28x28 and 576 of the 3,072 numbers at 3x32x32 (cnn), each known up to the pooling. `Decoder` estimates the
  image from them by linear regression on public images of the same kind.

HyperFL's clients generate their extractor from a private embedding v: theta = z H + c, z = relu(W1 v + b1). With W1 = 0
and b1 = -1 the server makes z zero, and theta is the head bias c for every v: the forged extractor.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hyperfl_flwr.attacks.base import AttackSettings, FloatArray, Reconstruction, build_structure, to_pixels
from hyperfl_flwr.attacks.knowledge import PublicImages, PublicKnowledge
from hyperfl_flwr.attacks.readout import (
    CLASSIFIER,
    EXTRACTOR,
    Readout,
    extractor_shapes,
    named_extractor,
    read_out,
    target_names,
)
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.runs.observation import Arrays, Observation

Forge = Callable[[Arrays, PublicKnowledge, PublicImages, int], Arrays]
"""Makes what a malicious server sends, from what an honest one would send, by `group/name`.

Further arguments: public knowledge, public images of the clients' kind, and the number of training samples in the
upload that the server will read. The result has the same names, shapes and types."""

BACKWARD = 0.1
"""Assumed size of dL/da of one image at a unit that is followed by layers with initial values."""

_SIZE = 0.1
"""Length of each forged filter. What several steps change in it, relative to its length, grows with its square."""

_RIDGE = 0.1
"""Ridge of the decoder, relative to the mean variance of its inputs."""

_LEAST_VARIANCE = 1e-12

_RECTIFIERS = (nn.ReLU, nn.LeakyReLU)


@dataclass(frozen=True, kw_only=True)
class FirstLinear:
    """The first fully connected layer of a feature extractor, and its surroundings.

    Attributes:
        below: The layers below it, of which only convolutions have parameters.
        name: Its name in the target network, such as `extractor.fc1`.
        above: Names of the fully connected layers above it in the target network, the classifier last.
        shapes: Shapes of the target network's parameters, by name.
    """

    below: nn.Sequential
    name: str
    above: tuple[str, ...]
    shapes: Mapping[str, torch.Size]

    @property
    def width(self) -> int:
        """Number m of its rows."""
        return self.shapes[f"{self.name}.weight"][0]

    def inputs(self, parameters: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the layer's inputs u [B, D] for normalised images [B, C, H, W].

        Args:
            parameters: Parameters by the target's names, with all of the layers below.
            images: The images.
        """
        values = {name: parameters[f"{EXTRACTOR}.{name}"].to(images) for name, _ in self.below.named_parameters()}
        inputs: Tensor = functional_call(self.below, values, (images,))
        return inputs

    def rows(self, readout: Readout) -> Tensor:
        """Return the gradient of the layer, [dL/dW | dL/db] [m, D + 1] in float64, of a readout."""
        weight, bias = (readout.gradient[f"{self.name}.{part}"].double() for part in ("weight", "bias"))
        return torch.cat([weight, bias[:, None]], dim=1)


def first_linear(knowledge: PublicKnowledge) -> FirstLinear:
    """Find the layer that the attacks forge in a run's target network.

    Raises:
        ValueError: If the extractor is no sequence of convolutions, pooling, rectifiers, and fully connected layers,
            each followed by a rectifier.
    """
    target = build_structure(knowledge)
    extractor = target.extractor
    linear = [name for name, layer in extractor.named_children() if isinstance(layer, nn.Linear)]
    if not isinstance(extractor, nn.Sequential) or not linear or not _is_known(extractor):
        raise ValueError(
            "forged weights need an extractor that is a sequence of convolutions and of fully connected layers with "
            "biases, each followed by a rectifier, without normalisation layers"
        )
    names = [name for name, _ in extractor.named_children()]
    return FirstLinear(
        below=extractor[: names.index(linear[0])],
        name=f"{EXTRACTOR}.{linear[0]}",
        above=(*(f"{EXTRACTOR}.{name}" for name in linear[1:]), CLASSIFIER),
        shapes={name: parameter.shape for name, parameter in target.named_parameters()},
    )


def _is_known(extractor: nn.Sequential) -> bool:
    """Return whether the layers are convolutions, then linear ones with rectifiers, and layers without parameters."""
    weighted = [layer for layer in extractor if any(True for _ in layer.parameters())]
    kinds, biased = [type(layer) for layer in weighted], all(len(list(layer.parameters())) == 2 for layer in weighted)
    number = kinds.count(nn.Conv2d)
    rectified = [isinstance(after, _RECTIFIERS) for layer, after in pairwise(extractor) if isinstance(layer, nn.Linear)]
    ordered = kinds == [nn.Conv2d] * number + [nn.Linear] * (len(kinds) - number)
    rectified_all = len(rectified) == len(kinds) - number and all(rectified)
    return ordered and biased and rectified_all and not list(extractor.buffers())


def check_first_linear(knowledge: PublicKnowledge) -> None:
    """Check that an attack can forge a run's target network; raises a ValueError like `first_linear`."""
    first_linear(knowledge)


def normalised(images: FloatArray, knowledge: PublicKnowledge) -> Tensor:
    """Return pixels [m, C, H, W] in [0, 1] as the clients normalise them."""
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (knowledge.mean, knowledge.std))
    return (torch.from_numpy(images) - mean) / std


@torch.no_grad()
def pass_through(layer: FirstLinear, images: Tensor) -> dict[str, Tensor]:
    """Forge the convolutions below a layer so that their rectifiers change nothing, and the pooling loses little.

    The filters of each convolution are random and orthonormal, and its biases are such that no output for the images is
    negative.

    Args:
        layer: The layer above the convolutions.
        images: Normalised public images [m, C, H, W].

    Returns:
        float32 tensors by the target's names; empty if there are no convolutions.
    """
    values: dict[str, Tensor] = {}
    outputs = images
    for name, below in layer.below.named_children():
        if isinstance(below, nn.Conv2d):
            generator = torch_generator(0, "pass-through", len(values))
            flat = torch.randn(below.out_channels, below.weight[0].numel(), generator=generator)
            is_wide = flat.shape[0] > flat.shape[1]
            basis = torch.linalg.qr(flat if is_wide else flat.T)[0]
            weight = _SIZE * (basis if is_wide else basis.T).reshape(below.weight.shape).contiguous()
            plain = functional_call(below, {"weight": weight, "bias": torch.zeros(len(weight))}, (outputs,))
            bias = -plain.amin(dim=(0, 2, 3))
            values |= {f"{EXTRACTOR}.{name}.weight": weight, f"{EXTRACTOR}.{name}.bias": bias}
            outputs = plain + bias[:, None, None]
        else:
            outputs = below(outputs)
    return values


def first_component(inputs: Tensor) -> Tensor:
    """Return the first principal component [D] of the rows of a float64 matrix [m, D], of unit length.

    It is computed from the smaller of covariance and Gram matrix, as an image can have many more pixels than there are
    public images.
    """
    if inputs.shape[1] <= len(inputs):
        whole: Tensor = torch.linalg.eigh(torch.cov(inputs.T))[1][:, -1]
        return whole
    centered = inputs - inputs.mean(dim=0)
    found: Tensor = centered.T @ torch.linalg.eigh(centered @ centered.T)[1][:, -1]
    found /= found.norm()
    return found


class Decoder:
    """Estimates images from what passes the layers below a fully connected layer.

    Without parameters below it, the layer's inputs are the image. Otherwise the estimate is linear in them, fitted to
    public images by ridge regression.

    Args:
        layer: The layer.
        parameters: Parameters by the target's names.
        images: Normalised public images [m, C, H, W].
    """

    @torch.no_grad()
    def __init__(self, layer: FirstLinear, parameters: Mapping[str, Tensor], images: Tensor) -> None:
        self.shape = images.shape[1:]
        self.is_exact = not any(True for _ in layer.below.parameters())
        if self.is_exact:
            return
        inputs, flat = layer.inputs(parameters, images).double(), images.flatten(1).double()
        self.center, self.mean = inputs.mean(dim=0), flat.mean(dim=0)
        inputs, flat = inputs - self.center, flat - self.mean
        ridge = _RIDGE * inputs.square().sum(dim=0).mean().clamp(min=_LEAST_VARIANCE)
        # (X^T X + r)^-1 X^T Y = X^T (X X^T + r)^-1 Y: the smaller system, and factors instead of their product.
        self.factors: tuple[Tensor, ...]
        if inputs.shape[1] <= len(inputs):
            self.factors = (torch.linalg.solve(_with_ridge(inputs.T @ inputs, ridge), inputs.T @ flat),)
        else:
            self.factors = (inputs.T, torch.linalg.solve(_with_ridge(inputs @ inputs.T, ridge), flat))

    def images(self, inputs: Tensor) -> Tensor:
        """Return normalised images [r, C, H, W] of inputs u [r, D]; numbers that are not finite count as 0."""
        inputs = inputs.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        if not self.is_exact:
            inputs = inputs - self.center
            for factor in self.factors:
                inputs = inputs @ factor
            inputs = inputs + self.mean
        return inputs.reshape(-1, *self.shape).float()


def _with_ridge(products: Tensor, ridge: Tensor) -> Tensor:
    return products + ridge * torch.eye(len(products)).to(products)


def with_values(sent: Arrays, values: Mapping[str, Tensor], knowledge: PublicKnowledge) -> Arrays:
    """Return the arrays to send with parameters of the target network replaced.

    A hypernetwork is forged so that it generates the extractor for every embedding; parameters without a new value are
    then those of its head biases.

    Args:
        sent: Arrays that an honest server would send, by `group/name`.
        values: New values by the target's names; those of groups that are not sent are left out.
        knowledge: Public knowledge of the run.
    """
    forged = dict(sent)
    if "hypernetwork/head_bias" in sent:
        theta = torch.from_numpy(np.array(sent["hypernetwork/head_bias"], dtype=np.float32))
        own = {**named_extractor(theta, knowledge), **values}
        flat = torch.cat([own[f"{EXTRACTOR}.{name}"].flatten() for name in extractor_shapes(knowledge)])
        hidden = {"hidden.weight": 0.0, "hidden.bias": -1.0}
        new = {f"hypernetwork/{name}": np.full_like(sent[f"hypernetwork/{name}"], v) for name, v in hidden.items()}
        return forged | new | {"hypernetwork/head_bias": flat.numpy().astype(sent["hypernetwork/head_bias"].dtype)}
    for key, name in target_names(sent).items():
        if name in values:
            forged[key] = values[name].numpy().astype(sent[key].dtype).reshape(sent[key].shape)
    return forged


def read_rows(
    observations: Sequence[Observation],
    knowledge: PublicKnowledge,
    settings: AttackSettings,
    combined: Callable[[Tensor], Tensor],
) -> list[Reconstruction]:
    """Read images off the gradient of the forged layer.

    Args:
        observations: Observations of clients that have received forged arrays, or one of their sum.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; only `public_images` is used.
        combined: Maps the layer's gradient [dL/dW | dL/db] [m, D + 1] to rows [r, D + 1] that hold one image each.

    Returns:
        r images for each observation; of a row without a gradient, the one that normalisation makes 0.

    Raises:
        ValueError: If there are no public images, or `first_linear` refuses the target network.
    """
    if settings.public_images is None:
        raise ValueError("attacks of a malicious server need public images, got none")
    layer, public = first_linear(knowledge), normalised(settings.public_images, knowledge)
    decoder: Decoder | None = None
    results = []
    for observation in observations:
        began = time.perf_counter()
        readout = read_out(observation, knowledge)
        decoder = decoder or Decoder(layer, readout.parameters, public)
        rows = combined(layer.rows(readout))
        images = to_pixels(decoder.images(rows[:, :-1] / rows[:, -1:]), knowledge)
        findings = {"rows": float(len(rows)), "rows-with-gradient": float(rows.any(dim=1).sum())}
        results.append(Reconstruction(images=images, seconds=time.perf_counter() - began, findings=findings))
    return results
