"""Weights of training samples, by which a pass of local training has some more often than others."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError, RefusalError
from hyperfl_flwr.data.dataset import IntArray, Split

Weights = npt.NDArray[np.float64]
"""Weight of each sample [n], finite and at least 0."""

NONE, BALANCED = "none", "balanced"
"""Values of `class-weights` besides numbers: all classes have the weight 1; a client's classes are equally frequent."""


def parse_class_weights(text: str) -> str:
    """Check a value of `class-weights`: `none`, `balanced`, or numbers with commas between them.

    Raises:
        ValueError: If it is none of these, a number is negative or not finite, or all are 0.
    """
    if text not in (NONE, BALANCED):
        try:
            numbers = _numbers(text)
        except ValueError:
            numbers = []
        if not all(0 <= number < math.inf for number in numbers) or not any(numbers):
            raise ValueError(
                f"must be none, balanced, or a number of at least 0 for each class, not all of them 0, with commas "
                f"between them; got {text!r}"
            )
    return text


LARGEST_RATIO = 10.0
"""Largest quotient of two class weights that a server may set on a node that has an owner."""


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """How the training samples of a client are weighted.

    Attributes:
        classes: Value of `class-weights`.
        samples: Value of `sample-weights`: `auto` to use the weights that the data have, `none` to ignore them.
        allowed: Whether samples may have weights; noisy steps need batches in which all are equally frequent.
    """

    classes: str = NONE
    samples: str = "auto"
    allowed: bool = True

    def check(self, split: Split, num_classes: int) -> None:
        """Refuse training data that do not fit.

        Raises:
            DataError: If the data have weights that must not be used, or `class-weights` does not have K numbers.
        """
        if not self.allowed and split.weights is not None and self.samples != NONE:
            text = (
                "training data must not have weights (the key weights) with dp.epsilon above 0, whose batches have all "
                "samples with the same probability; set sample-weights=none to ignore them, or dp.epsilon=0"
            )
            raise DataError(text, public=text)
        if self.classes != NONE and split.targets is not None:
            text = f"class-weights must be none where the data have no classes, got {self.classes}"
            raise DataError(text, public=text)
        if self.classes not in (NONE, BALANCED) and len(_numbers(self.classes)) != num_classes:
            text = f"class-weights must have a number for each of the {num_classes} classes, got {self.classes}"
            raise DataError(text, public=text)

    def refuse_isolation(self) -> None:
        """Refuse weights by which a server could have an owner's model trained almost on chosen classes alone.

        A rare class can still fill a large part of a pass, as it does with `balanced`.

        Raises:
            RefusalError: If the largest class weight is more than `LARGEST_RATIO` times the smallest.
        """
        numbers = [] if self.classes in (NONE, BALANCED) else _numbers(self.classes)
        if numbers and max(numbers) > LARGEST_RATIO * min(numbers):
            raise RefusalError(
                f"class-weights must not differ by more than a factor of {LARGEST_RATIO:g} on a node that has "
                f"an owner, so that a server cannot single out a class; got {self.classes}"
            )

    def of_client(self, split: Split, indices: IntArray, num_classes: int) -> Weights | None:
        """Return the weights of a client's training samples, which `check` has accepted.

        A sample's weight is the product of its own and of its class's. With `balanced`, that of a class is such that
        the weights of each class that the client has add up to the same.

        Args:
            split: The training data of all clients.
            indices: Positions in it of the client's samples.
            num_classes: Number of classes K.

        Returns:
            The weights, at least one above 0; None if all samples have the same.

        Raises:
            DataError: If no weight is above 0.
        """
        own = split.weights[indices] if split.weights is not None and self.samples != NONE else np.ones(len(indices))
        weights, labels = _scaled(own.astype(np.float64)), split.labels[indices]
        if self.classes == BALANCED:
            totals = np.bincount(labels, weights=weights, minlength=num_classes)
            weights = np.divide(weights, totals[labels], out=np.zeros_like(weights), where=totals[labels] > 0)
        elif self.classes != NONE:
            weights *= _scaled(np.array(_numbers(self.classes)))[labels]
        if len(weights) and not weights.any():
            text = "class-weights and the weights of the data must leave a client a sample with a weight above 0"
            raise DataError(f"{text}; change class-weights or the key weights", public=text)
        return None if not len(weights) or (weights == weights[0]).all() else weights


EQUAL = Weighting()
"""The default settings."""


def _scaled(weights: Weights) -> Weights:
    """Return weights divided by the largest, so that products and sums of them are finite."""
    largest = weights.max(initial=0.0)
    return weights / largest if largest > 0 else weights


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]
