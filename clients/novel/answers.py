"""A client's answers to queries: novel clients are assessed, and compared with training clients.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, sections 4 and 6.2. Labels are read in one
place only, to count the correct predictions on test samples.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from clients.engine.base import BaseClient
from clients.engine.context import ClientContext, spend_unbounded
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.corruptions import corrupted
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import group_of
from hyperfl_flwr.protocol.queries import CLASSIFIERS, CORRECT, ENSEMBLE, RATES, QuerySpec
from hyperfl_flwr.training.a_distance import errors, gradients, split

BATCH = 200
"""Number of test samples in a batch."""

COMPARED = "pfedhn"
"""The method that compares clients' samples; in runs of other methods such queries are refused."""


def unlabelled(context: ClientContext, question: QuerySpec) -> Tensor:
    """Return the training samples [n, ...] that a question is about, without their labels.

    The samples of a smaller amount are a subset of those of every larger amount.

    Raises:
        ValueError: If the client has fewer samples than the question requires.
        DataError: If the corruption does not apply to the samples.
    """
    samples = _corrupted(context, context.data.train_images, question.corruption, "train")
    if question.samples is not None:
        if question.samples > len(samples):
            raise ValueError(f"has {len(samples)} training samples, but the query is about {question.samples}")
        # The order does not depend on the amount: smaller amounts are prefixes of larger ones.
        order = numpy_generator(context.config.seed, "unlabelled", context.client).permutation(len(samples))
        samples = samples[torch.from_numpy(order[: question.samples]).to(samples.device)]
    return samples


def is_novel(context: ClientContext) -> bool:
    """Return whether a client is a novel one, which is never trained."""
    return context.client >= context.config.num_clients


def assess(member: BaseClient, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
    """Count the correct predictions of models on a novel client's test samples.

    Args:
        member: The client.
        received: M models, stacked [M, *shape], keyed `model/name`.
        question: The question, with the corruption of the samples.

    Returns:
        The counts `CORRECT` [M] of each model and `ENSEMBLE` [1] of the sum of all logits, and the number of samples.

    Raises:
        ValueError: If the client is not novel, or the arrays are not models of its target network.
        DataError: If the corruption does not apply to the samples.
        RefusalError: If the owner's privacy budget does not allow it.
    """
    if not is_novel(member.context):
        raise ValueError(f"only novel clients are assessed, client {member.context.client} is a training client")
    spend_unbounded(member.context)
    labels = member.context.data.test_labels
    images = _corrupted(member.context, member.context.data.test_images, question.corruption, "test")
    correct, total = [], torch.zeros(())
    for logits in _logits(member, received, images):
        correct.append(_num_correct(logits, labels))
        total = total + logits.double()
    # The sum of the logits has the same maximum as their mean.
    ensemble = _num_correct(total, labels)
    return {CORRECT: np.array(correct, np.int64), ENSEMBLE: np.array([ensemble], np.int64)}, len(labels)


def _num_correct(logits: Tensor, labels: Tensor) -> int:
    """Return for how many samples the label has the largest logit; logits that are not numbers count as wrong."""
    return int(((logits.argmax(dim=1) == labels) & ~logits.isnan().any(dim=1)).sum())


def classifier_gradients(member: BaseClient, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
    """Return the mean gradients of linear classifiers over the first half of the client's training samples.

    Args:
        member: The client.
        received: Weights `CLASSIFIERS` [M, D + 1].
        question: The samples that the query is about.

    Returns:
        Gradients `CLASSIFIERS` [M, D + 1], and the number of samples in both halves.

    Raises:
        ValueError: If the run does not compare samples, the classifiers do not match them, or a query to a trained
            client selects, corrupts or noises samples.
        RefusalError: If the owner's privacy budget does not allow it, or a half has fewer samples than the owner
            allows.
    """
    classifiers, samples, _, sides = _opposed(member.context, received, question)
    total = question.samples or len(member.context.data.train_images)
    return {CLASSIFIERS: gradients(classifiers, samples, sides).cpu().numpy()}, total


def classifier_errors(member: BaseClient, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
    """Return the error rates `RATES` [M] on the other half of the training samples, and the size of this half.

    Arguments and errors are those of `classifier_gradients`.
    """
    classifiers, _, samples, sides = _opposed(member.context, received, question)
    rates = errors(classifiers, samples, sides).double() / len(samples)
    return {RATES: rates.cpu().numpy()}, len(samples)


def _opposed(
    context: ClientContext, received: SharedArrays, question: QuerySpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the classifiers, both halves of the samples, and this client's side of each classifier."""
    if context.config.method != COMPARED or not context.config.novel.clients:
        raise ValueError(f"samples are compared only in runs of {COMPARED} with novel clients")
    if question != QuerySpec() and not is_novel(context):
        raise ValueError("a trained client compares all of its samples, unchanged, or none")
    samples = unlabelled(context, question)
    learned, held = split(samples, numpy_generator(context.config.seed, "a-distance", context.client))
    if context.checks is not None:  # each answer comes from one half
        context.checks.require_size(f"client {context.client}", samples=min(len(learned), len(held)))
    spend_unbounded(context)
    classifiers = torch.tensor(received[CLASSIFIERS], device=context.device)
    if classifiers.ndim != 2 or classifiers.shape[1] != learned.shape[1] + 1:
        raise ValueError(f"classifiers must be [M, {learned.shape[1] + 1}], got {tuple(classifiers.shape)}")
    side = int(is_novel(context))  # 1 for novel, 0 for training clients
    return classifiers, learned, held, torch.full((len(classifiers),), side, device=context.device)


@torch.no_grad()
def _logits(member: BaseClient, stacked: SharedArrays, images: Tensor) -> Iterator[Tensor]:
    """Yield the logits [n, K] of each of M models."""
    if not stacked or {group_of(key) for key in stacked} != {"model"} or "model" not in member.groups:
        raise ValueError("a novel client can only use whole models, of the group model")
    for number in range(len(next(iter(stacked.values())))):
        member.load_group("model", {key: torch.tensor(value[number]) for key, value in stacked.items()})
        member.groups["model"].eval()
        predict = member.groups["model"]
        yield torch.cat([predict(batch) for batch in torch.split(images, BATCH)])


def _corrupted(context: ClientContext, samples: Tensor, name: str, part: str) -> Tensor:
    if name == "none":
        return samples
    rng = numpy_generator(context.config.seed, "corruption", context.client, name, part)
    return corrupted(samples, name, rng, mean=context.mean, std=context.std)
