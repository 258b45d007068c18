"""Shamir's secret sharing over the prime field of p = 2^255 - 19.

Shamir: "How to share a secret", Communications of the ACM 22(11), 1979. A secret is the value at 0 of a polynomial of
degree t - 1 with random other coefficients; the share of holder x is the value at x. Any t shares determine the secret,
and t - 1 shares are independent of it.
"""

import secrets
from collections.abc import Collection, Mapping, Sequence

PRIME = 2**255 - 19
"""Order of the field."""

ELEMENT_BYTES = 32
"""Length of an encoded element, in bytes."""


def random_element() -> int:
    """Return a uniform element of the field, from the operating system's random generator."""
    return secrets.randbelow(PRIME)


def split(secret: int, threshold: int, holders: Sequence[int]) -> dict[int, int]:
    """Share a secret.

    Args:
        secret: An element of the field, 0 .. p - 1.
        threshold: Number t of shares that determine the secret, 1 .. number of holders.
        holders: The holders' different positions x, each 1 .. p - 1.

    Returns:
        The share of each holder.

    Raises:
        ValueError: If an argument is out of range. A share at position 0 would be the secret itself.
    """
    if not 0 <= secret < PRIME:
        raise ValueError("the secret is not an element of the field")
    if len(set(holders)) != len(holders) or not all(0 < holder < PRIME for holder in holders):
        raise ValueError(f"holders must have different positions above 0, got {list(holders)}")
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"the threshold must be 1 to {len(holders)}, the number of holders; got {threshold}")
    coefficients = [secret, *(random_element() for _ in range(threshold - 1))]
    return {holder: _value_at(coefficients, holder) for holder in holders}


def combine(shares: Mapping[int, int], weights: Mapping[int, int] | None = None) -> int:
    """Return the value at 0 of the polynomial of the least degree through some shares.

    It is the secret if there are at least `threshold` shares of it; with fewer, it is unrelated to the secret.

    Args:
        shares: Share of each holder, by its position.
        weights: `weights_at_zero` of these positions, if many secrets have the same holders.

    Raises:
        ValueError: If there are no shares, or one is not an element of the field.
    """
    if not shares:
        raise ValueError("no shares to combine")
    if not all(0 <= share < PRIME for share in shares.values()):
        raise ValueError("a share is not an element of the field")
    weights = weights or weights_at_zero(shares)
    return sum(weights[holder] * share for holder, share in shares.items()) % PRIME


def weights_at_zero(holders: Collection[int]) -> dict[int, int]:
    """Return Lagrange's weight of each holder: the value at 0 is the sum of weight times share."""
    weights = {}
    for mine in holders:
        above, below = 1, 1
        for other in holders:
            if other != mine:
                above = above * other % PRIME
                below = below * (other - mine) % PRIME
        weights[mine] = above * pow(below, -1, PRIME) % PRIME
    return weights


def to_bytes(element: int) -> bytes:
    """Encode an element, little endian."""
    return element.to_bytes(ELEMENT_BYTES, "little")


def from_bytes(data: bytes) -> int:
    """Decode an element.

    Raises:
        ValueError: If the length is wrong, or the number is not below p: each element has one encoding.
    """
    element = int.from_bytes(data, "little")
    if len(data) != ELEMENT_BYTES or element >= PRIME:
        raise ValueError(f"an element of the field has {ELEMENT_BYTES} bytes and is below 2^255 - 19")
    return element


def _value_at(coefficients: Sequence[int], position: int) -> int:
    """Return the value of a polynomial, by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = value * position + coefficient  # positions are small: one reduction at the end is the faster way
    return value % PRIME
