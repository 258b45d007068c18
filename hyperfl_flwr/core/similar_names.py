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
    folded = _folded(name)
    same = [each for each in names if _folded(each) == folded]
    same = same or [each for each in names if _folded(each.rpartition(".")[2]) == folded]
    synonym = SYNONYMS.get(re.sub("_", "-", name.lower()))
    if not same and synonym in names:
        same = [synonym]
    same = same or difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {' or '.join(same[:3])}?" if same else ""


def _folded(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())
