"""Use a model on custom samples: one prediction per sample, and its worth where the labels are known."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.core.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, TASKS, Task, class_name
from hyperfl_flwr.data.dataset import IntArray, Targets
from hyperfl_flwr.data.digests import Digests, digests
from hyperfl_flwr.data.federated_data import normalised
from hyperfl_flwr.data.labels import labels_of
from hyperfl_flwr.data.sample_format import window_of
from hyperfl_flwr.data.unlabelled import Unlabelled, read_unlabelled
from hyperfl_flwr.metrics.classification import ClassScores, predicted_classes
from hyperfl_flwr.metrics.multi_label import LabelScores
from hyperfl_flwr.metrics.regression import NumberScores
from hyperfl_flwr.metrics.scores import Scores
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.provenance import refuse_other_body

BATCH = 500
"""Number of samples on the device at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """Predictions for n samples.

    Attributes:
        column: Kind of the names: `file` or `index`.
        names: Names of the samples [n].
        task: What is predicted.
        classes: Names of the classes, labels or targets [K].
        outputs: The model's softmax, sigmoid, or predicted numbers in the units of the targets [n, K].
        labels: What is true of the samples [n] or [n, K]; None if it is not known.
        target_std: Standard deviation of each target of a regression, in which errors are measured.
        trained_on: Whether the model was trained on the sample [n]; None if that is not known.
        notes: Notes for the user about files, keys or labels that were left out.
    """

    column: str
    names: tuple[str, ...]
    task: Task
    classes: tuple[str, ...]
    outputs: NDArray[np.float32]
    labels: IntArray | Targets | None
    target_std: tuple[float, ...]
    trained_on: NDArray[np.bool_] | None
    notes: tuple[str, ...]

    @property
    def score(self) -> float | None:
        """Main score of the task; None if the labels are not known."""
        found = self.scores()
        return None if found is None else found.score

    def scores(self, *, trained_on: bool | None = None) -> Scores | None:
        """Return what the predictions are worth; None without labels, or without such samples.

        Args:
            trained_on: True or False for the samples that the model was trained on, or was not; None for all.
        """
        if self.labels is None or (trained_on is not None and self.trained_on is None):
            return None
        chosen = slice(None) if trained_on is None else self.trained_on == trained_on
        labels, outputs = self.labels[chosen], self.outputs[chosen].astype(np.float64)
        if not len(labels):
            return None
        if self.task is REGRESSION:
            std = np.array(self.target_std)
            truth, predicted = labels / std, outputs / std
            return NumberScores(
                labels=truth, predicted=predicted, loss=float(((predicted - truth) ** 2).mean(axis=1).sum())
            )
        with np.errstate(divide="ignore"):  # a probability that underflows has an infinite loss
            if self.task is MULTI_LABEL:
                right = np.where(labels, outputs, 1 - outputs)
                loss = -float(np.log(right).mean(axis=1).sum())
                return LabelScores(labels=labels.astype(bool), probabilities=outputs, loss=loss)
            classes = labels.astype(np.int64)
            loss = -float(np.log(outputs[np.arange(len(classes)), classes]).sum())
        predicted = predicted_classes(outputs.argmax(axis=1), outputs)
        return ClassScores(labels=classes, predicted=predicted, probabilities=outputs, loss=loss)

    def table(self) -> str:
        """Return a table in CSV.

        Its columns are the name; of classes the predicted class, its probability, the true class (`label`, if known);
        of labels the predicted ones with semicolons between them; the part (`train` or `other`, if known); all
        probabilities, or the predicted numbers; and of labels and targets what is true (`label:NAME`, if known).
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        part = [] if self.trained_on is None else ["part"]
        ends = [] if self.labels is None or self.task is CLASSIFICATION else [f"label:{name}" for name in self.classes]
        shares = [name if self.task is REGRESSION else f"p({name})" for name in self.classes]
        writer.writerow([self.column, *self._first_columns(), *part, *shares, *ends])
        for number, (name, row) in enumerate(zip(self.names, self.outputs, strict=True)):
            facts = self._first_fields(number)
            if self.trained_on is not None:
                facts.append("train" if self.trained_on[number] else "other")
            truth = self.labels[number] if self.labels is not None and ends else ()
            form = "{:.6g}" if self.task is REGRESSION else "{:.6f}"
            writer.writerow([name, *facts, *map(form.format, row), *(f"{float(value):g}" for value in truth)])
        return text.getvalue()

    def _first_columns(self) -> list[str]:
        if self.task is CLASSIFICATION:
            return ["class", "confidence", *([] if self.labels is None else ["label"])]
        return ["labels"] if self.task is MULTI_LABEL else []

    def _first_fields(self, number: int) -> list[str]:
        row = self.outputs[number]
        if self.task is CLASSIFICATION:
            (best,) = predicted_classes(row.argmax(keepdims=True), row[None])
            label = [] if self.labels is None else [self.classes[int(self.labels[number])]]
            return [class_name(best, self.classes), f"{row[best]:.6f}", *label]
        predicted = [name for name, share in zip(self.classes, row, strict=True) if share > 0.5]
        return [";".join(predicted)] if self.task is MULTI_LABEL else []


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
    found = read_unlabelled(
        data, recipe.input_shape, convert=convert, labelled=True, window=window_of(recipe.window),
        features=recipe.features,
    )  # fmt: skip
    task = TASKS[recipe.task]
    labels, note = labels_of(data, found, recipe.classes, task)
    refuse_other_body(recipe.target, recipe.body)
    target = recipe.new_target()
    target.load_state_dict(dict(tensors), assign=True)
    target.eval().to(device)
    with torch.no_grad():
        rows = [_as_predictions(target(batch), recipe, task) for batch in batches(found, recipe, device)]
    return Predictions(
        column=found.column,
        names=found.names,
        task=task,
        classes=recipe.classes,
        outputs=np.concatenate(rows),
        labels=labels,
        target_std=recipe.target_std,
        trained_on=None if trained_on is None else np.isin(digests(found.samples), trained_on),
        notes=(*found.notes, *([note] if note else [])),
    )


def batches(found: Unlabelled, recipe: TargetRecipe, device: torch.device) -> Iterator[Tensor]:
    """Yield normalised batches of at most `BATCH` samples on a device."""
    for begin in range(0, len(found), BATCH):
        part = found.samples[begin : begin + BATCH].copy()  # `normalised` overwrites it, and the samples are shared
        yield normalised(part, recipe.mean, recipe.std).to(device)


def _as_predictions(outputs: Tensor, recipe: TargetRecipe, task: Task) -> NDArray[np.float32]:
    """Return a network's outputs [B, K] as probabilities, or as numbers in the units of the targets."""
    if task is REGRESSION:
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (recipe.target_mean, recipe.target_std))
        numbers: NDArray[np.float32] = (outputs.cpu().double() * std + mean).float().numpy()
        return numbers
    shares: NDArray[np.float32] = (outputs.sigmoid() if task is MULTI_LABEL else outputs.softmax(dim=1)).cpu().numpy()
    return shares
