"""Sample the discrete Gaussian exactly: noise on integers for which differential privacy is proven.

The probability of an integer x is proportional to exp(-x^2 / (2 sigma^2)). The algorithm is that of Canonne, Kamath and
Steinke ("The Discrete Gaussian for Differential Privacy", NeurIPS 2020, algorithms 2 and 3): with t = floor(sigma) + 1,

1. a magnitude |x| = floor(t E), for an exponentially distributed E, so that P(|x| >= k) = exp(-k / t);
2. a random sign, where -0 is rejected; so x has the discrete Laplace distribution of scale t;
3. x is accepted with the probability exp(-(|x| - sigma^2 / t)^2 / (2 sigma^2)).

No step rounds. A uniform number of which 64 bits m are known lies in [m, m + 1) 2^-64, E = -ln U in an interval, too. A
decision is made in float64 where it is the same in all of that interval and for any error below the bounds that
`_Law.candidates` derives. All others, few in a million, are made by `_Exact`, in decimal numbers of growing
precision with as many more random bits as it takes. So the samples do not depend on the processor or on numpy's log.
"""

import math
import os
from collections.abc import Callable
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

Bits = Callable[[int], NDArray[np.uint64]]
"""Function that returns the given number of independent uniform 64-bit integers."""

CHUNK = 1 << 15
"""Number of samples that are drawn at a time, so that their arrays stay in the processor's cache."""

LARGEST_STD, SMALLEST_STD = 2.0**36, 2.0**-20
"""Range of sigma: all magnitudes are below 2^53, where float64 holds every integer, except with probability 2^-10^4."""

_RELATIVE_ERROR = 2.0**-46
"""Bound of the relative errors in float64, see `_Law.candidates`: 128 units in the last place."""

_FEW_BITS = 1 << 50
"""Uniform numbers m 2^-64 with a smaller m have too wide an interval for float64."""

_NONCE = bytes(16)
"""The counter, 32 bits, and the nonce, 96 bits, as `cryptography` expects them."""


