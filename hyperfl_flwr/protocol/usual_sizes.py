"""Usual sizes of the numbers in shared arrays, which changes are measured against where what was sent is smaller."""

USUAL_SIZE = 0.05
"""Approximate root mean square of a network's initial parameters."""

LARGE_SIZE = 1.0
"""The same for gradients, and for running statistics of BatchNorm, which begin at 0 and change by about 1."""

GRADIENTS = frozenset({"control"})
"""Groups that hold gradients: SCAFFOLD's control variates begin at 0, and are up to 1 in a classifier's bias."""
