"""The discrete Gaussian: its distribution, and every decision as exact numbers make it."""

import math
import os
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from hyperfl_flwr.core.noise import discrete_gaussian as module
from hyperfl_flwr.core.noise.discrete_gaussian import (
    CHUNK,
    LARGEST_STD,
    SMALLEST_STD,
    discrete_gaussian,
    random_bits,
)

KEY = bytes(range(32))
"""Key of the tests with repeatable bits."""

GOLDEN_SMALL = [-3, 5, 2, 1, -3, 4, -4, -4]
GOLDEN_LARGE = [-945740026, 1342950492, -601922037, -432402346]


class Script:
    """Returns given words, one call after the other; fails if more are drawn."""

    def __init__(self, *words):
        self.words = list(words)

    def __call__(self, count):
        drawn, self.words = self.words[:count], self.words[count:]
        assert len(drawn) == count
        return np.array(drawn, np.uint64)


def exact(number):
    """Return the value of a function of `Decimal`, with 200 digits, as a fraction."""
    with localcontext() as context:
        context.prec = 200
        return Fraction(number())


def pmf(std, most):
    """Return the probabilities of -most to most."""
    weights = np.exp(-(np.arange(-most, most + 1) ** 2) / (2 * std**2))
    return weights / weights.sum()


@pytest.mark.parametrize("std", [0.3, 0.5, 1.0, 3.7, 20.0])
@pytest.mark.parametrize("bits", [random_bits(KEY), None])
def test_the_frequencies_are_those_of_the_discrete_gaussian(std, bits):
    """Chi-square over all integers with 10 expected samples or more, and the two tails; p above 1e-9."""
    size, most = 300_000, math.ceil(8 * std) + 1
    samples = discrete_gaussian(size, std, bits)
    expected = size * pmf(std, most)
    counts = np.bincount(np.clip(samples, -most, most) + most, minlength=2 * most + 1)
    often = expected >= 10
    pooled = [(counts[often], expected[often]), ([counts[~often].sum()], [max(expected[~often].sum(), 1e-9)])]
    observed, wanted = (np.concatenate([np.asarray(part[side], float) for part in pooled]) for side in (0, 1))
    if wanted[-1] < 10:  # too few in the tails for the approximation: they count with their neighbours
        observed[-2], wanted[-2] = observed[-2] + observed[-1], wanted[-2] + wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert stats.chi2.sf(statistic, len(wanted) - 1) > 1e-9


@pytest.mark.parametrize("std", [1e3, 123_456.789, 2.0**31, LARGEST_STD])
def test_large_ones_are_nearly_gaussian(std):
    """Kolmogorov-Smirnov, mean and deviation of 10^6 samples; the bounds fail with a probability below 1e-9."""
    size = 10**6
    samples = discrete_gaussian(size, std)
    assert samples.dtype == np.int64
    assert stats.kstest(samples + np.random.default_rng(0).uniform(-0.5, 0.5, size), "norm", (0, std)).pvalue > 1e-9
    assert abs(samples.mean()) < 6.2 * std / math.sqrt(size)
    assert abs(samples.std() / std - 1) < 6.2 / math.sqrt(2 * size)
    assert np.abs(samples).max() < 8 * std
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 6.2 / math.sqrt(size)
    assert (samples % 2).mean() == pytest.approx(0.5, abs=6.2 * 0.5 / math.sqrt(size))  # the last bit is random


