"""FedFTG: fine-tuning of a model on generated images, with a generator that searches for where it differs.

Zhang, Shen, Ding, Tao, Duan: "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated
Learning", CVPR 2022, equations 4 to 9, and the authors' code.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hyperfl_flwr.core.optimisers import SGD, Adam
from hyperfl_flwr.models.generator import NOISE_DIM, Generator
from hyperfl_flwr.training.ensemble import Ensemble
from hyperfl_flwr.training.fedgen import class_weights, diversity_loss


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings of the fine-tuning in a round.

    Attributes:
        iterations: Number of iterations.
        student_steps: Number of the model's steps in each.
        batch_size: Generated images per iteration, at least 2.
        student_learning_rate: Rate of the model's SGD.
        student_weight_decay: Its L2 coefficient.
        diversity: Weight of the generator's term for diversity.
    """

    iterations: int
    student_steps: int
    batch_size: int
    student_learning_rate: float
    student_weight_decay: float
    diversity: float


def generator_loss(student: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return what one teacher adds to the generator's loss, without diversity: mean_b a_b (CE(t, y) - |s - t|_1 / K).

    The generator looks for images of the given class, for the teacher, on which the student differs from it.

    Args:
        student: Logits s [B, K].
        teacher: Logits t [B, K].
        labels: Labels y [B].
        weights: The teacher's weight a [B] for the label of each image.
    """
    apart = (student - teacher).abs().mean(dim=1)
    return (weights * (functional.cross_entropy(teacher, labels, reduction="none") - apart)).mean()


def student_loss(student: Tensor, teachers: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return -mean_bK sum_k a_kb softmax(t_k) log softmax(s): a K-th of the weighted cross-entropy.

    Args:
        student: Logits s [B, K].
        teachers: Logits t_k [B, K] of the S teachers.
        weights: Their weights a [S, B] for the label of each image.
    """
    goal = sum(
        (row[:, None] * functional.softmax(logits, dim=1) for row, logits in zip(weights, teachers, strict=True)),
        torch.zeros_like(student),
    )
    return -(goal * functional.log_softmax(student, dim=1)).mean()


def fine_tune(
    student: nn.Module,
    teachers: Ensemble,
    counts: Tensor,
    generator: Generator,
    optimiser: Adam,
    settings: Tuning,
    rng: torch.Generator,
) -> None:
    """Train the student and the generator in place.

    In each iteration labels are drawn with the frequencies of all clients' samples. The generator takes one step for
    each teacher in turn; then the student takes its steps, on images from the same labels and noise. The student stays
    in its mode, see `hyperfl_flwr.training.ensemble.distil`.

    Args:
        student: The model to tune.
        teachers: The clients' models.
        counts: Their numbers of samples by class [S, K].
        generator: The generator.
        optimiser: Its optimiser.
        settings: Number and size of the steps.
        rng: Labels and noise.
    """
    shares, totals = class_weights(counts), counts.sum(dim=0)
    steps = SGD(student.parameters(), lr=settings.student_learning_rate, weight_decay=settings.student_weight_decay)
    for _ in range(settings.iterations):
        labels = torch.multinomial(totals, settings.batch_size, replacement=True, generator=rng)
        noise = torch.randn(settings.batch_size, NOISE_DIM, generator=rng)
        weights = shares[:, labels]
        for number, row in enumerate(weights):
            teacher = Ensemble(network=teachers.network, models=[teachers.models[number]])
            images = generator(noise, labels)
            (logits,) = teacher.each(images)
            loss = generator_loss(student(images), logits, labels, row)
            loss = loss + settings.diversity * diversity_loss(noise, images) / len(weights)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            images = generator(noise, labels)
            goals = list(teachers.each(images))
        for _ in range(settings.student_steps):
            steps.zero_grad()
            student_loss(student(images), goals, weights).backward()  # type: ignore[no-untyped-call]
            steps.step()
