"""The loss of a network's outputs for the labels of a batch; the labels' type says which task it is.

==============  =========================  =====================================================================
task            labels                     loss of a sample
==============  =========================  =====================================================================
classification  int64 [B]                  cross-entropy of the softmax, in nats
multi-label     bool [B, K]                mean over the labels of the binary cross-entropy of the sigmoid, in nats
regression      float [B, K]               mean over the targets of the squared error
==============  =========================  =====================================================================
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from hyperfl_flwr.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, Task


def loss_of(outputs: Tensor, labels: Tensor, reduction: Literal["mean", "sum", "none"] = "mean") -> Tensor:
    """Return the loss of a batch.

    Args:
        outputs: The network's outputs [B, K]: logits, or the predicted numbers.
        labels: See the module's docstring.
        reduction: `mean` or `sum` over the samples, or `none` for the loss of each [B].
    """
    if labels.dtype == torch.int64:
        return functional.cross_entropy(outputs, labels, reduction=reduction)
    if labels.dtype == torch.bool:
        terms = functional.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype), reduction="none")
    else:
        terms = functional.mse_loss(outputs, labels.to(outputs.dtype), reduction="none")
    losses = terms.mean(dim=-1)
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def task_of_labels(labels: Tensor) -> Task:
    """Return the task that labels are of."""
    if labels.dtype == torch.int64:
        return CLASSIFICATION
    return MULTI_LABEL if labels.dtype == torch.bool else REGRESSION
