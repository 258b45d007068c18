"""Usual sizes of the numbers in shared arrays, which changes are measured against where what was sent is smaller."""

USUAL_SIZE = 0.05
"""Approximate root mean square of a network's initial parameters."""

LARGE_SIZE = 1.0
"""The largest of gradients, and of the changes of running statistics of BatchNorm, which begin at 0."""

GRADIENTS = frozenset({"control"})
"""Groups that hold gradients: SCAFFOLD's control variates begin at 0, and are up to 1 in a classifier's bias."""

GRADIENTS_AS_MEANS = frozenset({"generator"})
"""Groups of gradients of which the server takes the mean: PRIV-HFL's, of a generator that it trains."""

GRADIENT_SIZE = 0.2
"""Root mean square that updates of `GRADIENTS` are measured against where what was sent is smaller.

Clients of a few samples send up to 0.7, others mostly less than 0.01. With 10 times this, forged ones stay below 2.
"""
