"""Shamir's secret sharing: a textbook example, every set of shares, and what fewer shares say: nothing."""

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperfl_flwr.protocol.secure_sums import field
from hyperfl_flwr.protocol.secure_sums.field import (
    ELEMENT_BYTES,
    PRIME,
    combine,
    from_bytes,
    random_element,
    split,
    to_bytes,
    weights_at_zero,
)

ELEMENTS = st.integers(0, PRIME - 1)


@pytest.fixture
def small_field(monkeypatch):
    """Compute modulo 7, so that all polynomials can be listed."""
    monkeypatch.setattr(field, "PRIME", 7)


def test_the_order_is_a_prime():
    """2^255 - 19 is the prime of Curve25519 (RFC 7748, section 4.1); Fermat's test finds nothing against it."""
    assert str(PRIME) == "57896044618658097711785492504343953926634992332820282019728792003956564819949"
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in range(2, 40))


def test_stinsons_example(monkeypatch):
    """Stinson, "Cryptography: Theory and Practice", on Shamir's threshold scheme: p = 17, 13 + 10 x + 2 x^2.

    The shares of 1, 3 and 5 are 8, 10 and 11, and 4 * 8 + 3 * 10 + 11 * 11 = 13 modulo 17.
    """
    monkeypatch.setattr(field, "PRIME", 17)
    coefficients = iter([10, 2])
    monkeypatch.setattr(field, "random_element", lambda: next(coefficients))
    shares = split(13, 3, [1, 2, 3, 4, 5])
    assert [shares[holder] for holder in (1, 3, 5)] == [8, 10, 11]
    assert weights_at_zero([1, 3, 5]) == {1: 4, 3: 3, 5: 11}
    assert combine({holder: shares[holder] for holder in (1, 3, 5)}) == 13


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_t_shares_give_the_secret(data):
    """Any t or more shares give it, and with one fewer it is missed."""
    secret, threshold = data.draw(ELEMENTS), data.draw(st.integers(2, 6))
    holders = data.draw(st.lists(st.integers(1, PRIME - 1), min_size=threshold, max_size=8, unique=True))
    shares = split(secret, threshold, holders)
    used = data.draw(st.lists(st.sampled_from(holders), min_size=threshold, unique=True))
    assert combine({holder: shares[holder] for holder in used}) == secret
    assert combine({holder: shares[holder] for holder in used}, weights_at_zero(used)) == secret
    assert combine({holder: shares[holder] for holder in used[: threshold - 1]}) != secret


def test_fewer_shares_fit_every_secret_equally_often(small_field, monkeypatch):
    """All 7^3 polynomials of degree 2: each pair of shares of each two holders occurs as often with every secret."""
    for pair in combinations([1, 2, 4, 6], 2):
        seen = Counter()
        for secret, *others in product(range(7), repeat=3):
            coefficients = iter(others)
            monkeypatch.setattr(field, "random_element", lambda rest=coefficients: next(rest))
            shares = split(secret, 3, [1, 2, 4, 6])
            seen[secret, *(shares[holder] for holder in pair)] += 1
        assert seen == dict.fromkeys(product(range(7), repeat=3), 1)


def test_coefficients_are_new_each_time():
    """Two sharings of a secret have nothing in common, so shares of different sharings do not add up."""
    one, two = split(5, 3, [1, 2, 3]), split(5, 3, [1, 2, 3])
    assert not set(one.values()) & set(two.values())
    assert combine({1: one[1], 2: one[2], 3: two[3]}) != 5


def test_random_elements_are_in_the_whole_field(small_field):
    assert {random_element() for _ in range(500)} == set(range(7))


@pytest.mark.parametrize(
    ("secret", "threshold", "holders", "reason"),
    [
        (PRIME, 2, [1, 2], "not an element"),
        (-1, 2, [1, 2], "not an element"),
        (1, 2, [0, 1], "different positions above 0"),
        (1, 2, [1, 1], "different positions above 0"),
        (1, 2, [1, PRIME], "different positions above 0"),
        (1, 0, [1, 2], "must be 1 to 2"),
        (1, 3, [1, 2], "must be 1 to 2"),
    ],
)
def test_impossible_sharings_are_refused(secret, threshold, holders, reason):
    with pytest.raises(ValueError, match=reason):
        split(secret, threshold, holders)


def test_impossible_shares_are_refused():
    with pytest.raises(ValueError, match="no shares"):
        combine({})
    for share in (PRIME, -1):
        with pytest.raises(ValueError, match="not an element"):
            combine({1: 1, 2: share})


@given(ELEMENTS)
def test_an_element_has_one_encoding(element):
    data = to_bytes(element)
    assert from_bytes(data) == element
    assert len(data) == ELEMENT_BYTES == 32


def test_other_encodings_are_refused():
    """Numbers from p on would be second encodings of 0 to 18 and of more; lengths differ from 32."""
    assert from_bytes((PRIME - 1).to_bytes(32, "little")) == PRIME - 1
    assert to_bytes(1) == b"\x01" + bytes(31)
    for data in (PRIME.to_bytes(32, "little"), b"\xff" * 32, bytes(31), bytes(33), b""):
        with pytest.raises(ValueError, match="an element of the field has 32 bytes"):
            from_bytes(data)
