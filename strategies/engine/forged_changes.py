"""The changes that malicious nodes send in the place of honest ones, by the formulas of the attacks' papers.

All formulas are for single elements, so that arrays may be cut into blocks. Rows are senders: nodes, or clients whose
arrays are sent alone. A change is what training has added to what was sent.

- Baruch, Baruch, Goldberg: "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019.
- Xie, Koyejo, Gupta: "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation", UAI 2020.
- Bagdasaryan, Veit, Hua, Estrin, Shmatikov: "How To Backdoor Federated Learning", AISTATS 2020.
"""

from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Changes = NDArray[np.float64]

IPM_SCALE = 0.5
"""Factor ε of inner product manipulation with `adversary.scale = auto`."""


def forged_changes(
    attack: str, scale: float | Literal["auto"], changes: Changes, weights: Changes, malicious: NDArray[np.bool_]
) -> Changes:
    """Return what the L malicious nodes among S senders send in the place of their changes.

    Args:
        attack: The attack, `adversary.attack`.
        scale: Size of the forged change, `adversary.scale`.
        changes: The honest changes of all senders [S, ...].
        weights: Weight of each sender in the mean [S], above 0.
        malicious: Whether each sender is malicious [S]; at least one does.

    Returns:
        The malicious nodes' changes [L, ...], in their order.

    Raises:
        ValueError: If the attack forges nothing.
    """
    own = changes[malicious]
    if attack == "sign-flip":
        return -(1.0 if scale == "auto" else scale) * own
    if attack == "alie":
        return a_little(own, largest_z(len(malicious), len(own)) if scale == "auto" else scale)
    if attack == "ipm":
        honest = mean_change(changes[~malicious], weights[~malicious])
        return np.broadcast_to(-(IPM_SCALE if scale == "auto" else scale) * honest, own.shape)
    if attack == "backdoor":
        return (weights.sum() / weights[malicious].sum() if scale == "auto" else scale) * own
    raise ValueError(f"the attack {attack} forges no changes")


def a_little(own: Changes, z: float) -> Changes:
    """Return the common change μ + z σ of malicious nodes, with mean μ and deviation σ of their own (algorithm 3).

    They know each other's honest changes, and no others. σ of a single one is 0.

    Args:
        own: The malicious nodes' honest changes [L, ...].
        z: Number of standard deviations (divided by L).
    """
    return np.broadcast_to(own.mean(axis=0) + z * own.std(axis=0), own.shape)


def largest_z(senders: int, malicious: int) -> float:
    """Return the largest z with which honest senders are still farther from the mean than malicious ones (algorithm 3).

    With n senders, m of them malicious, s = floor(n/2 + 1) - m honest ones must be at least as far, so that the
    malicious ones are near the median of a majority: z is the quantile (n - m - s) / (n - m) of the normal
    distribution. It is 0 where that is below a half, since the malicious ones are then too few. If they are the
    majority, no honest sender is needed, and z is that of the last one, s = 1.

    Args:
        senders: Number n of senders.
        malicious: Number m of malicious ones.
    """
    honest = senders - malicious
    supporters = max(1, senders // 2 + 1 - malicious)
    share = (honest - supporters) / honest if honest else 0.0
    return NormalDist().inv_cdf(share) if share > 0.5 else 0.0


def mean_change(changes: Changes, weights: Changes) -> Changes:
    """Return the weighted mean of changes [S, ...], with weights [S]; 0 without a sender."""
    if not len(changes):
        return np.zeros(changes.shape[1:])
    return np.asarray(np.tensordot(weights / weights.sum(), changes, axes=1))
