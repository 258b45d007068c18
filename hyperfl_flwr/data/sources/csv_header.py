"""The columns of a CSV file that are no features, and the checks of its header."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.sources.npz_columns import wrong

LABEL, CLIENT, GROUP, WEIGHT, SPLIT = "label", "client", "group", "sample_weight", "split"
LABELS = f"{LABEL}:"
"""Start of the names of several columns of labels or targets, before the name of each."""

_LONGEST = 60
"""Most characters of a name in an error; the other name may come from a server."""

_RESERVED = (LABEL, CLIENT, GROUP, WEIGHT, SPLIT)

_MEANT = {"labels": LABEL, "clients": CLIENT, "groups": GROUP, **{name: name for name in _RESERVED}}
"""Columns by a name in small letters that says the same; those in the plural are keys of an `.npz` file."""


def is_reserved(name: str) -> bool:
    """Return whether a column is no feature."""
    return name in _RESERVED or name.startswith(LABELS)


def check_header(header: Sequence[str], path: Path) -> None:
    """Refuse a header with a column without a name, or with one that would be taken for a feature by mistake.

    Args:
        header: Names of the columns.
        path: The file, for errors.

    Raises:
        DataError: If a name is missing or there twice, or is nearly that of a column that is no feature.
    """
    named = [name for name in header if name]
    if len(named) < len(header) or len(set(named)) < len(named):
        raise wrong(path, f"every column must have a name of its own, got {', '.join(header)}", "rename them")
    if near := [name for name in header if _meant(name) != name]:
        raise wrong(path, f"the column {near[0]} is neither {_meant(near[0])} nor a feature", "rename it")
    if LABELS in header:
        raise wrong(path, f"the column {LABELS} must have the name of a label after the colon", "rename it")


def _meant(name: str) -> str:
    """Return the name of the column that is no feature and is nearly called so; else the name itself."""
    lower = name.lower()
    return LABELS + name[len(LABELS) :] if lower.startswith(LABELS) else _MEANT.get(lower, name)


def require_features(found: Sequence[str], expected: Sequence[str], path: str) -> None:
    """Refuse features with other names than a model's, or in another order; without names they are not compared.

    Args:
        found: Names of the features of the samples.
        expected: Names of those that the model was trained on.
        path: The file, for errors.

    Raises:
        DataError: If they differ.
    """
    if not (found and expected) or tuple(found) == tuple(expected):
        return
    place = next(i for i, pair in enumerate(itertools.zip_longest(found, expected)) if pair[0] != pair[1])
    names = [repr(names[place])[:_LONGEST] if place < len(names) else "none" for names in (found, expected)]
    same = "the same columns in another order" if sorted(found) == sorted(expected) else "other columns"
    raise DataError(
        f"{path} has {same} than the model was trained on: feature {place + 1} is {names[0]}, and was {names[1]}; give "
        f"the columns in the order of the training data"
    )
