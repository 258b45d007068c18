"""Draw the samples of a pass in which some occur more often than others."""

import numpy as np
from numpy.typing import NDArray


def weighted_order(weights: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the positions of the samples of one pass, in random order.

    A sample of weight w occurs n w / sum(w) times on average. Systematic sampling keeps the numbers near that: a sample
    occurs so often, rounded down or up, and so does the set of all samples of one weight, such as a class. With equal
    weights, each occurs once. The mean gradient of a pass is then that of the weighted loss on average.

    Args:
        weights: Weights [n], at least 0 and not all 0.
        rng: Source of the choice.

    Returns:
        Positions [n] in 0..n-1.
    """
    weights = weights / weights.max()  # so that their sum is finite
    order = rng.permutation(len(weights))
    order = order[np.argsort(weights[order], kind="stable")]
    ends = np.cumsum(weights[order])
    marks = (rng.random() + np.arange(len(order))) * (ends[-1] / len(order))
    # The last sample has the largest weight, which is above 0; rounding must not move a mark behind it.
    chosen = np.minimum(np.searchsorted(ends, marks, side="right"), len(order) - 1)
    return rng.permutation(order[chosen])
