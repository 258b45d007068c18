"""Types of run-config values; imports almost nothing, so that the command line starts fast."""

from typing import Literal

Scalar = str | int | float | bool
"""Type of a run-config value (Flower's `UserConfigValue`)."""


Realisation = Literal["mean", "chain"]
"""Consensus pairs of PRIV-HFL: each client with the mean of all clients, or with its neighbours in a chain."""

Order = Literal["alternating", "published"]
"""Order of the primal and dual steps of PRIV-HFL."""


def number(value: Literal["auto"] | float) -> float:
    """Return the number of a setting in which `hyperfl_flwr.app.resolved` has replaced `auto`.

    Raises:
        ValueError: If the setting is still `auto`.
    """
    if value == "auto":
        raise ValueError("a setting is still auto; pass the run's settings through hyperfl_flwr.app.resolved.resolved")
    return value