def discrete_gaussian(size: int, std: float, bits: Bits | None = None) -> NDArray[np.int64]:
    """Return independent samples [size] of the discrete Gaussian.

    Args:
        size: Number of samples.
        std: The parameter sigma, from 2^-20 to 2^36, taken as the rational number that the float is. From 1 on, it is
            the standard deviation up to a relative error of 10^-6.
        bits: Source of random bits, for tests; None for a new key of the operating system.

    Raises:
        ValueError: If `std` is out of range.
    """
    if not SMALLEST_STD <= std <= LARGEST_STD:
        raise ValueError(f"std must be from 2^-20 to 2^36, got {std:g}")
    law, bits = _Law(std), bits or random_bits(os.urandom(32))
    samples, filled = np.empty(size, np.int64), 0
    while filled < size:
        # About three of four candidates are accepted.
        found = law.candidates(min(CHUNK, (size - filled) * 4 // 3 + 64), bits)[: size - filled]
        samples[filled : filled + found.size] = found
        filled += found.size
    return samples


def random_bits(key: bytes) -> Bits:
    """Return the stream of ChaCha20 (RFC 8439) under a key of 32 bytes, as a source of 2^35 integers."""
    encryptor = Cipher(ChaCha20(key, _NONCE), mode=None).encryptor()

    def draw(count: int) -> NDArray[np.uint64]:
        return np.frombuffer(encryptor.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)

    return draw


class _Law:
    """The distribution of one sigma.

    Args:
        std: The parameter sigma.
    """

    def __init__(self, std: float) -> None:
        variance = Fraction(std) ** 2
        self._scale = math.floor(std) + 1
        self._center, self._twice_variance = float(variance / self._scale), float(2 * variance)  # correctly rounded
        self._exact = _Exact(self._scale, variance)

    def candidates(self, count: int, bits: Bits) -> NDArray[np.int64]:
        """Return the accepted ones of some candidates, in the order in which they were drawn.

        Error bounds, with u = 2^-53 and errors of numpy's log and exp of at most 32 u (numpy's tests allow 4):

        - Magnitude: m >= 2^50 as a float64 differs from any number of [m, m + 1) by a factor of at most 1 + u + 2^-50,
          so E by 9 u + 32 u E, and t E by less than 2^-46 t (1 + E).
        - Exponent h of the acceptance: center and variance are correctly rounded, |x| and t are exact, and the center
          is below sigma. So h has an error of at most (3 sqrt(2 h) + 5 h) u <= 8 (1 + h) u, exp(-h) a relative one of
          at most 9 (1 + h) u + 32 u, below 2^-46 (1 + h), or an absolute one of 2^-1074 if it is subnormal.
        - The uniform number of the acceptance has 63 bits. Its error, u times itself and 2^-63, is covered by the same
          bound and by 2^-62.
        """
        uniform, coins = bits(count), bits(count)
        exponential = np.log(np.maximum(uniform, 1) * 2.0**-64)
        np.negative(exponential, out=exponential)
        margin = (exponential + 1.0) * (self._scale * _RELATIVE_ERROR)
        exponential *= self._scale
        magnitude = np.floor(exponential - margin)
        doubtful = np.floor(exponential + margin) != magnitude
        doubtful |= uniform < _FEW_BITS
        for number in np.flatnonzero(doubtful).tolist():
            magnitude[number] = self._exact.magnitude(int(uniform[number]), bits)
        negative = (coins & np.uint64(1)).astype(bool)  # the other 63 bits are the uniform number of the acceptance
        accepted = self._accepted(magnitude, coins >> np.uint64(1), bits, ~(negative & (magnitude == 0)))
        samples = magnitude.astype(np.int64)
        np.negative(samples, out=samples, where=negative)
        return samples[accepted]

    def _accepted(
        self, magnitude: NDArray[np.float64], uniform: NDArray[np.uint64], bits: Bits, wanted: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which candidates are accepted, among those that are wanted."""
        exponent = magnitude - self._center
        exponent *= exponent
        exponent /= self._twice_variance
        probability = np.exp(-exponent)
        exponent += 1.0
        exponent *= probability
        exponent *= _RELATIVE_ERROR
        exponent += 2.0**-62  # now the margin
        drawn = uniform * 2.0**-63
        accepted: NDArray[np.bool_] = (drawn < probability - exponent) & wanted
        doubtful = (drawn <= probability + exponent) & wanted & ~accepted
        for number in np.flatnonzero(doubtful).tolist():
            accepted[number] = self._exact.accepts(int(magnitude[number]), int(uniform[number]), bits)
        return accepted


class _Exact:
    """The two decisions without rounding, for any sigma.

    A decision is made if it is the same for all real numbers with the known bits; otherwise 64 more bits are drawn.
    Decimal's ln and exp are correctly rounded, and the precision is 10^-20 of the interval and better.
    """

    def __init__(self, scale: int, variance: Fraction) -> None:
        self._scale, self._variance = scale, variance

    def magnitude(self, known: int, bits: Bits) -> int:
        """Return floor(t E) for the uniform number that begins with the 64 bits `known`."""
        length = 64
        while (found := self._magnitude_of(known, length)) is None:
            known, length = known << 64 | int(bits(1)[0]), length + 64
        return found

    def _magnitude_of(self, known: int, length: int) -> int | None:
        """Return floor(-t ln U) if it is equal for all U in [known, known + 1) 2^-length."""
        if not known:
            return None
        with localcontext(_context(length)) as context:
            slack = Decimal(10) ** (20 - context.prec)  # t (1 + E) is below 10^14
            whole = Decimal(1 << length)
            least, most = (-self._scale * (Decimal(number) / whole).ln() for number in (known + 1, known))
            low, high = max(0, math.floor(least - slack)), math.floor(most + slack)
        return low if low == high else None

    def accepts(self, magnitude: int, known: int, bits: Bits) -> bool:
        """Return whether a candidate is accepted by the uniform number that begins with the 63 bits `known`."""
        exponent = (magnitude - self._variance / self._scale) ** 2 / (2 * self._variance)
        length = 63
        while (found := _is_below(known, length, exponent)) is None:
            known, length = known << 64 | int(bits(1)[0]), length + 64
        return found


def _is_below(known: int, length: int, exponent: Fraction) -> bool | None:
    """Return whether all, or none, of [known, known + 1) 2^-length is below exp(-exponent); None if it has both."""
    if not exponent:
        return True
    with localcontext(_context(length)) as context:
        power = Decimal(exponent.numerator) / Decimal(exponent.denominator)
        limit = (-power).exp() * (1 << length)
        slack = limit * (power + 10) * Decimal(10) ** (5 - context.prec)
        if known + 1 <= limit - slack:
            return True
        return False if known >= limit + slack else None


def _context(length: int) -> Context:
    """Return a context in which numbers of some bits have 10^-40 of their last bit."""
    return Context(prec=length // 3 + 40, Emin=MIN_EMIN, Emax=MAX_EMAX)
