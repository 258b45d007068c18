"""Estimate a number about a client's data from features of what it has uploaded, by regression on shadow federations.

Property inference (Ateniese et al., 2015; Ganju et al.: "Property Inference Attacks on Fully Connected Neural Networks
using Permutation Invariant Representations", CCS 2018; Melis et al.: "Exploiting Unintended Feature Leakage in
Collaborative Learning", IEEE S&P 2019) trains a model on features of networks whose training data are known. Here it is
ridge regression. The neurons need not be sorted, as Ganju et al. do for networks that were trained alone: all clients
of a federation start from parameters that the server has sent, so that neurons correspond to each other.

Features are standardised. The arrays whose features are used (all, or a single one) and the penalty are those with the
smallest error in a cross-validation over shadow federations.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

Blocks = Mapping[str, NDArray[np.float32]]
"""Features [n, F] of each array, by its name."""

PENALTIES = tuple(10.0**power for power in range(-4, 3))
"""Weights of the squared norm in the ridge regression that are tried, relative to the features' mean square."""

FOLDS = 5
"""Largest number of folds of the cross-validation."""


def estimates(shadows: Blocks, numbers: Numbers, federations: NDArray[np.int64], attacked: Blocks) -> Numbers:
    """Return the estimated numbers [m, t] of each attacked row.

    Args:
        shadows: Features of n rows.
        numbers: The numbers [n, t] of each; each of the t columns is estimated for itself.
        federations: The federation [n] of each; those of one federation are in one fold.
        attacked: Features of m rows.

    Raises:
        ValueError: If there are fewer than two shadow federations.
    """
    folds = _folds(federations)
    kernels = [_kernels(values, attacked[name]) for name, values in shadows.items()]
    if len(kernels) > 1:
        size = len(kernels)
        both = [np.sum([each[k] for each in kernels], axis=0) / size for k in (0, 1)]
        kernels = [(both[0], both[1]), *kernels]
    errors = np.stack([_validation_errors(own, numbers, folds) for own, _ in kernels])
    best = errors.reshape(-1, numbers.shape[1]).argmin(axis=0)
    found = np.empty((len(kernels[0][1]), numbers.shape[1]))
    for each in np.unique(best):
        chosen, penalty = divmod(int(each), len(PENALTIES))
        own, other = kernels[chosen]
        columns = best == each
        found[:, columns] = next(_predictions(own, numbers[:, columns], other, [PENALTIES[penalty]]))
    return found


def _folds(federations: NDArray[np.int64]) -> list[NDArray[np.bool_]]:
    known = np.unique(federations)
    if len(known) < 2:
        raise ValueError(f"a cross-validation needs at least two shadow federations, got {len(known)}")
    number = min(FOLDS, len(known))
    return [np.isin(federations, known[fold::number]) for fold in range(number)]


def _kernels(shadows: NDArray[np.float32], attacked: NDArray[np.float32]) -> tuple[Numbers, Numbers]:
    """Return the inner products of standardised features [n, n] and [m, n], of a mean diagonal of 1."""
    values = shadows.astype(np.float64)
    mean, deviation = values.mean(axis=0), values.std(axis=0)
    # A feature that is the same in all shadow federations tells nothing.
    scale = np.where(deviation > 1e-12, 1 / np.maximum(deviation, 1e-12), 0.0)
    own, other = (values - mean) * scale, (attacked.astype(np.float64) - mean) * scale
    size = max(1, np.count_nonzero(scale))
    return own @ own.T / size, other @ own.T / size


def _validation_errors(kernel: Numbers, numbers: Numbers, folds: Sequence[NDArray[np.bool_]]) -> Numbers:
    """Return the sums of squared errors [p, t] of p penalties."""
    errors = np.zeros((len(PENALTIES), numbers.shape[1]))
    for held in folds:
        found = _predictions(kernel[np.ix_(~held, ~held)], numbers[~held], kernel[np.ix_(held, ~held)], PENALTIES)
        errors += np.stack([np.sum((each - numbers[held]) ** 2, axis=0) for each in found])
    return errors


def _predictions(own: Numbers, numbers: Numbers, other: Numbers, penalties: Sequence[float]) -> Iterator[Numbers]:
    """Yield the predictions [m, t] of kernel ridge regression with an intercept, for each penalty."""
    centre, whole = own.mean(axis=0), own.mean()
    values, vectors = np.linalg.eigh(own - centre - centre[:, None] + whole)
    middle = numbers.mean(axis=0)
    projected = vectors.T @ (numbers - middle)
    tested = (other - other.mean(axis=1, keepdims=True) - centre + whole) @ vectors
    for penalty in penalties:
        yield middle + tested @ (projected / (np.maximum(values, 0) + penalty * len(numbers))[:, None])
