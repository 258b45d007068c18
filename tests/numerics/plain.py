"""References for the tests in this folder: the papers' formulas in float64, written as plainly as possible.

Nothing here imports the project's training or models. Gradients come from `torch.autograd.grad`, the optimiser is
written out, and forward passes use `torch.nn.functional` on tensors by name.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Tensors = dict[str, Tensor]
CLIP_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_ multiplies by min(1, clip / (norm + 1e-6))."""


@dataclass
class Samples:
    """Training data that record which samples each batch held, through an augmentation that changes nothing."""

    train_images: Tensor
    train_labels: Tensor
    seen: list[Tensor] = field(default_factory=list)
    train_weights: None = None

    @property
    def augmentation(self) -> "Samples":
        return self

    def draw(self, sizes: Sequence[int], rng: np.random.Generator) -> Tensor:
        return torch.zeros(sum(sizes))

    def __call__(self, images: Tensor, drawn: Tensor) -> Tensor:
        same = (images[:, None] == self.train_images[None]).flatten(2).all(dim=2)
        assert (same.sum(dim=1) == 1).all(), "the images of a batch are not those of the data"
        self.seen.append(same.int().argmax(dim=1))
        return images

    def batches(self, seen: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for index in seen:
            yield self.train_images[index], self.train_labels[index]


def random_samples(num: int, shape: tuple[int, int, int], num_classes: int, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.standard_normal((num, *shape)))
    return Samples(images, torch.from_numpy(rng.integers(0, num_classes, num)))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of log sum_k exp(l_k) - l_y."""
    return (torch.logsumexp(logits, dim=1) - logits[torch.arange(len(labels)), labels]).mean()


@dataclass
class Sgd:
    """b <- m b + clip(g) + w p;  p <- p - rate b;  b is zero at first. `clip` bounds the norm over all tensors."""

    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = math.inf
    buffers: Tensors = field(default_factory=dict)

    def step(self, values: Tensors, loss: Tensor, names: Sequence[str], *, retain: bool = False) -> Tensors:
        gradients = torch.autograd.grad(loss, [values[name] for name in names], retain_graph=retain)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        scale = min(1.0, self.clip / (norm + CLIP_EPSILON))
        new = dict(values)
        for name, gradient in zip(names, gradients, strict=True):
            direction = scale * gradient + self.weight_decay * values[name].detach()
            self.buffers[name] = self.momentum * self.buffers.get(name, torch.zeros_like(direction)) + direction
            new[name] = values[name].detach() - self.rate * self.buffers[name]
        return new


def leaves(values: Mapping[str, Tensor], names: Sequence[str]) -> Tensors:
    """Return copies of the values; those with the given names require gradients."""
    return {name: value.detach().clone().requires_grad_(name in names) for name, value in values.items()}


def digits_cnn(images: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Return features of the CNN for 8x8 images: two padded 3x3 convolutions and a linear layer."""
    hidden = images
    for layer in ("conv1", "conv2"):
        hidden = functional.conv2d(hidden, values[f"{layer}.weight"], values[f"{layer}.bias"], padding=1)
        hidden = functional.max_pool2d(functional.leaky_relu(hidden, 0.01), 2)
    return functional.leaky_relu(hidden.flatten(1) @ values["fc.weight"].T + values["fc.bias"], 0.01)


HYPERNETWORK = ("head_weight", "head_bias", "hidden.weight", "hidden.bias")
CLASSIFIER = ("classifier.weight", "classifier.bias")


@dataclass(kw_only=True)
class HyperFLRound:
    """Algorithm 1 of HyperFL (client) with one vector theta, split into tensors in the order of `shapes`.

    Args:
        features: Function of images and generated tensors by name that returns the features.
        shapes: Shapes of the generated tensors, in order.
    """

    features: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    shapes: Mapping[str, Sequence[int]]
    momentum: float
    weight_decay: float
    clip: float
    classifier_rate: float
    hypernetwork_rate: float
    embedding_rate: float

    def theta(self, values: Tensors) -> Tensor:
        hidden = (values["hidden.weight"] @ values["v"] + values["hidden.bias"]).clamp(min=0)
        return hidden @ values["head_weight"] + values["head_bias"]

    def loss(self, values: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        theta, generated, start = self.theta(values), {}, 0
        for name, shape in self.shapes.items():
            stop = start + math.prod(shape)
            generated[name] = theta[start:stop].reshape(tuple(shape))
            start = stop
        logits = self.features(images, generated) @ values["classifier.weight"].T + values["classifier.bias"]
        return cross_entropy(logits, labels)

    def run(
        self, values: Tensors, data: Samples, step1: Sequence[Tensor], step2: Sequence[Tensor], *, frozen: bool = False
    ) -> Tensors:
        """Return all values after the batches of step 1 (classifier) and of step 2 (hypernetwork, embedding)."""
        common = {"momentum": self.momentum, "weight_decay": self.weight_decay}
        optimiser = Sgd(self.classifier_rate, **common)
        for images, labels in data.batches(step1):
            values = leaves(values, CLASSIFIER)
            values = optimiser.step(values, self.loss(values, images, labels), CLASSIFIER)
        trained = HYPERNETWORK[:2] if frozen else HYPERNETWORK
        of_hypernetwork = Sgd(self.hypernetwork_rate, clip=self.clip, **common)
        of_embedding = Sgd(self.embedding_rate, clip=self.clip, **common)
        for images, labels in data.batches(step2):
            values = leaves(values, [*trained, "v"])
            loss = self.loss(values, images, labels)
            new = of_hypernetwork.step(values, loss, trained, retain=True)
            if not frozen:
                new["v"] = of_embedding.step(values, loss, ["v"])["v"]
            values = {name: value.detach() for name, value in new.items()}
        return values
