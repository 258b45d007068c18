"""Noise in secure sums: the encoding has room for it, its shares suffice, and rounding is covered."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.protocol.secure_sums import noise as module
from hyperfl_flwr.protocol.secure_sums.encoding import Encoding
from hyperfl_flwr.protocol.secure_sums.noise import LEAST_STD, SumNoise, add_noise
from hyperfl_flwr.protocol.secure_sums.thresholds import unknown_nodes

SHAPES = {"net/a": (60, 500), "net/b": (20_000,)}
SIZE = 50_000


def received():
    rng = np.random.default_rng(0)
    return {key: rng.normal(0, 0.1, shape).astype(np.float32) for key, shape in SHAPES.items()}


def encoding_of(arrays, *, clients, nodes, multiplier=1.0, clip_norm=0.5, reduction=Reduction.MEAN):
    return Encoding(
        received=arrays,
        reductions={"net": reduction},
        num_clients=clients,
        max_examples=1000,
        range=10.0,
        noise=SumNoise(clip_norm=clip_norm, multiplier=multiplier),
        num_nodes=nodes,
    )


def changed(arrays, clip_norm, seed):
    """Return arrays after a change of the given norm, float64."""
    rng = np.random.default_rng(seed)
    changes = {key: rng.normal(0, 1, value.shape) for key, value in arrays.items()}
    norm = math.sqrt(sum(float(np.sum(change**2)) for change in changes.values()))
    return {key: arrays[key] + clip_norm / norm * change for key, change in changes.items()}


def in_float64(arrays):
    return {key: value.astype(np.float64) for key, value in arrays.items()}


@pytest.mark.parametrize(
    ("nodes", "colluding", "threshold", "present"), [(4, 1, 4, 4), (4, 0, 3, 3), (6, 1, 5, 6), (6, 1, 5, 5)]
)
def test_the_opened_mean_has_the_noise(nodes, colluding, threshold, present):
    """Standard deviation z C sqrt(present / G) / N within 2 percent, at least z C / N; Gaussian; some nodes gone."""
    arrays, norm, z = in_float64(received()), 0.5, 0.3
    unknown = unknown_nodes(nodes, threshold, colluding)
    encoding = encoding_of(arrays, clients=2 * nodes, nodes=nodes, multiplier=z, clip_norm=norm)
    share = encoding.noise.share(encoding.largest, encoding.size, unknown)
    total, clients = encoding.new_sum(), [changed(arrays, norm, seed) for seed in range(2 * present)]
    for client in clients:
        encoding.noise.refuse_long(client, arrays)
        assert encoding.add(total, client, 20) == 0
    for _ in range(present):
        add_noise(total, share)
    found, count = encoding.decode(total, len(clients), 1), len(clients)
    noise = np.concatenate(
        [(found[key] - np.mean([client[key] for client in clients], axis=0)).ravel() for key in arrays]
    )
    expected = z * norm * math.sqrt(present / unknown) / count
    assert noise.std() == pytest.approx(expected, rel=0.02)
    assert noise.std() > 0.98 * z * norm / count
    assert stats.kstest(noise / expected, "norm").pvalue > 1e-9


def test_the_shares_that_an_attacker_does_not_know_have_the_noise_together():
    """For every threshold of up to 12 nodes: G shares have the variance z^2 C_q^2, with the rounding to integers."""
    noise = SumNoise(clip_norm=2.0, multiplier=0.7)
    for nodes, threshold in combinations(range(2, 13), 2):
        for colluding in range(nodes):
            unknown = unknown_nodes(max(nodes, threshold), min(nodes, threshold), colluding)
            if unknown:
                largest = noise.largest(40, max(nodes, threshold))
                share = noise.share(largest, 10_000, unknown)
                assert unknown * share**2 >= (0.7 * (largest + 0.5 * math.sqrt(10_000))) ** 2


@pytest.mark.parametrize("clients", [1, 2, 20, 1000])
@pytest.mark.parametrize("nodes", [2, 20, 100])
@pytest.mark.parametrize("multiplier", [1e-3, 0.3, 5.0, 50.0])
def test_no_sum_overflows(clients, nodes, multiplier):
    """All clients change the same element by C, and the noise is 8 standard deviations: still below 2^31."""
    noise = SumNoise(clip_norm=3.0, multiplier=multiplier)
    largest = noise.largest(clients, nodes)
    total = clients * (largest + 0.5) + 8 * noise.share(largest, 10_000, 2) * math.sqrt(nodes)
    assert total < 2**31
    assert clients * (largest + 0.5) + 8 * multiplier * largest * math.sqrt(nodes) < 2**31  # each client is rounded
    assert largest * (clients + 8 * multiplier * math.sqrt(nodes)) > 0.99 * 2**31  # and the bits are used


def test_the_rounded_change_is_within_the_sensitivity():
    """A change of the norm C in many small elements, which rounding makes longer."""
    arrays = in_float64(received())
    encoding = encoding_of(arrays, clients=3, nodes=3, multiplier=2000.0)
    total = encoding.new_sum()
    encoding.add(total, changed(arrays, 0.5, 0), 1)
    norm = float(np.linalg.norm(total.view(np.int32).astype(float)))
    assert norm <= encoding.largest + 0.5 * math.sqrt(SIZE)
    assert norm > encoding.largest  # so that the slack is needed


def test_noise_wraps_and_takes_every_element(monkeypatch):
    """Chunks have no borders, sums are modulo 2^32, and the negative half is there."""
    monkeypatch.setattr(module, "CHUNK", 1000)
    vector = np.full(2500, 2**32 - 5, np.uint32)
    add_noise(vector, 1e4)
    drawn = (vector + np.uint32(5)).view(np.int32)
    assert (drawn != 0).mean() > 0.99
    assert np.std(drawn[:1000]) == pytest.approx(1e4, rel=0.15)
    assert np.std(drawn[2000:]) == pytest.approx(1e4, rel=0.2)
    assert 0.4 < (drawn < 0).mean() < 0.6


def test_a_longer_change_is_refused():
    arrays = in_float64(received())
    noise = SumNoise(clip_norm=0.5, multiplier=1.0)
    noise.refuse_long(changed(arrays, 0.5, 0), arrays)
    with pytest.raises(ValueError, match=r"at most privacy\.clip-norm = 0\.5, got 0\.5005"):
        noise.refuse_long(changed(arrays, 0.5005, 0), arrays)
    with pytest.raises(ValueError, match=r"at most privacy\.clip-norm = 0\.5, got nan"):
        noise.refuse_long({key: np.full_like(value, math.nan) for key, value in arrays.items()}, arrays)


def test_too_little_and_too_much_noise_are_refused():
    noise = SumNoise(clip_norm=1.0, multiplier=1e-7)
    assert 1e-7 * noise.largest(10, 4) < LEAST_STD
    with pytest.raises(ValueError, match="too small for noise=sum"):
        noise.share(noise.largest(10, 4), 1000, 3)
    noise = SumNoise(clip_norm=1.0, multiplier=1e5)
    with pytest.raises(ValueError, match="too large for noise=sum with 15000000 parameters"):
        noise.share(noise.largest(10, 4), 15_000_000, 3)


@pytest.mark.parametrize("reduction", [Reduction.MEAN_BY_EXAMPLES, Reduction.SUM])
def test_other_weights_are_refused(reduction):
    """A client with many samples would move the mean more than the noise hides."""
    with pytest.raises(ValueError, match="no mean with equal weights"):
        encoding_of(received(), clients=3, nodes=3, reduction=reduction)
