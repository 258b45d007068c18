"""An encoder's private descriptor: sensitivity to one sample, added noise, and refused encoders."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from hyperfl_flwr.models.encoder import BATCH, Encoder, build_encoder
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.privacy.gaussian_mechanism import smallest_sigma
from hyperfl_flwr.privacy.private_mean import from_pooled, private_descriptor, private_pooled

NO_NOISE = {"epsilon": 1e12, "delta": 0.5}
"""Privacy so weak that the noise is negligible: sigma = S / sqrt(2 epsilon), about 1e-6 of the sensitivity."""


def lenet_encoder() -> Encoder:
    encoder = build_encoder("lenet", (1, 16, 16), 5, "mean")
    encoder.load_state_dict(ordinary_parameters(encoder, torch.Generator().manual_seed(0)), assign=True)
    return encoder


def linear_encoder(*layers: nn.Module) -> Encoder:
    """Return an encoder whose features are the two numbers of a sample; `pooled` is their mean unit vector."""
    return Encoder(nn.Sequential(nn.Flatten(), *layers), nn.Linear(2, 2), "mean")


@pytest.mark.parametrize("samples", [1, 3, BATCH + 1])
def test_opposite_samples_move_the_pooled_mean_by_the_sensitivity(samples: int) -> None:
    """With features x / |x|, an opposite sample moves the mean by 2 / n, also in a smaller last batch."""
    x = torch.randn((samples, 2), generator=torch.Generator().manual_seed(samples))
    neighbour = x.clone()
    neighbour[-1] *= -7.0
    with torch.no_grad():
        moved = (linear_encoder().pooled(x) - linear_encoder().pooled(neighbour)).norm()
    assert float(moved) == pytest.approx(2 / samples, rel=1e-5)


def test_no_replaced_image_moves_a_lenet_encoder_further_than_the_bound() -> None:
    """Gradient ascent on one image and its replacement moves the mean by more than 1.2 / n and at most sqrt(2) / n.

    Features after ReLU are not negative, so their unit vectors are at most sqrt(2) apart, below the general bound of 2.
    """
    encoder, n = lenet_encoder(), 4
    generator = torch.Generator().manual_seed(1)
    others = torch.randn((n - 1, 1, 16, 16), generator=generator)
    pair = torch.randn((2, 1, 16, 16), generator=generator, requires_grad=True)
    optimiser = torch.optim.Adam([pair], lr=0.1)
    for _ in range(60):
        optimiser.zero_grad()
        one, other = encoder.phi(pair)
        (-(one - other).square().sum()).backward()
        optimiser.step()
    images = [torch.cat([others, pair[k : k + 1].detach()]) for k in range(2)]
    moved = float((encoder.pooled(images[0]) - encoder.pooled(images[1])).norm())
    assert 1.2 / n < moved <= math.sqrt(2) / n * (1 + 1e-6)


def test_noise_is_that_of_the_sensitivity_two_over_n() -> None:
    """300 draws of 2 coordinates for n = 5 equal samples: mean x / |x|, standard deviation for S = 2 / 5."""
    x = torch.tensor([[3.0, 4.0]]).repeat(5, 1)
    draws = np.stack([private_pooled(linear_encoder(), x, epsilon=2.0, delta=0.01) for _ in range(300)])
    noise = (draws - [0.6, 0.8]).ravel()
    assert stats.kstest(noise, "norm", args=(0, smallest_sigma(2.0, 0.01, 2 / 5))).pvalue > 1e-4


def test_the_head_follows_the_noise() -> None:
    """With negligible noise the result is the encoder's own descriptor, over more than one batch."""
    encoder = lenet_encoder()
    images = torch.randn((BATCH + 3, 1, 16, 16), generator=torch.Generator().manual_seed(2))
    private = private_descriptor(encoder, images, **NO_NOISE)
    assert private.shape == (5,)
    torch.testing.assert_close(private, encoder.descriptor(images), rtol=1e-4, atol=1e-5)
    noisy = private_pooled(encoder, images, epsilon=1.0, delta=0.01)
    with torch.no_grad():
        torch.testing.assert_close(from_pooled(encoder, noisy), encoder.head(torch.tensor(noisy).float()))


def test_two_calls_differ_whatever_the_seed() -> None:
    x, drawn = torch.ones((3, 2)), []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(private_pooled(linear_encoder(), x, epsilon=1.0, delta=0.01))
    assert (drawn[0] != drawn[1]).all()


def test_evaluation_mode_is_used_and_left_as_it_was() -> None:
    """BatchNorm and dropout are inactive during the call, and the training flags stay as they were."""
    encoder = linear_encoder(nn.BatchNorm1d(2), nn.Dropout(0.5)).train()
    encoder.head.eval()
    pooled = private_pooled(encoder, torch.tensor([[3.0, 4.0]] * 2), **NO_NOISE)
    np.testing.assert_allclose(pooled, [0.6, 0.8], atol=1e-5)
    assert [encoder.body.training, encoder.body[1].training, encoder.head.training] == [True, True, False]
    assert encoder.body[1].num_batches_tracked == 0


class Centred(nn.Module):
    """Subtract the batch's mean, without using a known batch layer."""

    def forward(self, samples: Tensor) -> Tensor:
        return samples - samples.mean(dim=0)


class Dropping(nn.Module):
    """Drop units in evaluation mode too."""

    def forward(self, samples: Tensor) -> Tensor:
        return functional.dropout(samples, 0.5, training=True)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (Encoder(nn.Flatten(), nn.Linear(2, 2), "mean-max"), "uses a maximum"),
        (linear_encoder(nn.BatchNorm1d(2, track_running_stats=False)), "depend on the other samples"),
        (linear_encoder(Centred()), "depend on the other samples"),
        (linear_encoder(Dropping()), "random"),
    ],
)
def test_encoders_without_a_bound_are_refused(encoder: Encoder, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private_descriptor(encoder, torch.ones((3, 2)), epsilon=1.0, delta=0.01)


def test_normalisations_of_one_sample_are_not_refused() -> None:
    """GroupNorm uses one sample only: (3, 4) becomes (-1, 1)."""
    encoder = linear_encoder(nn.GroupNorm(1, 2))
    pooled = private_pooled(encoder, torch.tensor([[3.0, 4.0]]), **NO_NOISE)
    np.testing.assert_allclose(pooled, [-math.sqrt(0.5), math.sqrt(0.5)], atol=1e-4)


def test_a_sample_that_overflows_is_not_told_of() -> None:
    """1e38 times 10 is infinite: that vector counts as zero, so the mean with (1, 0) is (0.5, 0)."""
    scale = nn.Linear(2, 2, bias=False)
    scale.weight.data = 10 * torch.eye(2)
    pooled = private_pooled(linear_encoder(scale), torch.tensor([[1.0, 0.0], [1e38, 1e38]]), **NO_NOISE)
    np.testing.assert_allclose(pooled, [0.5, 0.0], atol=1e-5)


def test_samples_that_are_not_numbers_are_answered_like_others() -> None:
    """They count as zeros: an error would reveal, without noise, that a neighbouring dataset has such a sample."""
    samples = torch.tensor([[3.0, 4.0], [math.nan, 1.0], [math.inf, 1.0]])
    pooled = private_pooled(linear_encoder(), samples, epsilon=1e12, delta=0.01)
    np.testing.assert_allclose(pooled, [0.2, 0.8 / 3], atol=1e-4)  # the noise is about 1e-6
