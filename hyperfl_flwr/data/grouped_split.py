"""Divide samples so that all samples of a group, such as a patient, are on the same side."""

import re
import warnings
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
    if missing := [name for name, match in zip(names, found, strict=True) if match is None]:
        raise DataError(
            f"data.group-by = {grouping!r} must be found in the path of every image below the folder of its class, but "
            f"{len(missing)} of {len(names)} lack it, the first is {missing[0]}; change the pattern",
            public=f"data.group-by is not found in {len(missing)} of its paths",
        )
    return [match[1] or "" for match in found if match is not None]


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
            public=f"{shared} groups of its samples are in both parts",
        )


def split_groups(
    strata: IntArray, groups: IntArray, share: float, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Divide samples into two parts by whole groups, with about the same strata in both (scikit-learn).

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
    from sklearn.model_selection import StratifiedGroupKFold  # takes half a second; few data sets have groups

    if (number := len(np.unique(groups))) < 2:
        raise ValueError(f"two parts need two or more groups, got {number}")
    smaller = min(share, 1 - share)
    folds = max(2, min(number, round(1 / smaller), int(np.bincount(strata).max())))
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=int(rng.integers(2**31)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The least populated class")  # small classes are allowed
        parts = [part for _, part in splitter.split(strata[:, None], strata, groups)]
    allowed = [part for part in parts if 0 < len(part) < len(strata)]
    chosen = np.sort(min(allowed, key=lambda part: abs(len(part) - smaller * len(strata))))
    rest = np.setdiff1d(np.arange(len(strata)), chosen)
    return (rest, chosen) if share <= 0.5 else (chosen, rest)
