"""Compute the mean of unit vectors with differential privacy, as the basis of a client's descriptor.

Every sample's features are scaled to Euclidean norm 1 and averaged over the n samples of the dataset. Two datasets are
neighbours if one is the other with one sample replaced; n is the same for both and is public. Replacing a sample moves
the mean by at most 2 / n, with equality for two opposite unit vectors. Gaussian noise for this sensitivity is added to
the mean (see `gaussian_mechanism`), so the noise decreases as 1 / n. Everything that is computed from the noisy mean,
by any layers, has the same guarantee.

The guarantee holds for one sample of the dataset, against everyone who sees the result. It requires that

- each sample's features depend on that sample alone: no normalisation by the statistics of a batch;
- the layers that compute the features do not depend on the dataset;
- the mean is over samples, not over the means of batches: one sample of a short last batch would have a larger weight;
- nothing else about the samples leaves the node. A maximum over samples has no such bound: one sample can move it over
  the whole range of the features, however large n is;
- every release is counted: k releases from the same data are together (k epsilon, k delta)-private.

IT-PFL-HN ("Inference-Time Personalized Federated Learning", submitted to ICLR 2022, section 7 and lemma 7.1) uses the
classical formula and adds the noise to the descriptor, which requires linear layers after the mean. Noise on the mean
allows any layers. The noise is rounded to floating point and generated from 53 random bits, so the guarantee is not
strict (Mironov, CCS 2012), and a delta below 1e-15 is meaningless.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hyperfl_flwr.core.noise.gaussian_noise import gaussian
from hyperfl_flwr.core.setting_types import Pooling
from hyperfl_flwr.models.encoder import BATCH, Encoder
from hyperfl_flwr.privacy.gaussian_mechanism import smallest_sigma
from hyperfl_flwr.privacy.release import Release

_PROBES, _PROBE_TOLERANCE = 8, 1e-3
"""Number of random samples for testing whether features depend on one sample alone, and the tolerance of that test."""


def unit_mean(features: ArrayLike) -> NDArray[np.float64]:
    """Return the mean [d] of the rows of `features` [n, d], after scaling each row to Euclidean norm 1.

    A row of zeros has no direction and stays zero: it lies in the unit ball, so the bound on the sensitivity holds.

    Raises:
        ValueError: If `features` is not a matrix, has no rows or columns, or has a value that is not finite. (Such rows
            cannot be skipped, since n is public.)
    """
    rows: NDArray[Any] = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"features must be a non-empty matrix [samples, features], got the shape {rows.shape}")
    if not np.isfinite(rows).all():
        raise ValueError("features must be finite, got NaN or infinity")
    largest = np.abs(rows).max(axis=1, keepdims=True)
    rows = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)  # squares cannot under- or overflow
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    mean: NDArray[np.float64] = (rows / np.where(norms > 0, norms, 1.0)).mean(axis=0)
    return mean


def unit_mean_sensitivity(samples: int) -> float:
    """Return the largest Euclidean distance between the unit means of two datasets that differ in one sample: 2 / n.

    Raises:
        ValueError: If there is no sample.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    return 2 / samples


def descriptor_release(epsilon: float | None, delta: float | None) -> Release | None:
    """Return what a descriptor with (epsilon, delta)-private noise releases; None without noise."""
    if epsilon is None or delta is None:
        return None
    return Release(
        unit="record",
        mechanism="gaussian",
        noise_multiplier=smallest_sigma(epsilon, delta, 1.0),
        neighbours="replace-one",
    )


def private_unit_mean(features: ArrayLike, epsilon: float, delta: float) -> NDArray[np.float64]:
    """Return the unit mean [d] of `features` [n, d] with (epsilon, delta)-private noise on every coordinate.

    The noise comes from the operating system's random numbers and does not depend on a seed. Each call spends another
    (epsilon, delta).

    Raises:
        ValueError: If epsilon is not positive, if delta is not strictly between 0 and 1, or as for `unit_mean`.
    """
    mean = unit_mean(features)
    sigma = smallest_sigma(epsilon, delta, unit_mean_sensitivity(np.shape(features)[0]))
    return mean + gaussian(mean.size, sigma)


