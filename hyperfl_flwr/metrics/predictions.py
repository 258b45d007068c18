"""What a model says of somebody's own samples, one by one."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.data.dataset import IntArray
from hyperfl_flwr.data.federated_data import normalised
from hyperfl_flwr.data.labels import labels_of
from hyperfl_flwr.data.unlabelled import Unlabelled, read_unlabelled
from hyperfl_flwr.models.model_spec import TargetRecipe

BATCH = 500
"""Samples that are on the device at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """Predictions of n samples in K classes.

    Attributes:
        column: What `names` are: `file` or `index`.
        names: Of the samples.
        classes: Names of the classes.
        probabilities: The model's softmax [n, K].
        labels: What the samples are [n]; None where nothing tells.
        notes: What was left out, in words.
    """

    column: str
    names: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities: NDArray[np.float32]
    labels: IntArray | None
    notes: tuple[str, ...]

    @property
    def accuracy(self) -> float | None:
        """Share of samples whose largest probability is their label's; None without labels."""
        if self.labels is None:
            return None
        return float((self.probabilities.argmax(axis=1) == self.labels).mean())

    def table(self) -> str:
        """Return a table in CSV: name, class, its probability, the label if there are any, all probabilities."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        known = [] if self.labels is None else ["label"]
        writer.writerow([self.column, "class", "confidence", *known, *(f"p({name})" for name in self.classes)])
        for number, (name, row) in enumerate(zip(self.names, self.probabilities, strict=True)):
            best = int(row.argmax())
            label = [] if self.labels is None else [self.classes[int(self.labels[number])]]
            writer.writerow([name, self.classes[best], f"{row[best]:.6f}", *label, *(f"{share:.6f}" for share in row)])
        return text.getvalue()


def predict(
    tensors: Mapping[str, Tensor], recipe: TargetRecipe, data: Path, device: torch.device, *, convert: bool = False
) -> Predictions:
    """Predict all samples of a folder of images or of an `.npz` file.

    Args:
        tensors: Values of the target network by name.
        recipe: How it is used.
        data: The folder or the file.
        device: Where to compute.
        convert: Whether images of another size or colour are converted.

    Raises:
        DataError: If there is no sample, or one cannot be used.
    """
    found = read_unlabelled(data, recipe.input_shape, convert=convert, labelled=True)
    labels, note = labels_of(data, found, recipe.classes)
    target = recipe.new_target()
    target.load_state_dict(dict(tensors), assign=True)
    target.eval().to(device)
    with torch.no_grad():
        rows = [target(batch).softmax(dim=1).cpu().numpy() for batch in batches(found, recipe, device)]
    return Predictions(
        column=found.column,
        names=found.names,
        classes=recipe.classes,
        probabilities=np.concatenate(rows),
        labels=labels,
        notes=(*found.notes, *([note] if note else [])),
    )


def batches(found: Unlabelled, recipe: TargetRecipe, device: torch.device) -> Iterator[Tensor]:
    """Yield samples, normalised, on a device."""
    for begin in range(0, len(found), BATCH):
        part = found.samples[begin : begin + BATCH].copy()
        yield normalised(part, recipe.mean, recipe.std).to(device)
