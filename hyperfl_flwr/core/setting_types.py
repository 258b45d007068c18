"""Types of run-config values; imports almost nothing, so that the command line starts fast."""

from typing import Literal

Scalar = str | int | float | bool
"""Type of a run-config value (Flower's `UserConfigValue`)."""

Precision = Literal["fp32", "tf32", "bf16"]
"""Arithmetic of local training: float32; on GPUs products of numbers rounded to 11 significant bits (TF32); or target
networks in bfloat16."""

Realisation = Literal["mean", "chain"]
"""Consensus pairs of PRIV-HFL: each client with the mean of all clients, or with its neighbours in a chain."""

Order = Literal["alternating", "published"]
"""Order of the primal and dual steps of PRIV-HFL."""

Initialisation = Literal["hyperfan-bias", "hyperfan-weight", "torch"]
"""Initialisation of HyperFL's hypernetwork.

`hyperfan-bias`: the head bias c carries the target's ordinary initialisation and H adds a tenth of its standard
deviation. `hyperfan-weight`: H carries all of it and c is zero. `torch`: torch's defaults for every layer, as the
paper's public code, which makes theta 2 to 13 times too large."""

Pooling = Literal["mean-max", "mean"]
"""Pooling of the sample vectors phi(x) in the encoder of IT-PFL-HN.

`mean-max`: the mean over the samples for the first half of the units of phi, and the maximum for the second half, as in
the paper. `mean`: phi(x) is scaled to length 1 and averaged, so that replacing one of n samples moves the pooled vector
by 2/n at most."""

CLIP_NORMS = (1e-6, 1e6)
"""Clipping norms of noisy steps for which float32 represents clipped gradients and noise with all its digits."""

Combine = Literal["sum", "mean"]
"""Combination of the vector-Jacobian products of a round's clients into one step of pFedHN's server; in the original,
each step has one client."""


def resolved_number(value: Literal["auto"] | float) -> float:
    """Return the value of a numeric setting, after `hyperfl_flwr.app.resolved` has replaced `auto`.

    Raises:
        ValueError: If the setting is still `auto`.
    """
    if value == "auto":
        raise ValueError("a setting is still auto; pass the run's settings through hyperfl_flwr.app.resolved.resolved")
    return value
