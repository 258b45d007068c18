"""Matrices as factors: their elements and their sums."""

import numpy as np
import pytest
import torch

from hyperfl_flwr.protocol.arrays import not_finite
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum
from hyperfl_flwr.training.factored_array import MOST_WAITING, DeviceTotal, FactoredArray


def factored(factor: float, scale: float, dtype: torch.dtype = torch.float32) -> FactoredArray:
    """Return a matrix of 24 x 3001 elements with 5 rows of factors."""
    generator = torch.Generator().manual_seed(0)
    base, left, right = (
        torch.randn(shape, generator=generator, dtype=dtype) for shape in ((24, 3001), (5, 24), (5, 3001))
    )
    bound = float(base.abs().max())
    return FactoredArray(base=base, base_bound=bound, factor=factor, left=left * scale, right=right)


def test_the_columns_are_the_product() -> None:
    """To rounding, equal to a H_0 + L^T R in float64, and below the bound."""
    array = factored(0.9, 0.1, torch.float64)
    expected = 0.9 * array.base + array.left.t() @ array.right
    np.testing.assert_allclose(array.formed(), expected.numpy(), rtol=1e-13, atol=1e-13)
    assert float(expected.abs().max()) <= array.bound
    assert (array.shape, array.dtype) == ((24, 3001), np.float64)
    assert [part.start for part, _ in array.columns()] == [0, 2730]


@pytest.mark.parametrize("scale", [0.1, 1e4, 1e7])
def test_sums_of_factors_are_those_of_the_formed_matrix(scale: float) -> None:
    """The same bits in all levels, also for terms that are too large for level 0."""
    array = factored(0.9, scale)
    received = {"h/w": array.base.numpy()}
    one, other = (
        ReproducibleSum(received, {"h": Reduction.MEAN_BY_EXAMPLES}, num_clients=3, max_num_examples=9)
        for _ in range(2)
    )
    for size in (9, 4):
        one.add({"h/w": array}, size)
        other.add({"h/w": array.formed()}, size)
    assert list(one.levels) == list(other.levels)
    assert (len(one.levels) > 1) is (scale > 1)
    for level in one.levels:
        assert one.sums(level)["h/w"].tobytes() == other.sums(level)["h/w"].tobytes()


@pytest.mark.parametrize("scale", [0.1, 1e4])
@pytest.mark.parametrize("place", ["cache", "device"])
def test_sums_of_several_matrices_are_those_of_the_formed_ones(
    place: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits in a processor's cache and on a device; terms that are too large for level 0 are added at once."""
    arrays = [factored(factor, scale) for factor in np.linspace(-0.7, 0.9, MOST_WAITING + 3)]
    received = {"h/w": arrays[0].base.numpy()}
    one, other = (
        ReproducibleSum(received, {"h": Reduction.MEAN_BY_EXAMPLES}, num_clients=20, max_num_examples=9)
        for _ in range(2)
    )
    if place == "device":
        cpu = torch.device("cpu")
        monkeypatch.setattr(FactoredArray, "new_total", lambda self, sums: DeviceTotal(sums, cpu))
        monkeypatch.setattr(FactoredArray, "columns", lambda self: iter([(slice(0, 3001), self.on_device().numpy())]))
    for number, array in enumerate(arrays):
        one.add({"h/w": array}, number % 9 + 1)
        other.add({"h/w": array.formed()}, number % 9 + 1)
    assert len(one.matrix_totals) == (scale < 1)
    alone, reference = (
        total.levels_of({"h/w": value}, 5) for total, value in ((one, arrays[0]), (other, arrays[0].formed()))
    )
    assert len(one.matrix_totals) == (scale < 1)
    for levels, expected in ((alone, reference), ({level: one.sums(level) for level in one.levels}, other.levels)):
        assert list(levels) == list(expected)
        for level, sums in levels.items():
            assert sums["h/w"].tobytes() == expected[level]["h/w"].tobytes()
    one.merge(reference)
    other.merge(reference)
    one.add({"h/w": arrays[1]}, 3)
    other.add({"h/w": arrays[1].formed()}, 3)
    assert one.take_mean(25, 13)["h/w"].tobytes() == other.take_mean(25, 13)["h/w"].tobytes()


@pytest.mark.parametrize(("factor", "scale", "finite"), [(1.0, 1.0, True), (1.0, 1e38, False), (np.nan, 1.0, False)])
def test_factors_show_what_is_not_finite(factor: float, scale: float, finite: bool) -> None:
    """Also elements that overflow, although the factors do not."""
    array = factored(factor, scale)
    assert bool(np.isfinite(array.formed()).all()) is finite
    assert not_finite({"h/w": array}) == (None if finite else "h/w")
