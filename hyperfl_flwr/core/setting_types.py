"""What a setting may be, in a module that imports next to nothing: commands that need no more begin at once."""

from typing import Literal

Scalar = str | int | float | bool
"""What a run-config value may be (Flower's `UserConfigValue`)."""


Realisation = Literal["mean", "chain"]
"""PRIV-HFL's pairs of clients: each with the mean of all, or with its neighbours in a chain."""

Order = Literal["alternating", "published"]
"""PRIV-HFL's order of primal and dual steps."""


def number(value: Literal["auto"] | float) -> float:
    """Return a setting's number where `hyperfl_flwr.app.resolved` has put one in the place of `auto`.

    Raises:
        ValueError: If it has not.
    """
    if value == "auto":
        raise ValueError("a setting is still auto; pass the run's settings through hyperfl_flwr.app.resolved.resolved")
    return value
