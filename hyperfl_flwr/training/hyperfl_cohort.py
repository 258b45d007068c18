"""HyperFL's local round for clients that share a received H_0, see `hyperfl_flwr.training.shared_heads`.

On a CPU clients take their steps in turn, and what H_0 contributes is computed for all of them. On a GPU a step is one
for all clients: theta of K clients is one product Z H_0, and what their own rows add is a batched product. With a = a_t
and the weights p_j of `hyperfl_flwr.training.factored_sgd`,

    theta_k = a z_k H_0 + sum_j p_j (z_kj . z_k) g_kj + c_k
    dL/dz_k = a H_0 g_k + sum_j p_j (g_kj . g_k) z_kj
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Size, Tensor

from hyperfl_flwr.core.lockstep import current_member
from hyperfl_flwr.models.hypernetwork import Hypernetwork
from hyperfl_flwr.models.stacked import StackedNetwork, convolution_for, stacked
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.training.factored_sgd import StepFactors
from hyperfl_flwr.training.hyperfl import (
    HyperFLModel,
    HyperFLRates,
    factored_steps,
    head_settings,
    hypernetwork_optimiser,
    train_classifier,
)
from hyperfl_flwr.training.local_sgd import Epochs, TrainingData
from hyperfl_flwr.training.shared_heads import HeadsOnShared, HeadSteps
from hyperfl_flwr.training.stacked_batches import ClientSteps, StackedBatches
from hyperfl_flwr.training.stacked_sgd import CLIP_EPSILON, can_stack, form_of, form_of_samples, served


def train_with_shared_heads(
    model: HyperFLModel,
    heads: HeadsOnShared,
    data: TrainingData,
    epochs: Epochs,
    rates: HyperFLRates,
    rng: np.random.Generator,
) -> HeadSteps:
    """Return the steps of one local round as `train_hyperfl` takes them, for `SharedHeads.finish`.

    The model's parameters change in place, except for H, whose matrix all clients of a cohort share: the result is in
    `heads`. In a cohort that stacks training no product with H_0 is left to others.

    Args:
        model: The client's model; `rates.factored` must hold.
        heads: Its heads at the start of the round.
        data: The client's training samples.
        epochs: Number of epochs E of step 2, and the settings of SGD for both steps.
        rates: Step sizes.
        rng: Order of the samples and augmentation.
    """
    train_classifier(model, data, epochs, rates, rng)
    member, request = current_member(), StackedHeadTraining(model, heads, ClientSteps(data, epochs, rng), rates)
    if member is not None and member.stacks_training and request.is_possible:
        loss: float | None = member.wait(request)
        if loss is not None:
            return loss
    optimiser = hypernetwork_optimiser(model, epochs, rates)
    return (yield from factored_steps(model, heads, optimiser, data, epochs, rates, rng))


@dataclass(frozen=True, eq=False)
class StackedHeadTraining:
    """Step 2 of a client's round, to be served together with that of others; see `hyperfl_flwr.core.lockstep`.

    Attributes:
        model: The client's model; classifier and generated weights are constants of the other's step.
        heads: Its heads at the start of the round, which get the client's rows.
        steps: The client's steps.
        rates: Step sizes.
    """

    model: HyperFLModel
    heads: HeadsOnShared
    steps: ClientSteps
    rates: HyperFLRates

    @property
    def is_possible(self) -> bool:
        """Whether the step can be stacked."""
        is_plain = type(self.model.hypernetwork).activation is Hypernetwork.activation
        return is_plain and self.steps.number > 0 and can_stack(self.target, self.steps.data)

    @property
    def target(self) -> Target:
        """The target network; the parameters of its extractor are not used."""
        return Target(self.model.extractor, self.model.classifier)

    @property
    def kind(self) -> Hashable:
        """H_0, form of the networks, settings of the steps, and form of the samples."""
        epochs = self.steps.epochs
        classifier = {f"classifier.{name}": value for name, value in self.model.classifier.named_parameters()}
        return (
            id(self.heads.shared), form_of(self.target, classifier), self.model.frozen, self.rates, epochs.momentum,
            epochs.weight_decay, form_of_samples(self.steps),
        )  # fmt: skip

    @staticmethod
    def serve(requests: "Sequence[StackedHeadTraining]") -> Sequence[float | None]:
        """Take the steps of all clients; returns the loss of each, or None if it has to take them alone."""
        return served(_train, requests)


def _train(requests: Sequence[StackedHeadTraining]) -> list[float]:
    batches = StackedBatches([request.steps for request in requests])
    ordered = [requests[position] for position in batches.order]
    first, state = ordered[0], _StackedHypernetwork(ordered)
    target = first.target
    network = StackedNetwork(target, convolution_for(first.heads.weight.device))
    constants = {
        f"classifier.{name}": stacked(getattr(each.model.classifier, name) for each in ordered)
        for name, _ in first.model.classifier.named_parameters()
    }
    losses = []
    for batch in batches:
        number = len(batch.labels)
        hidden = state.hidden(number)
        theta = state.theta(hidden).requires_grad_()
        values = {name: value[:number] for name, value in constants.items()}
        values |= _split(theta, first.model.hypernetwork.shapes)
        loss = batch.mean_losses(network(values, batch.samples))
        (gradient,) = torch.autograd.grad(loss.sum(), theta)
        state.step(hidden, gradient)
        losses.append(loss.detach())
    reported = batches.reported_losses(losses)  # before anything of a client is changed
    state.write_back()
    return reported


def _split(theta: Tensor, shapes: Mapping[str, Size]) -> dict[str, Tensor]:
    """Return generated weights [k, P] as the extractor's parameters [k, *shape], by their names in the target."""
    parts = torch.split(theta, [shape.numel() for shape in shapes.values()], dim=1)
    named = zip(shapes.items(), parts, strict=True)
    return {f"extractor.{name}": part.reshape(len(theta), *shape) for (name, shape), part in named}


