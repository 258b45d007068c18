"""Train clients together whose networks share a pre-trained body: see `hyperfl_flwr.models.pretrained.together`."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
from torch import nn

from clients.engine.cohort_training import MOST_TOGETHER
from clients.engine.context import ClientContext
from hyperfl_flwr.core.lockstep import run_in_lockstep
from hyperfl_flwr.models.pretrained.network import PretrainedTarget, build_pretrained
from hyperfl_flwr.training.public_training import LocalSteps

COPIES = 3
"""Upper bound of the copies of a client's parameters in training; of HyperFL's heads 1.3 were measured."""

BYTES = 4
"""Size of a float32 number."""


@runtime_checkable
class BodyMember(Protocol):
    """What the cohort needs of a client, which `clients.engine.base.BaseClient` has."""

    context: ClientContext
    groups: dict[str, nn.Module]

    @property
    def steps(self) -> LocalSteps:
        """The local steps."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the modules in place."""


class BodyCohort:
    """Trains clients together that have one pre-trained body; see `CohortTraining`."""

    most = MOST_TOGETHER

    def admit(self, member: object) -> bool:
        """Return whether a client can be trained together with others."""
        return isinstance(member, BodyMember) and len(member.context.data.train_labels) > 0

    def memory_of(self, member: object) -> int:
        """Return the bytes of a client's parameters and of the activations of its batch."""
        assert isinstance(member, BodyMember)
        data = member.context.data
        target: PretrainedTarget = build_pretrained(
            member.context.config.target, tuple(data.train_images.shape[1:]), data.num_classes
        )
        batch = min(member.steps.batch_size, len(data.train_labels))
        parameters: int = sum(value.numel() for part in member.groups.values() for value in part.state_dict().values())
        return BYTES * (COPIES * parameters + batch * int(target.extractor.plan.activations))

    def train(self, members: Sequence[tuple[object, np.random.Generator]]) -> list[dict[str, float] | Exception]:
        """Train the clients together, see `CohortTraining`."""
        works = [partial(member.train, rng) for member, rng in members if isinstance(member, BodyMember)]
        return run_in_lockstep(works)
