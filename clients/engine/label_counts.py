"""The group `labels` of clients that send their numbers of training samples by class."""

import torch
from torch import nn

from clients.engine.context import ClientContext
from hyperfl_flwr.models.vector import Vector

LABELS = "labels"
"""Name of the group; its only array has the key `hyperfl_flwr.protocol.messages.LABEL_COUNTS`."""


def label_counts(context: ClientContext) -> Vector:
    """Return the module of the group."""
    return Vector(context.data.num_classes, name="counts")


def count_labels(group: nn.Module, context: ClientContext) -> None:
    """Replace the group's received values by the client's numbers of training samples by class."""
    data = context.data
    counts = torch.bincount(data.train_labels, minlength=data.num_classes).float()
    group.load_state_dict({"counts": counts}, assign=True)
