"""Evaluate a network on labelled samples."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.core.tasks import CLASSIFICATION, MULTI_LABEL
from hyperfl_flwr.metrics.classification import ClassScores, predicted_classes
from hyperfl_flwr.metrics.multi_label import LabelScores
from hyperfl_flwr.metrics.regression import NumberScores
from hyperfl_flwr.metrics.scores import Scores
from hyperfl_flwr.models.losses import loss_of, task_of_labels

BATCH = 200
"""Number of samples of a call of a network."""


@torch.no_grad()
def evaluate(predict: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, *, batch_size: int = BATCH) -> Scores:
    """Evaluate a network on the task that its labels are of; outputs that are not numbers count as wrong.

    Args:
        predict: Function from images [B, C, H, W] to outputs [B, K].
        images: All images [n, C, H, W].
        labels: Labels of the images, see `hyperfl_flwr.models.losses`.
        batch_size: Number of images per call; it limits the memory and does not change the predictions.
    """
    task, parts = task_of_labels(labels), list[Tensor]()
    loss = torch.zeros((), dtype=torch.float64, device=images.device)
    for batch, truth in zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True):
        outputs = predict(batch)
        loss += loss_of(outputs, truth, "sum")
        if task is CLASSIFICATION:
            columns = [truth[:, None], outputs.argmax(dim=1, keepdim=True), outputs.softmax(dim=1)]
        else:
            columns = [truth, outputs.sigmoid() if task is MULTI_LABEL else outputs]
        # In float64, which holds classes exactly.
        parts.append(torch.cat([column.double() for column in columns], dim=1))
    width = parts[0].shape[1]
    # Read once: the CPU waits for a GPU at each read.
    numbers = torch.cat([*(part.flatten() for part in parts), loss[None]]).cpu().numpy()
    return _scores(numbers[:-1].reshape(-1, width), float(numbers[-1]), labels)


def _scores(table: NDArray[np.float64], loss: float, labels: Tensor) -> Scores:
    task = task_of_labels(labels)
    if task is CLASSIFICATION:
        return ClassScores(
            labels=table[:, 0].astype(np.int64),
            predicted=predicted_classes(table[:, 1].astype(np.int64), table[:, 2:]),
            probabilities=table[:, 2:],
            loss=loss,
        )
    truth, outputs = np.split(table, 2, axis=1)
    if task is MULTI_LABEL:
        return LabelScores(labels=truth.astype(bool), probabilities=outputs, loss=loss)
    return NumberScores(labels=truth, predicted=outputs, loss=loss)
