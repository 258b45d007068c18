"""The local round of HyperFL (Guo et al., AAAI 2025, algorithm 1, equations 4 to 6).

    theta = h(v; varphi)
    step 1: one epoch on the classifier phi, theta fixed            (rate eta_g)
    step 2: E epochs on (varphi, v), phi fixed                      (rates eta_h, eta_v)

Where the paper leaves a choice open, its public code is followed: the gradients of varphi and of v are clipped to norm
50 separately, weight decay also acts on v, and every round starts with empty momentum buffers.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hyperfl_flwr.core.optimisers import SGD
from hyperfl_flwr.models.applied import AppliedNetwork
from hyperfl_flwr.models.hypernetwork import Hypernetwork
from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.training.factored_sgd import FactoredHeads
from hyperfl_flwr.training.fedrep import FedRepRates
from hyperfl_flwr.training.local_sgd import (
    Epochs,
    MeanLoss,
    ParameterSet,
    Predict,
    TrainingData,
    all_passes,
    train_epochs,
)
from hyperfl_flwr.training.shared_heads import HeadProduct, Heads, HeadSteps, finish_alone
from hyperfl_flwr.training.stacked_sgd import train_in_cohort


@dataclass(frozen=True, kw_only=True)
class HyperFLRates:
    """Step sizes of HyperFL's local round.

    Attributes:
        classifier: Step size eta_g of the classifier.
        hypernetwork: Step size eta_h of the hypernetwork.
        embedding: Step size eta_v of the embedding.
        clip_norm: Largest gradient norm of varphi, and of v; 0 does not clip.
        factored: Whether the heads are updated without forming their gradients: equal up to rounding, and faster.
    """

    classifier: float
    hypernetwork: float
    embedding: float
    clip_norm: float = 50.0
    factored: bool = True


def as_fedrep(rates: HyperFLRates, weight_decay: float, squared_norm: float) -> FedRepRates:
    """Return the settings with which FedRep's round is equivalent, in theta and phi, to HyperFL's with a constant z.

    Since theta = z H + c, a step of rate eta on H and c moves theta by (1 + |z|^2) eta times its gradient. The norm of
    the gradient of H and c is sqrt(1 + |z|^2) times that of theta's, and decaying H and c decays theta equally. The
    equivalence is exact except for the 1e-6 in torch's clipping.

    Args:
        rates: HyperFL's step sizes.
        weight_decay: HyperFL's L2 coefficient.
        squared_norm: Squared norm |z|^2 of the hidden activation.
    """
    factor = 1 + squared_norm
    return FedRepRates(
        classifier=rates.classifier,
        extractor=rates.hypernetwork * factor,
        clip_norm=rates.clip_norm / math.sqrt(factor),
        weight_decay=weight_decay / factor,
    )


@dataclass(frozen=True, kw_only=True)
class HyperFLModel:
    """A client's model: a classifier on a feature extractor with generated weights.

    Attributes:
        extractor: Structure of the feature extractor; its parameters are not used.
        classifier: The private last layer.
        hypernetwork: Hypernetwork that generates the extractor's parameters.
        embedding: The private embedding v [d].
        frozen: Whether v and the hypernetwork's first layer are constants, so that z is constant, too.
        theta: Generated weights [P] at the current values, so that `fixed` need not generate them; None to generate.
    """

    extractor: nn.Module
    classifier: nn.Linear
    hypernetwork: Hypernetwork
    embedding: Tensor
    frozen: bool = False
    theta: Tensor | None = None

    def predict(self, images: Tensor) -> Tensor:
        """Return the logits [B, K] of images [B, C, H, W]; theta is generated in each call, with its graph."""
        features = functional_call(
            self.extractor, self.hypernetwork.split(self.hypernetwork(self.embedding)), (images,)
        )
        logits: Tensor = self.classifier(features)
        return logits

    @torch.no_grad()
    def fixed(self) -> Predict:
        """Return a predictor with theta generated once, for evaluation and for step 1; only phi gets a graph."""
        flat = self.hypernetwork(self.embedding) if self.theta is None else self.theta
        values = {f"extractor.{name}": value for name, value in self.hypernetwork.split(flat).items()}
        values |= {f"classifier.{name}": value for name, value in self.classifier.named_parameters()}
        return AppliedNetwork(Target(self.extractor, self.classifier), values)


def train_hyperfl(
    model: HyperFLModel, data: TrainingData, epochs: Epochs, rates: HyperFLRates, rng: np.random.Generator
) -> float:
    """Run one local round, changing the model's parameters in place.

    Args:
        model: The client's model; its parameters are leaves on the data's device.
        data: The client's training samples.
        epochs: Number of epochs E of step 2, and the settings of SGD for both steps.
        rates: Step sizes.
        rng: Order of the samples and augmentation.

    Returns:
        Mean training loss of the last epoch of step 2, in nats.
    """
    train_classifier(model, data, epochs, rates, rng)
    if rates.factored:
        return _step2_factored(model, data, epochs, rates, rng)
    return _step2_plain(model, data, epochs, rates, rng)


def train_classifier(
    model: HyperFLModel, data: TrainingData, epochs: Epochs, rates: HyperFLRates, rng: np.random.Generator
) -> None:
    """Take step 1: one epoch on phi. Afterwards no parameter of the model requires a gradient."""
    phi = list(model.classifier.parameters())
    _trainable([*phi, *model.hypernetwork.parameters(), model.embedding], False)
    _trainable(phi)
    step1 = [ParameterSet(parameters=phi, learning_rate=rates.classifier)]
    train_in_cohort(model.fixed(), step1, data, replace(epochs, epochs=1), rng)
    _trainable(phi, False)


def _step2_plain(
    model: HyperFLModel, data: TrainingData, epochs: Epochs, rates: HyperFLRates, rng: np.random.Generator
) -> float:
    """Train (varphi, v) by autograd and torch.optim.SGD: the reference of the factored version."""
    heads = [model.hypernetwork.head_weight, model.hypernetwork.head_bias]
    hypernetwork = heads if model.frozen else list(model.hypernetwork.parameters())
    sets = [ParameterSet(parameters=hypernetwork, learning_rate=rates.hypernetwork, clip_norm=rates.clip_norm)]
    if not model.frozen:
        own = ParameterSet(parameters=[model.embedding], learning_rate=rates.embedding, clip_norm=rates.clip_norm)
        sets.append(own)
    for part in sets:
        _trainable(part.parameters)
    return train_epochs(model.predict, sets, data, epochs, rng)


def _step2_factored(
    model: HyperFLModel, data: TrainingData, epochs: Epochs, rates: HyperFLRates, rng: np.random.Generator
) -> float:
    """Train (varphi, v) without forming the gradients of the heads, see `hyperfl_flwr.training.factored_sgd`."""
    optimiser = hypernetwork_optimiser(model, epochs, rates)
    heads = FactoredHeads.of(model.hypernetwork, optimiser, steps=epochs.num_steps(len(data.train_labels)))
    loss = finish_alone(factored_steps(model, heads, optimiser, data, epochs, rates, rng))
    heads.materialise()
    return loss


def head_settings(epochs: Epochs, rates: HyperFLRates) -> dict[str, float]:
    """Return the settings of SGD on the heads, by the names of `FactoredHeads`."""
    return {
        "learning_rate": rates.hypernetwork,
        "momentum": epochs.momentum,
        "weight_decay": epochs.weight_decay,
    }


def hypernetwork_optimiser(model: HyperFLModel, epochs: Epochs, rates: HyperFLRates) -> SGD:
    """Return the optimiser of (varphi, v); it skips the heads, which get no gradient."""
    network = model.hypernetwork
    of_network = [network.head_weight, network.head_bias, *(() if model.frozen else network.hidden.parameters())]
    groups = [{"params": of_network, "lr": rates.hypernetwork}]
    if not model.frozen:
        groups.append({"params": [model.embedding], "lr": rates.embedding})
    return SGD(groups, momentum=epochs.momentum, weight_decay=epochs.weight_decay)


def factored_steps(
    model: HyperFLModel,
    heads: Heads,
    optimiser: SGD,
    data: TrainingData,
    epochs: Epochs,
    rates: HyperFLRates,
    rng: np.random.Generator,
) -> HeadSteps:
    """Yield the products with the heads that the steps of step 2 need; returns the mean loss of the last epoch.

    The chain rule is cut at theta and at z: g = dL/dtheta by autograd through the target network, dL/dz = H g by the
    heads, and the gradients of the first layer and of v by autograd again.
    """
    network = model.hypernetwork
    below = [] if model.frozen else [*network.hidden.parameters(), model.embedding]
    _trainable(below)

    def step(images: Tensor, labels: Tensor) -> Generator[HeadProduct, Tensor, Tensor]:
        hidden = network.activation(model.embedding)
        theta = (yield HeadProduct(heads, hidden.detach(), is_forward=True)).requires_grad_()
        features = functional_call(model.extractor, network.split(theta), (images,))
        loss = loss_of(model.classifier(features), labels)
        (gradient,) = torch.autograd.grad(loss, theta)
        gradients: Sequence[Tensor] = ()
        if below:
            of_hidden = yield HeadProduct(heads, gradient, is_forward=False)
            # The gradient of a scalar product: `grad_outputs` would import sympy, which costs a node half a second.
            gradients = torch.autograd.grad(hidden.dot(of_hidden), below)
        hidden = hidden.detach()
        scale = _clip_factor([*gradients[:-1]], heads.squared_norm(hidden, gradient), rates.clip_norm)
        heads.step(hidden, gradient, scale)
        _assign(below[:-1], gradients[:-1], scale)
        # The last of `below` is v, which is clipped separately.
        _assign(below[-1:], gradients[-1:], _clip_factor(gradients[-1:], 0.0, rates.clip_norm))
        optimiser.step()
        return loss.detach()

    mean_loss = float("nan")
    for some in all_passes(data, epochs, rng):
        losses = MeanLoss()
        for images, labels in some:
            losses.add((yield from step(images, labels)), len(labels))
        mean_loss = losses.value
    return mean_loss


def _clip_factor(gradients: Sequence[Tensor], squared: Tensor | float, clip_norm: float) -> Tensor | float:
    """Return the factor that torch.nn.utils.clip_grad_norm_ applies to gradients.

    `squared` is the squared norm of the gradients that are not formed.
    """
    if clip_norm <= 0:
        return 1.0
    total = sum((gradient.square().sum() for gradient in gradients), torch.as_tensor(squared))
    return torch.clamp(clip_norm / (total.sqrt() + 1e-6), max=1.0)


def _assign(parameters: Sequence[Tensor], gradients: Sequence[Tensor], scale: Tensor | float) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient * scale


def _trainable(tensors: Iterable[Tensor], flag: bool = True) -> None:
    for tensor in tensors:
        tensor.requires_grad_(flag)
