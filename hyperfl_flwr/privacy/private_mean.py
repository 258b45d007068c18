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

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hyperfl_flwr.core.setting_types import Pooling
from hyperfl_flwr.models.encoder import BATCH, Encoder
from hyperfl_flwr.privacy.clip_and_noise import gaussian
from hyperfl_flwr.privacy.gaussian_mechanism import smallest_sigma

_PROBES, _PROBE_TOLERANCE = 8, 1e-3
"""Random samples that show whether features depend on one sample alone, and how far a unit vector may be off then."""


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


def private_pooled(encoder: Encoder, samples: Tensor, *, epsilon: float, delta: float) -> NDArray[np.float64]:
    """Return what an encoder pools of all samples as one set, with (epsilon, delta)-private noise, see the module.

    Features are made in evaluation mode, whatever the encoder's mode is. Those that are not finite count as zeros: an
    error would tell whoever chose the encoder's parameters, or the scale of the samples, that there is such a sample.
    Each call spends (epsilon, delta) anew.

    Args:
        encoder: With `pooling = mean`. Its parameters must not have been made from these samples.
        samples: D [n, ...], n > 0, on the encoder's device.
        epsilon: Above 0.
        delta: Strictly between 0 and 1.

    Returns:
        The noisy mean [U]; `from_pooled` makes the descriptor of it.

    Raises:
        ValueError: If there is no bound on what one sample changes: the encoder takes a maximum, or a sample's features
            depend on others, or on chance. Also if epsilon and delta are out of range.
    """
    with _evaluating(encoder), torch.no_grad():
        refuse_unbounded(encoder, samples[:1])
        features = torch.cat([encoder.phi(batch).double().cpu() for batch in torch.split(samples, BATCH)])
    features[~torch.isfinite(features).all(dim=1)] = 0
    return private_unit_mean(features.numpy(), epsilon, delta)


def from_pooled(encoder: Encoder, pooled: ArrayLike) -> Tensor:
    """Return the descriptor [d] that the encoder's layers after the pooling make of a pooled vector [U]."""
    parameter = next(encoder.parameters())
    with _evaluating(encoder), torch.no_grad():
        descriptor: Tensor = encoder.head(torch.tensor(pooled, dtype=parameter.dtype, device=parameter.device))
    return descriptor


def private_descriptor(encoder: Encoder, samples: Tensor, *, epsilon: float, delta: float) -> Tensor:
    """Return the descriptor [d] of samples [n, ...] with (epsilon, delta)-private noise on the pooled mean.

    Arguments and errors are those of `private_pooled`; the layers after the pooling are post-processing.
    """
    return from_pooled(encoder, private_pooled(encoder, samples, epsilon=epsilon, delta=delta))


def refuse_unbounded(encoder: Encoder, like: Tensor) -> None:
    """Refuse an encoder whose pooled vector one sample can move further than a mean of unit vectors.

    Whether features depend on one sample alone is tried, in the encoder's present mode, on random samples that have
    nothing to do with anybody's: among few, among many, and twice. That holds for any layers, but a layer that mixes
    samples on some inputs only can pass.

    Args:
        encoder: The encoder.
        like: Samples [1, ...] of the shape, type and device of those to come; their values are not used.

    Raises:
        ValueError: Saying why there is no bound.
    """
    refuse_maximum(encoder.pooling)
    probes = torch.randn((_PROBES, *like.shape[1:]), generator=torch.Generator().manual_seed(0)).to(like)
    with torch.no_grad():
        together, again = encoder.phi(probes), encoder.phi(probes)
        apart = torch.cat([encoder.phi(pair) for pair in torch.split(probes, 2)])
    if not torch.allclose(together, again, rtol=0, atol=_PROBE_TOLERANCE):
        raise ValueError("the encoder's features of a sample are random or not finite: a dropout, perhaps, is active")
    if not torch.allclose(together, apart, rtol=0, atol=_PROBE_TOLERANCE):
        raise ValueError(
            "the encoder's features of a sample depend on the other samples of its batch, as with a normalisation by "
            "the batch's statistics: replacing one sample can move all of them, so that the noise would not suffice"
        )


def refuse_maximum(pooling: Pooling) -> None:
    """Refuse a pooling that is no mean of unit vectors.

    Raises:
        ValueError: Saying why there is no bound.
    """
    if pooling != "mean":
        raise ValueError(
            f"the pooling {pooling} takes a maximum over samples, which one sample can move as far as the features "
            f"range, however many samples there are: no noise makes it private; train with it-pfl.pooling = mean"
        )


@contextlib.contextmanager
def _evaluating(encoder: Encoder) -> Iterator[None]:
    """Have all layers in evaluation mode, and afterwards as they were."""
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