def reference(size, std, bits):
    """Return samples by the same algorithm with fractions and Decimal alone, from the same bits."""
    variance, scale = Fraction(std) ** 2, math.floor(std) + 1
    found = []
    while len(found) < size:
        count = min(CHUNK, (size - len(found)) * 4 // 3 + 64)
        uniforms, coins = bits(count).tolist(), bits(count).tolist()
        for uniform, coin in zip(uniforms, coins, strict=True):
            middle = Fraction(2 * uniform + 1, 2**65)  # not the exact decision, but equal to it unless it is doubtful
            magnitude = math.floor(
                -scale * exact(lambda u=middle: (Decimal(u.numerator) / Decimal(u.denominator)).ln())
            )
            power = (magnitude - variance / scale) ** 2 / (2 * variance)
            limit = exact(lambda p=power: (-Decimal(p.numerator) / Decimal(p.denominator)).exp())
            if Fraction(2 * (coin >> 1) + 1, 2**64) < limit and not (coin & 1 and magnitude == 0):
                found.append(-magnitude if coin & 1 else magnitude)
    return found[:size]


@pytest.mark.parametrize("std", [0.4, 3.7, 1e6 / 3])
def test_every_sample_is_that_of_exact_numbers(std):
    assert discrete_gaussian(300, std, random_bits(KEY)).tolist() == reference(300, std, random_bits(KEY))


def test_golden_values():
    """Equal on every machine, since no decision depends on rounding."""
    assert discrete_gaussian(8, 3.7, random_bits(KEY)).tolist() == GOLDEN_SMALL
    assert discrete_gaussian(4, 2.0**30, random_bits(KEY)).tolist() == GOLDEN_LARGE


@pytest.mark.parametrize(("std", "steps"), [(0.5, 1), (3.7, 2), (1e4, 5000), (2.0**31, 3 * 2**31)])
def test_a_magnitude_at_a_border_takes_more_bits(std, steps):
    """The first 64 bits contain exp(-k/t) 2^64: the next ones decide between k - 1 and k, or those after them."""
    scale = math.floor(std) + 1
    border = exact(lambda: (Decimal(-steps) / scale).exp()) * 2**64
    first, rest = math.floor(border), (border - math.floor(border)) * 2**64
    second, rest = math.floor(rest), (rest - math.floor(rest)) * 2**64
    third = math.floor(rest)
    law = module._Law(std)._exact
    assert law.magnitude(first, Script(second - 1)) == steps
    assert law.magnitude(first, Script(second + 1)) == steps - 1
    assert law.magnitude(first, Script(second, third - 1)) == steps
    assert law.magnitude(first, Script(second, third + 1)) == steps - 1
    assert law.magnitude(first - 2, Script()) == steps  # no more bits are drawn than it takes
    assert law.magnitude(first + 2, Script()) == steps - 1


@pytest.mark.parametrize(("std", "magnitude"), [(0.5, 1), (3.7, 7), (1e4, 31_000), (2.0**31, 2**32)])
def test_an_acceptance_at_a_border_takes_more_bits(std, magnitude):
    """The same for the number that is compared with exp(-(|x| - sigma^2/t)^2 / (2 sigma^2))."""
    variance, scale = Fraction(std) ** 2, math.floor(std) + 1
    power = (magnitude - variance / scale) ** 2 / (2 * variance)
    border = exact(lambda: (-Decimal(power.numerator) / Decimal(power.denominator)).exp()) * 2**63
    first, rest = math.floor(border), (border - math.floor(border)) * 2**64
    second, third = math.floor(rest), math.floor((rest - math.floor(rest)) * 2**64)
    law = module._Law(std)._exact
    assert law.accepts(magnitude, first, Script(second - 1))
    assert not law.accepts(magnitude, first, Script(second + 1))
    assert law.accepts(magnitude, first, Script(second, third - 1))
    assert not law.accepts(magnitude, first, Script(second, third + 1))
    assert law.accepts(magnitude, first - 1, Script())
    assert not law.accepts(magnitude, first + 1, Script())


def test_doubtful_candidates_of_the_fast_path_are_decided_exactly():
    """Borders of both decisions between sure candidates: the words after the first two rows go to the doubtful ones."""
    std, steps = 3.7, 2
    border = exact(lambda: (Decimal(-steps) / 4).exp()) * 2**64
    first, second = math.floor(border), math.floor((border - math.floor(border)) * 2**64)
    sure = 2**63  # E = ln 2, magnitude floor(4 ln 2) = 2
    for extra, magnitude in ((second - 1, steps), (second + 1, steps - 1)):
        script = Script(sure, first, sure, 0, 1, 2, extra)  # coins 0, 1, 2: accepted; plus, minus, plus
        assert module._Law(std).candidates(3, script).tolist() == [2, -magnitude, 2]
        assert not script.words
    variance = Fraction(std) ** 2
    power = (2 - variance / 4) ** 2 / (2 * variance)
    limit = exact(lambda: (-Decimal(power.numerator) / Decimal(power.denominator)).exp()) * 2**63
    coin, next_bits = math.floor(limit), math.floor((limit - math.floor(limit)) * 2**64)
    for extra, expected in ((next_bits - 1, [-2, 2]), (next_bits + 1, [-2])):
        script = Script(sure, sure, 1, 2 * coin, extra)
        assert module._Law(std).candidates(2, script).tolist() == expected
        assert not script.words


def test_zero_has_one_sign():
    """-0 is rejected, or 0 would be twice as likely as it must be; a uniform number of 64 ones has the magnitude 0."""
    largest = 2**64 - 1
    assert module._Law(1.0).candidates(2, Script(largest, largest, 1, 0)).tolist() == [0]


def test_a_uniform_number_that_begins_with_zeros_has_a_large_magnitude():
    """64 zero bits leave E unbounded; the next word 2^63 means U = 2^-65, a magnitude of floor(2 * 65 ln 2)."""
    law = module._Law(1.0)._exact
    assert law.magnitude(0, Script(2**63 + 5)) == math.floor(2 * 65 * math.log(2))
    assert law.magnitude(0, Script(0, 2**63 + 5)) == math.floor(2 * 129 * math.log(2))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, 2 * CHUNK + 5])
def test_any_number_of_samples_can_be_drawn(size):
    one, other = (discrete_gaussian(size, 1e5) for _ in range(2))
    assert one.shape == (size,)
    assert size < 100 or not np.array_equal(one, other)


def test_the_bits_are_those_of_chacha20_under_a_new_key(monkeypatch):
    keys = []
    monkeypatch.setattr(os, "urandom", lambda count: keys.append(count) or KEY)
    assert np.array_equal(discrete_gaussian(50, 9.5), discrete_gaussian(50, 9.5, random_bits(KEY)))
    assert keys == [32]


@pytest.mark.parametrize("std", [0.0, -1.0, SMALLEST_STD / 2, 2 * LARGEST_STD, math.nan, math.inf])
def test_other_deviations_are_refused(std):
    with pytest.raises(ValueError, match=r"from 2\^-20 to 2\^36"):
        discrete_gaussian(1, std)


def test_the_smallest_deviation_gives_zeros():
    assert not discrete_gaussian(1000, SMALLEST_STD).any()