class _StackedHypernetwork:
    """The hypernetworks and embeddings of K clients, and their steps of SGD.

    Args:
        requests: The clients, by falling number of steps.
    """

    def __init__(self, requests: Sequence[StackedHeadTraining]) -> None:
        self._requests = requests
        first, networks = requests[0], [request.model.hypernetwork for request in requests]
        self._settings = head_settings(first.steps.epochs, first.rates)
        self._rates, self._frozen = first.rates, first.model.frozen
        self._weight, number = first.heads.weight, first.steps.number
        self._factors = StepFactors(number, **self._settings)
        self._by_age = self._factors.by_age()[0].to(self._weight.dtype).to(self._weight.device)
        self._count = 0
        self._rows = self._weight.new_empty(len(requests), number, self._weight.shape[1])
        self._activations = self._weight.new_empty(len(requests), number, len(self._weight))
        self._bias = _Stepped(stacked(network.head_bias for network in networks))
        self._below = [
            _Stepped(stacked(network.hidden.weight for network in networks)),
            _Stepped(stacked(network.hidden.bias for network in networks)),
            _Stepped(stacked(request.model.embedding for request in requests)),
        ]

    @torch.no_grad()
    def hidden(self, number: int) -> Tensor:
        """Return the hidden activations z [k, p] of the first clients."""
        weight, bias, embedding = (part.values[:number] for part in self._below)
        return torch.relu(torch.baddbmm(bias[..., None], weight, embedding[..., None])[..., 0])

    @torch.no_grad()
    def theta(self, hidden: Tensor) -> Tensor:
        """Return theta [k, P] of hidden activations [k, p]."""
        number, count = len(hidden), self._count
        theta = torch.addmm(self._bias.values[:number], hidden, self._weight, alpha=self._of_shared)
        if count:
            products = torch.bmm(self._activations[:number, :count], hidden[..., None])[..., 0]
            theta[:, None].baddbmm_((products * self._of_rows)[:, None], self._rows[:number, :count])
        return theta

    @torch.no_grad()
    def step(self, hidden: Tensor, gradient: Tensor) -> None:
        """Take a step of SGD: of activations [k, p] and dL/dtheta [k, P]."""
        number = len(hidden)
        squared = gradient.square().sum(dim=1) * (hidden.square().sum(dim=1) + 1)
        below = [] if self._frozen else self._gradients_below(hidden, gradient)
        for part in below[:-1]:
            squared = squared + part.flatten(1).square().sum(dim=1)
        scale = self._clip_factor(squared)
        row = self._rows[:number, self._count]
        torch.mul(gradient, scale[:, None], out=row)
        self._activations[:number, self._count] = hidden
        self._factors.step(self._count)
        self._count += 1
        self._bias.step(row, **self._settings)
        scales = [scale, scale, self._clip_factor(below[-1].square().sum(dim=1))] if below else []
        rates = (self._rates.hypernetwork, self._rates.hypernetwork, self._rates.embedding)
        for state, part, factor, rate in zip(self._below, below, scales, rates, strict=False):
            scaled = part * factor.view(-1, *[1] * (part.ndim - 1))
            state.step(scaled, **self._settings | {"learning_rate": rate})

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the values into each client's own parameters, and give its heads their rows."""
        for position, request in enumerate(self._requests):
            network, number = request.model.hypernetwork, request.steps.number
            own = (network.head_bias, network.hidden.weight, network.hidden.bias, request.model.embedding)
            for parameter, part in zip(own, (self._bias, *self._below), strict=True):
                parameter.copy_(part.values[position])
            request.heads.take(self._rows[position, :number], self._activations[position, :number])

    @property
    def _of_shared(self) -> float:
        """What H_0 counts in the current weights."""
        return float(self._factors.weights[0])

    @property
    def _of_rows(self) -> Tensor:
        """What the rows so far count in the current weights [count]."""
        return self._by_age[len(self._by_age) - self._count :]

    def _gradients_below(self, hidden: Tensor, gradient: Tensor) -> list[Tensor]:
        """Return the gradients of the first layer's weight [k, p, d] and bias [k, p], and of the embedding [k, d]."""
        number, count = len(hidden), self._count
        of_hidden = torch.mm(gradient, self._weight.t()).mul_(self._of_shared)
        if count:
            products = torch.bmm(self._rows[:number, :count], gradient[..., None])[..., 0]
            past = self._activations[:number, :count].transpose(1, 2)
            of_hidden = of_hidden + torch.bmm(past, (products * self._of_rows)[..., None])[..., 0]
        of_bias = of_hidden.masked_fill(hidden <= 0, 0.0)
        weight, _, embedding = (part.values[:number] for part in self._below)
        of_weight = of_bias[:, :, None] * embedding[:, None]
        return [of_weight, of_bias, torch.bmm(of_bias[:, None], weight)[:, 0]]

    def _clip_factor(self, squared: Tensor) -> Tensor:
        """Return the factor [k] that torch.nn.utils.clip_grad_norm_ applies to gradients of squared norms [k]."""
        if self._rates.clip_norm <= 0:
            return torch.ones_like(squared)
        return torch.clamp(self._rates.clip_norm / (squared.sqrt() + CLIP_EPSILON), max=1.0)


class _Stepped:
    """Parameters [K, ...] of K clients under SGD, with empty momentum buffers."""

    def __init__(self, values: Tensor) -> None:
        self.values, self._buffer = values, torch.zeros_like(values)

    def step(self, gradient: Tensor, *, learning_rate: float, momentum: float, weight_decay: float) -> None:
        """Take a step for the first clients, of gradients [k, ...]."""
        number = len(gradient)
        buffer = self._buffer[:number].mul_(momentum).add_(gradient).add_(self.values[:number], alpha=weight_decay)
        self.values[:number].add_(buffer, alpha=-learning_rate)
