"""The mean of unit vectors with differential privacy: what a client's descriptor is made of.

Every sample's features are scaled to Euclidean norm 1 and averaged over the n samples of the dataset. Two datasets are
neighbours if one is the other with one sample replaced; n is the same for both and is public. Replacing a sample moves
the mean by at most 2 / n, exactly so for two opposite unit vectors. Gaussian noise for this sensitivity is added to the
mean (see `gaussian_mechanism`), so the noise falls as 1 / n. Whatever is computed from the noisy mean, by any layers,
has the same guarantee.

The guarantee holds for one sample of the dataset, against whoever sees the result, and needs that

- each sample's features depend on that sample alone: no normalisation by a batch's statistics;
- the layers that make the features do not depend on the dataset;
- the mean is over samples, not over the means of batches: in a short last batch one sample would weigh more;
- nothing else about the samples leaves. A maximum over samples has no such bound: one sample can move it as far as the
  features range, however large n is;
- every release is counted: k releases from the same data are together (k epsilon, k delta)-private.

IT-PFL-HN ("Inference-Time Personalized Federated Learning", submitted to ICLR 2022, section 7 and lemma 7.1) uses the
classical formula and adds the noise to the descriptor itself, which needs layers after the mean that are linear. Noise
on the mean asks nothing of them. The noise is rounded to floating point and made from 53 random bits, so the guarantee
is not one to the letter (Mironov, CCS 2012), and a delta below 1e-15 means nothing.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyperfl_flwr.privacy.gaussian_mechanism import smallest_sigma
from hyperfl_flwr.privacy.upload import gaussian


def unit_mean(features: ArrayLike) -> NDArray[np.float64]:
    """Return the mean [d] of the rows of `features` [n, d], each scaled to Euclidean norm 1 before.

    A row of zeros has no direction and stays zero: it is inside the unit ball, so the sensitivity's bound holds for it.

    Raises:
        ValueError: If `features` is not a matrix, has no row or column, or holds a value that is not finite. (Rows are
            not skipped: n is public.)
    """
    rows: NDArray[Any] = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"features must be a matrix of samples by features, neither of them 0, not {rows.shape}")
    if not np.isfinite(rows).all():
        raise ValueError("features must be finite")
    largest = np.abs(rows).max(axis=1, keepdims=True)
    rows = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)  # so that no square is 0 or infinite
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    mean: NDArray[np.float64] = (rows / np.where(norms > 0, norms, 1.0)).mean(axis=0)
    return mean


def unit_mean_sensitivity(samples: int) -> float:
    """Return the largest Euclidean distance between the unit means of two datasets that differ in one sample: 2 / n.

    Raises:
        ValueError: If there is no sample.
    """
    if samples < 1:
        raise ValueError(f"the mean of {samples} samples has no sensitivity")
    return 2 / samples


def private_unit_mean(features: ArrayLike, epsilon: float, delta: float) -> NDArray[np.float64]:
    """Return the unit mean [d] of `features` [n, d] with (epsilon, delta)-private noise on every coordinate.

    The noise comes from the operating system's random numbers: no seed repeats it. Each call spends (epsilon, delta)
    anew.

    Raises:
        ValueError: If epsilon is not positive, delta not strictly between 0 and 1, or `features` unfit for `unit_mean`.
    """
    mean = unit_mean(features)
    sigma = smallest_sigma(epsilon, delta, unit_mean_sensitivity(np.shape(features)[0]))
    return mean + gaussian(mean.size, sigma)
