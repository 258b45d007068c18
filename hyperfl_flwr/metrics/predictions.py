"""Predict the classes of custom samples with a model, one prediction per sample."""

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
from hyperfl_flwr.models.provenance import refuse_other_body

BATCH = 500
"""Number of samples on the device at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """Predictions for n samples in K classes.

    Attributes:
        column: Kind of the names: `file` or `index`.
        names: Names of the samples [n].
        classes: Names of the classes [K].
        probabilities: The model's softmax [n, K].
        labels: True labels of the samples [n]; None without labels.
        notes: Notes for the user about files, keys or labels that were left out.
    """

    column: str
    names: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities: NDArray[np.float32]
    labels: IntArray | None
    notes: tuple[str, ...]

    @property
    def accuracy(self) -> float | None:
        """Share of correctly classified samples, in [0, 1]; None without labels."""
        if self.labels is None:
            return None
        return float((self.probabilities.argmax(axis=1) == self.labels).mean())

    def table(self) -> str:
        """Return a table in CSV: name, predicted class, its probability, the label (if known), all probabilities."""
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
        tensors: Parameters of the target network by name.
        recipe: Description of how to build and use the network.
        data: The folder or the file.
        device: Device to compute on.
        convert: True to convert images of another size or with other channels.

    Raises:
        DataError: If there are no samples, or if a sample cannot be used.
        ConfigError: If the weights of a pre-trained body are missing, or others than in the training.
    """
    found = read_unlabelled(data, recipe.input_shape, convert=convert, labelled=True)
    labels, note = labels_of(data, found, recipe.classes)
    refuse_other_body(recipe.target, recipe.body)
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
    """Yield normalised batches of at most `BATCH` samples on a device."""
    for begin in range(0, len(found), BATCH):
        part = found.samples[begin : begin + BATCH].copy()  # `normalised` overwrites it, and the samples are shared
        yield normalised(part, recipe.mean, recipe.std).to(device)
