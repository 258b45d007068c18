"""The secret rotation: an orthogonal matrix determined by a key."""

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.privacy.secret_rotation import Mixing, mixing_of, read_key, run_key

KEY = b"sixteen bytes, or more"
SIZES = [1, 2, 3, 64, 100, 1023, 22_602]


def random_vector(size, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_keeps_lengths_and_products_and_is_undone(size):
    mixing, x, y = Mixing(KEY, size), random_vector(size), random_vector(size, 1)
    mixed = mixing.mix(x)
    torch.testing.assert_close(mixing.unmix(mixed), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(mixing.mix(mixing.unmix(x)), x, rtol=0, atol=1e-12)
    assert float(mixed.norm()) == pytest.approx(float(x.norm()), rel=1e-12)
    assert float(mixed @ mixing.mix(y)) == pytest.approx(float(x @ y), rel=1e-10, abs=1e-10)
    single = mixing.mix(x.float())
    assert (single.dtype, single.shape) == (torch.float32, (size,))
    torch.testing.assert_close(single.double(), mixed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 6, 37])
def test_the_rotation_is_the_product_of_its_matrices(size):
    """It equals a product of scipy's Hadamard matrices for the powers of two in m with the key's signs and order."""
    mixing = Mixing(KEY, size)
    transform, begin = np.zeros((size, size)), 0
    for bit in reversed(range(7)):
        if size >> bit & 1:
            piece = slice(begin, begin := begin + 2**bit)
            transform[piece, piece] = hadamard(2**bit) / np.sqrt(2**bit)
    first, second, third = (np.diag(signs.double().numpy()) for signs in mixing.signs)
    expected = transform @ third @ transform @ np.eye(size)[mixing.order.numpy()] @ second @ transform @ first
    columns = torch.stack([mixing.mix(unit) for unit in torch.eye(size, dtype=torch.float64)], dim=1)
    np.testing.assert_allclose(columns.numpy(), expected, atol=1e-14)
    np.testing.assert_allclose(columns.T @ columns, np.eye(size), atol=1e-14)


def test_nothing_is_left_in_its_place():
    """One number spreads over a whole vector of 1023 = 512 + 256 + ... + 1, and half of the signs are negative."""
    mixing = Mixing(KEY, 1023)
    spread = mixing.mix(torch.eye(1023, dtype=torch.float64)[3])
    assert float(spread.abs().max()) < 0.6
    assert int((spread.abs() > 1e-3).sum()) > 900
    x = random_vector(22_602)
    mixed = mixing_of(KEY, 22_602).mix(x)
    assert abs(float(torch.nn.functional.cosine_similarity(mixed, x, dim=0))) < 0.03  # 4 standard deviations
    for signs in mixing_of(KEY, 22_602).signs:
        assert abs(float(signs.double().mean())) < 0.03


def test_another_key_is_another_rotation_and_the_same_key_the_same():
    x = random_vector(22_602)
    mine = Mixing(run_key(KEY, "a" * 16), 22_602).mix(x)
    assert torch.equal(mine, Mixing(run_key(KEY, "a" * 16), 22_602).mix(x))
    for other in (run_key(KEY, "b" * 16), run_key(KEY + b"!", "a" * 16)):
        mixed = Mixing(other, 22_602).mix(x)
        assert abs(float(torch.nn.functional.cosine_similarity(mixed, mine, dim=0))) < 0.03


def test_wrong_keys_and_lengths_are_refused(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"key cannot be read: No such file"):
        read_key(path)
    path.write_bytes(bytes(15))
    with pytest.raises(ConfigError, match="at least 16 bytes, got 15"):
        read_key(path)
    path.write_bytes(bytes(16))
    assert read_key(path) == bytes(16)
    with pytest.raises(ValueError, match="key of a rotation must not be empty"):
        Mixing(b"", 3)
    with pytest.raises(ValueError, match=r"must have the shape \(3,\), got \(4,\)"):
        Mixing(KEY, 3).mix(torch.zeros(4))
