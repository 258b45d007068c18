"""Describe a federation's data in a line, so that a wrong folder or a wasteful partition is seen before training."""

from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.tasks import CLASSIFICATION
from hyperfl_flwr.data.federated_data import FederatedData

SHOWN_CLASSES = 10
"""Largest number of classes whose names are shown."""

LONGEST_NAMES = 200
"""Largest number of characters of these names together."""


def label_notes(data: FederatedData) -> list[str]:
    """Return a warning where labels seem to be numbered from 1: then a class is predicted that there is not."""
    dataset = data.dataset
    if dataset.task is not CLASSIFICATION or dataset.num_classes < 2 or (dataset.train.labels == 0).any():
        return []
    return [
        f"no training sample has class 0 of the classes 0 to {dataset.num_classes - 1}; if the labels count from 1, "
        f"subtract 1"
    ]


def describe(data: FederatedData) -> str:
    """Return number of training samples, classes, partition, how many samples the clients have, and their reuse."""
    samples = len(data.dataset.train)
    reuse = data.reuse["train"]
    kinds = f"{data.dataset.num_classes} {'classes' if data.dataset.task is CLASSIFICATION else 'targets'}"
    names = ", ".join(data.dataset.classes or ())
    if names and data.dataset.num_classes <= SHOWN_CLASSES and len(names) <= LONGEST_NAMES and names.isprintable():
        kinds += f" ({names})"
    text = f"data: {samples:,} training samples of {kinds}, partition {data.partition}"
    if reuse["reused"]:
        return (
            f"{text}: the clients have {reuse['draws']:,}, with up to {counted(reuse['max_uses'], 'use')} of a sample"
        )
    return text if reuse["draws"] == samples else f"{text}: the clients have {reuse['draws']:,} of them"
