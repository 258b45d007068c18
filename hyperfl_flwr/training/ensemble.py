"""Ensembles of clients' models on a server, and distillation of an ensemble into one model.

Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, algorithm
1: the student's softmax is trained towards the softmax of the mean of the teachers' logits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from hyperfl_flwr.core.optimisers import Adam

Model = Mapping[str, NDArray[Any]]
"""All parameters and buffers of a network by name."""


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Several models of one network.

    Only one of them is copied at a time, so an ensemble needs no memory but that of its models.

    Attributes:
        network: The network; its values are ignored and may be on the meta device. Its mode is that of all models.
        models: The S models.
    """

    network: nn.Module
    models: Sequence[Model]

    def each(self, samples: Tensor) -> Iterator[Tensor]:
        """Yield the logits [B, K] of one model after the other; gradients flow to the samples, not to the models."""
        for model in self.models:
            yield functional_call(self.network, {name: torch.tensor(value) for name, value in model.items()}, samples)

    @torch.no_grad()
    def mean_logits(self, samples: Tensor) -> Tensor:
        """Return the mean of the models' logits [B, K]."""
        return torch.stack(list(self.each(samples))).mean(dim=0)


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Settings of distillation by Adam.

    Attributes:
        steps: Number of steps.
        learning_rate: Rate of the first step; it falls to 0 along half a cosine.
        clip_norm: Largest norm of the gradient; 0 does not clip.
    """

    steps: int
    learning_rate: float
    clip_norm: float = 0.0


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(softmax(teacher) || softmax(student)), the mean over a batch, in nats.

    Args:
        student: Logits [B, K] of the student.
        teacher: Logits [B, K] of the teacher.
    """
    goal = functional.log_softmax(teacher, dim=1)
    return functional.kl_div(functional.log_softmax(student, dim=1), goal, reduction="batchmean", log_target=True)


def distil(student: nn.Module, teachers: Ensemble, batch: Callable[[], Tensor], settings: Distillation) -> None:
    """Train a student in place towards the mean of an ensemble's logits.

    The student stays in its mode. In evaluation mode its BatchNorm uses its running statistics and leaves them as they
    are, so that unlabelled samples of another kind do not enter them.

    Args:
        student: The network to train.
        teachers: The ensemble.
        batch: Returns the next batch of samples [B, *shape].
        settings: Number and size of the steps.
    """
    parameters = list(student.parameters())
    optimiser = Adam(parameters, lr=settings.learning_rate)
    for step in range(settings.steps):
        optimiser.param_groups[0]["lr"] = settings.learning_rate * (1 + math.cos(math.pi * step / settings.steps)) / 2
        samples = batch()
        goal = teachers.mean_logits(samples)
        optimiser.zero_grad()
        distillation_loss(student(samples), goal).backward()  # type: ignore[no-untyped-call]
        if settings.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        optimiser.step()
