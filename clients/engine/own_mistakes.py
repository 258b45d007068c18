"""Checks of what the class of a client declares and returns: mistakes that would show elsewhere, or not at all."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from hyperfl_flwr.core.similar_names import nearest


def check_groups(client: type, attribute: str, names: Iterable[str], built: Sequence[str]) -> None:
    """Refuse names of groups for which there is no module.

    Args:
        client: The client's class.
        attribute: Its attribute with the names, `shared` or `private`.
        names: The names.
        built: Names of the groups that `build_groups` has returned.
    """
    if isinstance(names, str):
        raise TypeError(f'{client.__name__}.{attribute} must be a tuple of names, got a text; write ("{names}",)')
    if missing := next((name for name in names if name not in built), None):
        raise ValueError(
            f"{client.__name__}.{attribute} names the group {missing}, but build_groups returned {', '.join(built)}"
            f"{nearest(missing, built)}"
        )


def numbers_of(trained: object, client: type) -> dict[str, float]:
    """Return the metrics of a training as numbers of Python; scalars of NumPy and torch are converted.

    Args:
        trained: What `train` has returned.
        client: The client's class.
    """
    function = f"{client.__name__}.train"
    if not isinstance(trained, Mapping):
        raise TypeError(
            f"{function} must return a dictionary of numbers to report, got {_short(trained)}; return that of "
            f"super().train(rng), or {{}}"
        )
    found: dict[str, float] = {}
    for name, value in trained.items():
        if isinstance(value, np.bool_ | np.number) or (isinstance(value, Tensor) and value.numel() == 1):
            found[name] = float(value)
        elif isinstance(value, int | float):
            found[name] = value
        else:
            raise TypeError(
                f"{function} must return a number for {name}, got {_short(value)}; leave it out or convert it"
            )
    return found


def _short(value: object) -> str:
    """Return a description of a value that has none of its numbers, which may be private."""
    return "None" if value is None else f"a {type(value).__name__}"
