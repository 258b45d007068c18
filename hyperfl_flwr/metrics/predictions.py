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
from hyperfl_flwr.data.digests import Digests, digests
from hyperfl_flwr.data.federated_data import normalised
from hyperfl_flwr.data.labels import labels_of
from hyperfl_flwr.data.sample_format import window_of
from hyperfl_flwr.data.unlabelled import Unlabelled, read_unlabelled
from hyperfl_flwr.metrics.classification import Scores
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
        trained_on: Whether the model was trained on the sample [n]; None if that is not known.
        notes: Notes for the user about files, keys or labels that were left out.
    """

    column: str
    names: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities: NDArray[np.float32]
    labels: IntArray | None
    trained_on: NDArray[np.bool_] | None
    notes: tuple[str, ...]

    @property
    def accuracy(self) -> float | None:
        """Share of correctly classified samples, in [0, 1]; None without labels."""
        found = self.scores()
        return None if found is None else found.accuracy

    def scores(self, *, trained_on: bool | None = None) -> Scores | None:
        """Return what the predictions are worth; None without labels, or without such samples.

        Args:
            trained_on: True or False for the samples that the model was trained on, or was not; None for all.
        """
        if self.labels is None or (trained_on is not None and self.trained_on is None):
            return None
        chosen = slice(None) if trained_on is None else self.trained_on == trained_on
        labels, probabilities = self.labels[chosen], self.probabilities[chosen].astype(np.float64)
        if not len(labels):
            return None
        with np.errstate(divide="ignore"):  # a softmax that underflows has an infinite loss
            loss = -float(np.log(probabilities[np.arange(len(labels)), labels]).sum())
        return Scores(labels=labels, predicted=probabilities.argmax(axis=1), probabilities=probabilities, loss=loss)

    def table(self) -> str:
        """Return a table in CSV.

        Its columns are name, predicted class, its probability, the label (if known), the part (`train` or `other`, if
        known), and all probabilities.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        known = [*([] if self.labels is None else ["label"]), *([] if self.trained_on is None else ["part"])]
        writer.writerow([self.column, "class", "confidence", *known, *(f"p({name})" for name in self.classes)])
        for number, (name, row) in enumerate(zip(self.names, self.probabilities, strict=True)):
            best = int(row.argmax())
            facts = [] if self.labels is None else [self.classes[int(self.labels[number])]]
            if self.trained_on is not None:
                facts.append("train" if self.trained_on[number] else "other")
            writer.writerow([name, self.classes[best], f"{row[best]:.6f}", *facts, *(f"{share:.6f}" for share in row)])
        return text.getvalue()


def predict(
    tensors: Mapping[str, Tensor],
    recipe: TargetRecipe,
    data: Path,
    device: torch.device,
    *,
    convert: bool = False,
    trained_on: Digests | None = None,
) -> Predictions:
    """Predict all samples of a folder of images, or of an `.npz` or CSV file.

    Args:
        tensors: Parameters of the target network by name.
        recipe: Description of how to build and use the network.
        data: The folder or the file.
        device: Device to compute on.
        convert: True to convert images of another size or with other channels.
        trained_on: Digests of the samples that the model was trained on; None if they are not known.

    Raises:
        DataError: If there are no samples, or if a sample cannot be used.
        ConfigError: If the weights of a pre-trained body are missing, or others than in the training.
    """
    found = read_unlabelled(data, recipe.input_shape, convert=convert, labelled=True, window=window_of(recipe.window))
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
        trained_on=None if trained_on is None else np.isin(digests(found.samples), trained_on),
        notes=(*found.notes, *([note] if note else [])),
    )


def batches(found: Unlabelled, recipe: TargetRecipe, device: torch.device) -> Iterator[Tensor]:
    """Yield normalised batches of at most `BATCH` samples on a device."""
    for begin in range(0, len(found), BATCH):
        part = found.samples[begin : begin + BATCH].copy()  # `normalised` overwrites it, and the samples are shared
        yield normalised(part, recipe.mean, recipe.std).to(device)
