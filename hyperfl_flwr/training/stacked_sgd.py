"""Local epochs of several clients at once: their parameters are one tensor, and a step is one for all of them.

A step of a small network is bound by the time that its operators need to start on a GPU. With the parameters of K
clients as tensors [K, P], the operators are as many as for one client. Each client has the batches, rates and clipping
that it has alone, and its own momentum; the results are those of `hyperfl_flwr.training.local_sgd.train_epochs` up to
rounding.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hyperfl_flwr.core.lockstep import current_member
from hyperfl_flwr.models.applied import AppliedNetwork
from hyperfl_flwr.models.stacked import StackedNetwork, convolution_for, has_plain_gradient, is_stackable, stacked
from hyperfl_flwr.training.local_sgd import Epochs, Objective, ParameterSet, Predict, TrainingData, train_epochs
from hyperfl_flwr.training.stacked_batches import ClientSteps, StackedBatches

LOGGER = logging.getLogger(__name__)

CLIP_EPSILON = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm that it divides by."""


def train_in_cohort(
    predict: Predict,
    sets: Sequence[ParameterSet],
    data: TrainingData,
    epochs: Epochs,
    rng: np.random.Generator,
    objective: Objective | None = None,
) -> float:
    """Train as `train_epochs` does; in a cohort that stacks training, together with the other clients.

    Arguments, result and errors are those of `train_epochs`. A client trains alone if its network is not
    `is_stackable`, with another objective than the cross-entropy, without samples or steps, and after an error of the
    stacked training.
    """
    member = current_member()
    if member is not None and member.stacks_training and objective is None:
        request = StackedTraining.of(predict, sets, ClientSteps(data, epochs, rng))
        loss: float | None = None if request is None else member.wait(request)
        if loss is not None:
            return loss
    return train_epochs(predict, sets, data, epochs, rng, objective)


@dataclass(frozen=True, eq=False)
class StackedTraining:
    """A client's local training, to be served together with that of others; see `hyperfl_flwr.core.lockstep`.

    Attributes:
        network: The network.
        values: The network's parameters by name; those of `sets` are changed in place.
        sets: The parameters to train.
        names: For each set the names of its parameters.
        steps: The client's steps.
    """

    network: nn.Module
    values: Mapping[str, Tensor]
    sets: Sequence[ParameterSet]
    names: Sequence[Sequence[str]]
    steps: ClientSteps

    @classmethod
    def of(cls, predict: Predict, sets: Sequence[ParameterSet], steps: ClientSteps) -> "StackedTraining | None":
        """Return the request for a training; None if it cannot be stacked."""
        if isinstance(predict, AppliedNetwork):
            network, values = predict.network, predict.values
        elif isinstance(predict, nn.Module):
            network, values = predict, dict(predict.named_parameters(remove_duplicate=False))
        else:
            return None
        if steps.number < 1 or not len(steps.data.train_labels) or not can_stack(network, steps.data):
            return None
        name_of = {id(value): name for name, value in values.items()}
        wanted = [id(parameter) for part in sets for parameter in part.parameters]
        if len(name_of) < len(values) or len(set(wanted)) < len(wanted) or not set(wanted) <= set(name_of):
            return None
        if not all(has_plain_gradient(parameter) for part in sets for parameter in part.parameters):
            return None
        names = [[name_of[id(parameter)] for parameter in part.parameters] for part in sets]
        return cls(network, values, sets, names, steps)

    @property
    def kind(self) -> Hashable:
        """Form of the network and its parameters, settings of the steps, and form of the samples."""
        sets = [
            (tuple(names), part.learning_rate, part.clip_norm, part.pull, part.weight_decay, len(part.force) > 0)
            for names, part in zip(self.names, self.sets, strict=True)
        ]
        epochs = self.steps.epochs
        return (
            form_of(self.network, self.values), tuple(sets), epochs.momentum, epochs.weight_decay,
            form_of_samples(self.steps),
        )  # fmt: skip

    @staticmethod
    def serve(requests: "Sequence[StackedTraining]") -> Sequence[float | None]:
        """Train the clients; returns the loss of each, see `train_epochs`, or None if it has to train alone."""
        return served(_train, requests)


class _HasSteps(Protocol):
    @property
    def steps(self) -> ClientSteps: ...


R = TypeVar("R", bound=_HasSteps)


def served(train: Callable[[Sequence[R]], list[float]], requests: Sequence[R]) -> Sequence[float | None]:
    """Train clients together; after an error each has to train alone, so that it affects only those that have it too.

    Args:
        train: Trains clients and returns the loss of each; it changes nothing of them before its end.
        requests: The clients' requests.

    Returns:
        The loss of each client; None of all after an error, with the random numbers as before.
    """
    states = [request.steps.rng.bit_generator.state for request in requests]
    try:
        return train(requests)
    except Exception as error:  # noqa: BLE001 - what is wrong with a client is said by its own training
        LOGGER.warning("%d clients are trained one by one: their stacked training failed: %s", len(requests), error)
    for request, state in zip(requests, states, strict=True):
        request.steps.rng.bit_generator.state = state
    return [None] * len(requests)


def can_stack(network: nn.Module, data: TrainingData) -> bool:
    """Return whether clients with a network and data can be trained as stacked tensors."""
    return is_stackable(network) and isinstance(data.augmentation, Hashable)


