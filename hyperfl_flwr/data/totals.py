"""The published sizes of named data sets, and what differs from them in the files on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hyperfl_flwr.data.dataset import Dataset

PARTS = ("train", "test")


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Published numbers of a data set's samples.

    Attributes:
        train: Number of training samples.
        test: Number of test samples.
        classes: Number of classes K.
        source: Where the numbers are published.
        per_class: Number of samples of every class by part, where all classes have the same; empty otherwise.
        groups: Number of samples of both parts together in some classes: first class, class after the last one, number.
    """

    train: int
    test: int
    classes: int
    source: str
    per_class: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)


TOTALS: Mapping[str, Totals] = {
    "emnist": Totals(
        train=697_932,
        test=116_323,
        classes=62,
        source="Cohen, Afshar, Tapson and van Schaik, arXiv:1702.05373, 2017, By_Class",
        groups={"digits": (0, 10, 402_953), "capitals": (10, 36, 220_304), "small letters": (36, 62, 190_998)},
    ),
    "cinic10": Totals(
        train=90_000,
        test=90_000,
        classes=10,
        source="Darlow, Crowley, Antoniou and Storkey, arXiv:1810.03505, 2018",
        per_class={"train": 9000, "test": 9000},
    ),
}
"""Published numbers by the data set's name."""


def differences(dataset: Dataset, totals: Totals) -> list[str]:
    """Return what differs between a data set and its published numbers, as phrases; empty if nothing does."""
    found = []
    counts = {part: np.bincount(getattr(dataset, part).labels, minlength=totals.classes) for part in PARTS}
    for part, published in zip(PARTS, (totals.train, totals.test), strict=True):
        if (number := int(counts[part].sum())) != published:
            found.append(f"{part} has {number:,} samples instead of {published:,}")
    for part, numbers in counts.items():
        if len(numbers) > totals.classes:
            found.append(f"{part} has labels up to {len(numbers) - 1}, but there are {totals.classes:,} classes")
        if empty := np.flatnonzero(numbers == 0).tolist():
            found.append(f"{part} has no samples of {len(empty)} classes, the first is {_name(dataset, empty[0])}")
        if (published := totals.per_class.get(part, 0)) and (other := np.flatnonzero(numbers != published).tolist()):
            found.append(
                f"{part} does not have {published:,} samples of {len(other)} classes, the first is "
                f"{_name(dataset, other[0])} with {numbers[other[0]]:,}"
            )
    for name, (first, end, published) in totals.groups.items():
        if (number := sum(int(numbers[first:end].sum()) for numbers in counts.values())) != published:
            found.append(f"both parts have {number:,} {name} instead of {published:,}")
    return found


def _name(dataset: Dataset, label: int) -> str:
    return dataset.classes[label] if dataset.classes and label < len(dataset.classes) else str(label)
