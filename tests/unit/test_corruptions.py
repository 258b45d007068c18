"""Corrupted images compared with closed forms."""

import math

import numpy as np
import pytest
import torch

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.corruptions import CORRUPTIONS, corrupted, require_corruption

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)


def parameters(name, count, seed=3):
    """Return the parameters that a generator with this seed draws for `count` images."""
    return np.random.default_rng(seed).uniform(*CORRUPTIONS[name], size=count)


def corrupted_raw(raw, name, seed=3):
    """Normalise images [n, C, H, W] in [0, 1], corrupt them, and undo the normalisation."""
    channels = raw.shape[1]
    shift, scale = (np.array(each[:channels]).reshape(-1, 1, 1) for each in (MEAN, STD))
    normalised = torch.from_numpy((raw - shift) / scale)
    rng = np.random.default_rng(seed)
    changed = corrupted(normalised, name, rng, mean=MEAN[:channels], std=STD[:channels])
    assert (changed.shape, changed.dtype) == (normalised.shape, normalised.dtype)
    return changed.numpy() * scale + shift


def test_brightness_multiplies_up_to_white():
    """Constant images of every level are multiplied by their factors, and cut at white where these exceed it."""
    levels = np.linspace(0, 1, 24).reshape(-1, 1, 1, 1)
    factors = parameters("brightness", 24).reshape(-1, 1, 1, 1)
    wanted = np.minimum(levels * factors, 1)
    assert (levels * factors > 1).any()
    np.testing.assert_allclose(
        corrupted_raw(np.tile(levels, (1, 3, 5, 4)), "brightness"), wanted + np.zeros((3, 5, 4)), atol=1e-7
    )


def test_contrast_multiplies_the_distance_from_the_mean_grey():
    """The mean grey of a colour image is the mean of its luminance."""
    raw = np.random.default_rng(0).uniform(0.4, 0.6, size=(6, 3, 5, 4))
    factors = parameters("contrast", 6).reshape(-1, 1, 1, 1)
    luminance = np.tensordot([0.2989, 0.587, 0.114], raw, (0, 1))
    middle = luminance.mean((1, 2)).reshape(-1, 1, 1, 1)
    np.testing.assert_allclose(corrupted_raw(raw, "contrast"), middle + factors * (raw - middle), rtol=1e-6)
    grey = raw[:, :1]
    middle = grey.mean((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(corrupted_raw(grey, "contrast"), middle + factors * (grey - middle), rtol=1e-6)


def test_saturation_multiplies_the_distance_from_grey():
    """Each pixel's distance from its luminance is multiplied by the factor; grey pixels stay as they are."""
    raw = np.random.default_rng(0).uniform(0.4, 0.6, size=(6, 3, 5, 4))
    raw[:, :, 0, 0] = 0.25
    luminance = np.tensordot([0.2989, 0.587, 0.114], raw, (0, 1))[:, None]
    factors = parameters("saturation", 6).reshape(-1, 1, 1, 1)
    changed = corrupted_raw(raw, "saturation")
    np.testing.assert_allclose(changed, luminance + factors * (raw - luminance), rtol=1e-6)
    np.testing.assert_allclose(changed[:, :, 0, 0], 0.25, rtol=1e-3)  # the weights' sum is 0.9999


def test_blur_is_a_normalised_gaussian_of_seven_pixels():
    """A single bright pixel becomes the outer product of the filter, with zeros beyond three pixels."""
    raw = np.zeros((4, 1, 15, 15))
    raw[:, 0, 7, 7] = 1.0
    changed = corrupted_raw(raw, "blur")
    for image, sigma in zip(changed[:, 0], parameters("blur", 4), strict=True):
        line = [math.exp(-((offset / sigma) ** 2) / 2) for offset in range(-3, 4)]
        kernel = np.zeros(15)
        kernel[4:11] = np.array(line) / sum(line)
        np.testing.assert_allclose(image, np.outer(kernel, kernel), atol=1e-7)
        assert image.sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(corrupted_raw(np.full((2, 3, 9, 8), 0.7), "blur"), 0.7, rtol=1e-6)  # also at the edge


def test_rotation_turns_anticlockwise_about_the_middle_and_fills_with_black():
    """A ramp becomes one in rotated coordinates, up to rounding to the nearest pixel; corners become black."""
    side, slopes = 33, (0.02, 0.01)
    down, right = np.meshgrid(np.arange(side) - 16.0, np.arange(side) - 16.0, indexing="ij")
    ramp = 0.5 + slopes[0] * right + slopes[1] * down
    changed = corrupted_raw(np.tile(ramp, (5, 1, 1, 1)).reshape(5, 1, side, side), "rotation")
    inside = np.hypot(down, right) < 15
    for image, degrees in zip(changed[:, 0], parameters("rotation", 5), strict=True):
        sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
        wanted = 0.5 + slopes[0] * (cosine * right - sine * down) + slopes[1] * (sine * right + cosine * down)
        assert np.abs(image - wanted)[inside].max() <= sum(slopes) / 2 + 1e-6
    assert max(parameters("rotation", 5)) > 5  # rotating in the other direction would be off by several pixels
    white = corrupted_raw(np.ones((5, 1, side, side)), "rotation")
    np.testing.assert_allclose(white[:, 0, 0, 0][parameters("rotation", 5) > 5], 0, atol=1e-6)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_image_draws_its_own_parameter_from_the_seed(name):
    """Two copies of an image differ afterwards, the same seed gives the same result, and the input is unchanged."""
    image = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 3, 32, 32)).astype(np.float32))
    images = image.repeat(2, 1, 1, 1)
    first, again, other = (
        corrupted(images, name, np.random.default_rng(seed), mean=MEAN, std=STD) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(images[1:], image)
    assert corrupted(images[:0], name, np.random.default_rng(3), mean=MEAN, std=STD).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(
    ("name", "channels", "text"),
    [
        ("fog", 3, "must be one of blur, .* got 'fog'"),
        ("saturation", 1, "saturation needs images with 3 channels .colour., got 1 channels"),
        ("contrast", 2, "needs images with 1 or 3 channels, got 2"),
    ],
)
def test_what_has_no_meaning_is_refused(name, channels, text):
    with pytest.raises(DataError, match=text):
        require_corruption(name, channels)
    with pytest.raises(DataError, match=text):
        corrupted(torch.zeros(1, channels, 8, 8), name, np.random.default_rng(0), mean=MEAN, std=STD)
