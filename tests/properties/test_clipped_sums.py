"""The clipping of single samples' gradients, for gradients of any finite size."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hyperfl_flwr.training.sample_gradients import Explicit, Factored, Part, clipped

EXPONENTS = st.integers(-30, 30)

ROUNDING = 1e-5
"""Largest relative error of a clipped gradient; float32 has 6e-8 per operation."""

LEAST = 1e-36
"""Values of a sum below it may be rounded to less than seven digits: the normal numbers of float32 end."""


def gradients_of(part: Explicit | Factored, row: int) -> list[Tensor]:
    """Return the gradients of a sample, float64."""
    if isinstance(part, Explicit):
        return [each[row].double() for each in part.gradients.values()]
    outputs, inputs = part.outputs[row].double(), part.inputs[row].double()
    return [torch.outer(outputs, inputs), outputs]


def in_float64(parts: list[Explicit | Factored], clip_norm: float, batch: int) -> list[Tensor]:
    """Return the clipped sums, one sample after the other, in float64."""
    sums: list[Tensor] = []
    for row in range(batch):
        mine = [gradient for part in parts for gradient in gradients_of(part, row)]
        # math.hypot neither under- nor overflows
        norm = math.hypot(*(float(value) for gradient in mine for value in gradient.flatten()))
        scaled = [gradient * (min(1.0, clip_norm / norm) if norm else 1.0) for gradient in mine]
        sums = [total + each for total, each in zip(sums, scaled, strict=True)] if sums else scaled
    return sums


@settings(max_examples=200, deadline=None)
@given(
    exponents=st.lists(st.tuples(EXPONENTS, EXPONENTS, EXPONENTS), min_size=1, max_size=4),
    clip_exponent=st.integers(-6, 6),
    seed=st.integers(0, 1000),
)
def test_no_gradient_is_too_small_or_too_large_to_be_clipped(
    exponents: list[tuple[int, int, int]], clip_exponent: int, seed: int
) -> None:
    """A convolution's gradients in memory and a linear layer's factors, each sample's of three sizes of its own."""
    batch, generator, clip_norm = len(exponents), torch.Generator().manual_seed(seed), 10.0**clip_exponent
    sizes = (10 ** torch.tensor(exponents, dtype=torch.float64)).float()

    def values(column: int, *shape: int) -> Tensor:
        drawn = torch.randn((batch, *shape), generator=generator)
        return drawn * sizes[:, column].view(batch, *(1 for _ in shape))

    explicit = Explicit({0: values(0, 4, 3, 2, 2), 1: values(0, 4)})
    factored = Factored(values(1, 6), values(2, 5), weight=2, bias=3)
    parts: list[Part] = [explicit, factored]
    found = torch.cat([each.double().flatten() for each in clipped(parts, clip_norm)])
    expected = torch.cat([each.flatten() for each in in_float64([explicit, factored], clip_norm, batch)])
    assert found.isfinite().all()
    # Relative to the sum of the norms: the gradients of several samples may cancel.
    norms = torch.stack([part.squared_norms() for part in parts]).sum(0).sqrt()
    assert float((found - expected).norm()) <= ROUNDING * float(norms.clamp(max=clip_norm).sum()) + LEAST
