"""Suggestions for names that are misspelt, or that other programs use."""

import difflib
import re
from collections.abc import Iterable

SYNONYMS = {
    "alpha": "data.dirichlet-alpha",
    "bs": "batch-size",
    "clients": "num-clients",
    "epochs": "local-epochs",
    "fraction-fit": "fraction-train",
    "lr": "learning-rate",
    "model": "target",
    "network": "target",
    "rounds": "num-rounds",
    "wd": "weight-decay",
    "mlp-200": "mlp",
    "solo": "local",
}
"""Common other names of settings, methods and networks."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known name that is meant, or an empty string.

    It is the one that differs in case, hyphens and underscores only, else one with the same part after a dot, a common
    other name, or the one with the most letters in common.
    """
    names = list(known)
    same = meant(name, names) or difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {' or '.join(same[:3])}?" if same else ""


def meant(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that another spelling or a common other name stands for; empty if there is none."""
    names, folded = list(known), _folded(name)
    same = [each for each in names if _folded(each) == folded]
    synonym = SYNONYMS.get(re.sub("_", "-", name.lower()))
    others = [each for each in names if _folded(each.rpartition(".")[2]) == folded and each != synonym]
    return same or ([synonym] if synonym in names else []) + others


def _folded(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())