def form_of(network: nn.Module, values: Mapping[str, Tensor]) -> Hashable:
    """Return what networks that are stacked have in common: layers, and shape and type of the parameters."""
    shapes = [(name, value.shape, value.dtype, value.device) for name, value in values.items()]
    layers = [
        (name, type(layer), *_settings_of(layer)) for name, layer in network.named_modules(remove_duplicate=False)
    ]
    return tuple(layers), tuple(shapes)


def _settings_of(layer: nn.Module) -> list[tuple[str, str]]:
    """Return what a layer was made with, by name, as text; the layer's own `repr` has only some of it."""
    return [(name, repr(value)) for name, value in vars(layer).items() if name != "training" and name[0] != "_"]


def form_of_samples(steps: ClientSteps) -> Hashable:
    """Return what the steps of clients that are stacked have in common: batch size, and form of the samples."""
    data = steps.data
    parts = ((part.shape[1:], part.dtype, part.device) for part in (data.train_images, data.train_labels))
    return steps.epochs.batch_size, data.augmentation, *parts


def _train(requests: Sequence[StackedTraining]) -> list[float]:
    batches = StackedBatches([request.steps for request in requests])
    ordered = [requests[position] for position in batches.order]
    first = ordered[0]
    sets = [_StackedSet.of(ordered, number, first.steps.epochs) for number in range(len(first.sets))]
    trained = {name for names in first.names for name in names}
    constants = {name: stacked([each.values[name] for each in ordered]) for name in first.values if name not in trained}
    network = StackedNetwork(first.network, convolution_for(next(iter(first.values.values())).device))
    losses = []
    for batch in batches:
        number = len(batch.labels)
        leaves = [part.leaf(number) for part in sets]
        values = {name: value[:number] for name, value in constants.items()}
        for part, leaf in zip(sets, leaves, strict=True):
            values |= part.split(leaf)
        loss = batch.mean_losses(network(values, batch.samples))
        gradients = torch.autograd.grad(loss.sum(), leaves)
        for part, gradient in zip(sets, gradients, strict=True):
            part.step(gradient)
        losses.append(loss.detach())
    reported = batches.reported_losses(losses)  # before anything of a client is changed
    for part in sets:
        part.write_back()
    return reported


class _StackedSet:
    """The parameters of one set, of K clients, as one tensor [K, P].

    Args:
        parts: The set of each client.
        names: Names of the parameters.
        momentum: Momentum coefficient.
        weight_decay: L2 coefficient.
    """

    def __init__(
        self, parts: Sequence[ParameterSet], names: Sequence[str], momentum: float, weight_decay: float
    ) -> None:
        self._parts, self._names, self._momentum, self._decay = parts, names, momentum, weight_decay
        self._shapes = [parameter.shape for parameter in parts[0].parameters]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._values = _flat([part.parameters for part in parts])
        self._buffer = torch.zeros_like(self._values) if momentum else None
        self._force = _flat([part.force for part in parts]) if parts[0].force else None
        self._anchor = _flat([part.anchor for part in parts]) if parts[0].pull > 0 else None

    @classmethod
    def of(cls, requests: Sequence[StackedTraining], number: int, epochs: Epochs) -> "_StackedSet":
        """Return the set of a number of each client."""
        parts, decay = [request.sets[number] for request in requests], requests[0].sets[number].weight_decay
        decay = epochs.weight_decay if decay is None else decay
        return cls(parts, requests[0].names[number], epochs.momentum, decay)

    def leaf(self, number: int) -> Tensor:
        """Return the values of the first clients, of which a gradient can be taken."""
        return self._values[:number].detach().requires_grad_()

    def split(self, leaf: Tensor) -> dict[str, Tensor]:
        """Return a leaf's values as parameters [k, *shape] by name."""
        pieces = torch.split(leaf, self._sizes, dim=1)  # its gradient is one concatenation
        return {
            name: piece.reshape(len(leaf), *shape)
            for name, shape, piece in zip(self._names, self._shapes, pieces, strict=True)
        }

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Take the step of `train_epochs` for the first clients, of gradients [k, P]."""
        number, (first, *_) = len(gradient), self._parts
        values = self._values[:number]
        if first.clip_norm > 0:
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient = gradient * torch.clamp(first.clip_norm / (norm + CLIP_EPSILON), max=1.0)
        if self._force is not None:
            gradient = gradient + self._force[:number]
        if self._anchor is not None:
            gradient = gradient.add(values - self._anchor[:number], alpha=first.pull)
        if self._decay:
            gradient = gradient.add(values, alpha=self._decay)
        if self._buffer is not None:
            gradient = self._buffer[:number].mul_(self._momentum).add_(gradient)
        values.add_(gradient, alpha=-first.learning_rate)

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the values into each client's own parameters."""
        pieces = torch.split(self._values, self._sizes, dim=1)
        for number, part in enumerate(self._parts):
            for parameter, piece in zip(part.parameters, pieces, strict=True):
                parameter.copy_(piece[number].view(parameter.shape))


def _flat(tensors: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the tensors of each client, one after another [K, P], without their graphs."""
    return torch.stack([torch.cat([each.detach().flatten() for each in of_client]) for of_client in tensors])