def private_pooled(encoder: Encoder, samples: Tensor, *, epsilon: float, delta: float) -> NDArray[np.float64]:
    """Return an encoder's pooled features of all samples with (epsilon, delta)-private noise, see the module.

    Features are computed in evaluation mode, regardless of the encoder's mode. Features that are not finite count as
    zeros: an error would reveal the existence of such a sample to a server that chose the encoder's parameters, or the
    scale of the samples. Each call spends another (epsilon, delta).

    Args:
        encoder: Encoder with `pooling = mean`. Its parameters must not have been trained on these samples.
        samples: Samples [n, ...] of the dataset, n > 0, on the encoder's device.
        epsilon: Bound on the privacy loss, above 0.
        delta: Probability with which the bound may fail, strictly between 0 and 1.

    Returns:
        The noisy mean [U]; `from_pooled` computes the descriptor from it.

    Raises:
        ValueError: If the effect of one sample is not bounded: the encoder uses a maximum, or a sample's features
            depend on other samples or are random. Also if epsilon or delta is out of range.
    """
    with _evaluating(encoder), torch.no_grad():
        refuse_unbounded(encoder, samples[:1])
        features = torch.cat([encoder.phi(batch).double().cpu() for batch in torch.split(samples, BATCH)])
    # A row with one such value becomes zero as a whole: n is public, so the row must not be dropped.
    features[~torch.isfinite(features).all(dim=1)] = 0
    return private_unit_mean(features.numpy(), epsilon, delta)


def from_pooled(encoder: Encoder, pooled: ArrayLike) -> Tensor:
    """Return the descriptor [d] that the encoder's layers after the pooling compute from a pooled vector [U]."""
    parameter = next(encoder.parameters())
    with _evaluating(encoder), torch.no_grad():
        descriptor: Tensor = encoder.head(torch.tensor(pooled, dtype=parameter.dtype, device=parameter.device))
    return descriptor


def private_descriptor(encoder: Encoder, samples: Tensor, *, epsilon: float, delta: float) -> Tensor:
    """Return the descriptor [d] of samples [n, ...] with (epsilon, delta)-private noise on the pooled mean.

    Arguments and errors are those of `private_pooled`. The layers after the pooling are post-processing, which keeps
    the guarantee.
    """
    return from_pooled(encoder, private_pooled(encoder, samples, epsilon=epsilon, delta=delta))


def refuse_unbounded(encoder: Encoder, like: Tensor) -> None:
    """Refuse an encoder if one sample can move its pooled vector further than a mean of unit vectors.

    The function tests, in the encoder's present mode, whether features depend on one sample alone. It uses random
    samples, which are independent of all clients' data: in small batches, in one large batch, and twice. The test works
    for any layers, but a layer that mixes samples only for some inputs can pass.

    Args:
        encoder: The encoder.
        like: Samples [1, ...] with the shape, type and device of the later samples; their values are not used.

    Raises:
        ValueError: If there is no bound; the message gives the reason.
    """
    refuse_maximum(encoder.pooling)
    # A fixed local generator: the test neither depends on nor advances the global random numbers.
    probes = torch.randn((_PROBES, *like.shape[1:]), generator=torch.Generator().manual_seed(0)).to(like)
    with torch.no_grad():
        together, again = encoder.phi(probes), encoder.phi(probes)
        apart = torch.cat([encoder.phi(pair) for pair in torch.split(probes, 2)])
    if not torch.allclose(together, again, rtol=0, atol=_PROBE_TOLERANCE):
        raise ValueError(
            "the encoder's features of a sample must be finite and not random; switch off layers, such as dropout, "
            "that are random in evaluation mode"
        )
    if not torch.allclose(together, apart, rtol=0, atol=_PROBE_TOLERANCE):
        raise ValueError(
            "the encoder's features of a sample depend on the other samples of its batch, for example through batch "
            "normalisation: replacing one sample can change all features, so the noise would not suffice; use layers "
            "that treat each sample separately"
        )


def refuse_maximum(pooling: Pooling) -> None:
    """Refuse a pooling other than the mean of unit vectors.

    Raises:
        ValueError: If there is no bound; the message gives the reason.
    """
    if pooling != "mean":
        raise ValueError(
            f"the pooling {pooling} uses a maximum over samples, which one sample can move over the whole range of the "
            f"features, however many samples there are: no noise makes it private; train with it-pfl.pooling = mean"
        )


@contextlib.contextmanager
def _evaluating(encoder: Encoder) -> Iterator[None]:
    """Set all layers to evaluation mode within the block, and restore the mode of each layer afterwards."""
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
