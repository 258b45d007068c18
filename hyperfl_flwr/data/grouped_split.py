"""Divide samples so that all samples of a group, such as a patient, are on the same side."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import IntArray

AUTO, NONE, FOLDER = "auto", "none", "folder"
"""Values of `data.group-by` besides a pattern: the groups that the data name, none, and one for each sub-folder."""

KINDS = (AUTO, NONE, FOLDER)


def parse_grouping(text: str) -> str:
    """Check a value of `data.group-by`: `auto`, `none`, `folder`, or a regular expression with one group.

    Raises:
        ValueError: If it is none of these.
    """
    if text in KINDS:
        return text
    try:
        groups = re.compile(text).groups
    except (re.error, RecursionError) as error:
        raise ValueError(
            f"must be auto, none, folder or a regular expression with one group; got {text!r} ({error})"
        ) from None
    if groups != 1:
        raise ValueError(
            f"must be auto, none, folder or a regular expression with one group in brackets, such as (p[0-9]+)_; got "
            f"{text!r} with {groups}"
        )
    return text


def group_names(names: Sequence[str], grouping: str, part: str) -> list[str]:
    """Return the group of each file.

    Args:
        names: Paths below the folder of the class, with slashes.
        grouping: `folder`: a group is the first folder of the path; a file without one is a group of its own. Otherwise
            a regular expression, which is searched in the path; its group is the name.
        part: Name of the part of the data, which makes groups of single files different from those of other parts.

    Raises:
        DataError: If the expression is not found in a path.
    """
    if grouping == FOLDER:
        return [name.partition("/")[0] if "/" in name else f"/{part}/{number}" for number, name in enumerate(names)]
    found = [re.search(grouping, name) for name in names]
    if missing := [name for name, match in zip(names, found, strict=True) if match is None or match[1] is None]:
        raise DataError(
            f"data.group-by = {grouping!r} must be found in the path of every image below the folder of its class, but "
            f"{len(missing)} of {len(names)} lack it, the first is {missing[0]}; change the pattern",
            public="data.group-by is not found in all of its paths",
        )
    return [match[1] for match in found if match is not None]


def numbered(*names: Sequence[object] | npt.NDArray[Any]) -> list[IntArray]:
    """Return group names of several parts as numbers from 0, equal names in all parts as the same number."""
    every = np.unique(np.concatenate([np.asarray(part, dtype=str) for part in names]))
    return [np.searchsorted(every, np.asarray(part, dtype=str)).astype(np.int64) for part in names]


def refuse_shared(train: IntArray, test: IntArray, where: str) -> None:
    """Refuse an owner's division with a group on both sides.

    Args:
        train: Groups of the training samples, numbered as those of the test samples.
        test: Groups of the test samples.
        where: Name of the data, for the error.

    Raises:
        DataError: If a group is on both sides.
    """
    if shared := len(np.intersect1d(train, test)):
        raise DataError(
            f"{where}: no group may have both training and test samples, but {shared} have; move all samples of a "
            f"group to one part, or set data.group-by=none to accept an accuracy that is too high",
            public="its own division has a group (data.group-by) in both parts",
        )


def refuse_lost(classes: IntArray, train: IntArray, where: str) -> None:
    """Refuse a division by whole groups that leaves a class without training samples.

    Args:
        classes: Class of each sample [n].
        train: Positions of the training samples.
        where: Name of the data, for the error.

    Raises:
        DataError: If a class has no training sample.
    """
    if lost := len(np.setdiff1d(classes, classes[train])):
        raise DataError(
            f"{where}: divided by whole groups, {lost} of {len(np.unique(classes))} classes have no training samples, "
            f"since a single group has all of a class; add groups, give test data, or set data.group-by=none",
            public="its data cannot be divided by groups (data.group-by) without losing a class",
        )


def split_groups(
    strata: IntArray, groups: IntArray, share: float, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Divide samples into two parts by whole groups, with about the share of each stratum in the second part.

    Groups are taken in random order; one goes to the second part if that brings the strata nearer to their share. The
    first part keeps samples of every stratum. The second one gets a group of every stratum that has two or more, as far
    as the first part allows. scikit-learn's `StratifiedGroupKFold` has neither, and its time grows with the number of
    folds, of which a small share needs many.

    Args:
        strata: Class or client of each sample [n].
        groups: Group of each sample [n].
        share: Share of the samples in the second part, in (0, 1); groups differ in size, so it is approximate.
        rng: Source of the choice.

    Returns:
        Sorted positions of the first and of the second part.

    Raises:
        ValueError: If there are fewer than two groups.
    """
    (_, strata), (names, groups) = (np.unique(values, return_inverse=True) for values in (strata, groups))
    if len(names) < 2:
        raise ValueError(f"two parts need two or more groups, got {len(names)}")
    parts = _Parts(strata, groups, share)
    order = rng.permutation(len(names))
    for group in order:
        if parts.allows(group) and parts.is_better_with(group):
            parts.take(group)
    for group in order[np.argsort(parts.sizes[order], kind="stable")]:  # small ones, which change the share the least
        if not parts.taken[group] and parts.allows(group) and parts.has_missing(group):
            parts.take(group)
    if not parts.taken.any():  # every group has all samples of a stratum
        parts.take(order[np.argmin(parts.sizes[order])])
    of_second = parts.taken[groups]
    return np.flatnonzero(~of_second), np.flatnonzero(of_second)


class _Parts:
    """Two parts of samples while groups are moved to the second one.

    Attributes:
        sizes: Number of samples of each group.
        taken: Whether each group is in the second part.
    """

    def __init__(self, strata: IntArray, groups: IntArray, share: float) -> None:
        self.sizes = np.bincount(groups)
        self.taken = np.zeros(len(self.sizes), dtype=bool)
        self._totals = np.bincount(strata)
        self._targets = share * self._totals
        self._second = np.zeros(len(self._totals), dtype=np.int64)
        # The non-zero numbers of samples by group and stratum, ordered by group.
        width = len(self._totals)
        cells, self._counts = np.unique(groups.astype(np.int64) * width + strata, return_counts=True)
        self._strata = cells % width
        self._starts = np.searchsorted(cells // width, np.arange(len(self.sizes) + 1))

    def _of(self, group: int) -> tuple[IntArray, IntArray]:
        """Return the strata of a group, and its number of samples in each."""
        chosen = slice(self._starts[group], self._starts[group + 1])
        return self._strata[chosen], self._counts[chosen]

    def allows(self, group: int) -> bool:
        """Return whether the first part would keep samples of all strata without the group."""
        strata, counts = self._of(group)
        return bool((self._second[strata] + counts < self._totals[strata]).all())

    def is_better_with(self, group: int) -> bool:
        """Return whether the group brings the second part nearer to the share of all strata, by squared distances."""
        strata, counts = self._of(group)
        change = counts * (counts + 2 * (self._second[strata] - self._targets[strata]))
        return bool((change / self._totals[strata]).sum() < 0)

    def has_missing(self, group: int) -> bool:
        """Return whether the group has samples of a stratum that the second part lacks."""
        return bool((self._second[self._of(group)[0]] == 0).any())

    def take(self, group: int) -> None:
        """Move a group to the second part."""
        strata, counts = self._of(group)
        self._second[strata] += counts
        self.taken[group] = True
