"""Train clients together on a GPU as stacked tensors: see `hyperfl_flwr.training.stacked_sgd`."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Protocol, runtime_checkable

import numpy as np
from torch import nn

from clients.engine.context import ClientContext
from hyperfl_flwr.core.lockstep import run_in_lockstep
from hyperfl_flwr.models.stacked import activations_of, is_stackable
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.public_training import LocalSteps

COPIES = 10
"""Copies of a client's parameters: received, as received for a pull, stacked, gradient, clipped, with decay and pull,
momentum, force, upload. Steps with a force and a pull have up to 14, for which half of the memory is left free."""

BYTES = 4
"""Size of a float32 number."""

MOST_STACKED = 50
"""Largest cohort with `cohort = auto`: a larger one is hardly faster."""


@runtime_checkable
class StackedMember(Protocol):
    """What the cohort needs of a client, which `clients.engine.base.BaseClient` has."""

    context: ClientContext
    groups: dict[str, nn.Module]

    @property
    def steps(self) -> LocalSteps:
        """The local steps."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the modules in place."""


class StackedCohort:
    """Trains clients together whose steps are one for all; see `clients.engine.cohort_training.CohortTraining`.

    A client whose network or steps cannot be stacked takes its steps alone, while the others wait.
    """

    most = MOST_STACKED

    def __init__(self) -> None:
        self._admitted, self._widest = 0, 0

    def admit(self, member: object) -> bool:
        """Return whether a client can be trained together with others; its network must be one that is stacked."""
        return (
            isinstance(member, StackedMember)
            and len(member.context.data.train_labels) > 0
            and member.context.config.precision != "bf16"
            and step_activations(member) > 0
        )

    def memory_of(self, member: object) -> int:
        """Return the bytes that a client adds: its parameters, a copy of its samples, and the activations of a step.

        All batches of a cohort are filled up to the widest one, so that a client with a wider batch than those before
        adds to theirs, too.
        """
        assert isinstance(member, StackedMember)
        parameters: int = sum(value.numel() for part in member.groups.values() for value in part.state_dict().values())
        before = self._admitted * self._widest
        self._admitted, self._widest = self._admitted + 1, max(self._widest, step_activations(member))
        activations = self._admitted * self._widest - before
        return BYTES * (COPIES * parameters + activations) + member.context.data.train_images.nbytes

    def train(self, members: Sequence[tuple[object, np.random.Generator]]) -> list[dict[str, float] | Exception]:
        """Train the clients together, see `CohortTraining`; the next cohort is another one."""
        self._admitted, self._widest = 0, 0
        works = [partial(member.train, rng) for member, rng in members if isinstance(member, StackedMember)]
        return run_in_lockstep(works, stacks_training=True)


def step_activations(member: StackedMember) -> int:
    """Return the number of activations of one step of a client, with their gradients."""
    data = member.context.data
    batch = min(member.steps.batch_size, len(data.train_labels))
    return batch * _activations(member.context.config.target, tuple(data.train_images.shape[1:]), data.num_classes)


@cache
def _activations(target: str, shape: tuple[int, ...], num_classes: int) -> int:
    """Return the number of activations of one sample, with their gradients; 0 for a network that is not stacked."""
    network = build_target(target, shape, num_classes)
    return activations_of(network, shape) if is_stackable(network) else 0
