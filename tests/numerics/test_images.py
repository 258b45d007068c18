"""PSNR, SSIM and LPIPS by hand, and verdicts on whether reconstructions show the private images."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hyperfl_flwr.attacks.scoring import (
    Comparison,
    compare,
    match,
    number_by_chance,
    number_recovered,
    psnr_in_order,
    verdict,
)
from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.metrics.images import Lpips, psnr, similarity, ssim

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers(monkeypatch):
    """Seed RNG for each test, so that its numbers do not depend on the tests before it."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def images(num=5, channels=1, side=28):
    return RNG.random((num, channels, side, side), dtype=np.float32)


def test_psnr_is_per_image():
    """It is -10 log10 of the mean squared error: 20 dB for an offset of 0.1, 40 for 0.01, infinite for equal images."""
    black = np.zeros((3, 1, 8, 8), dtype=np.float32)
    other = black + np.array([0.1, 0.01, 0.0], dtype=np.float32).reshape(3, 1, 1, 1)
    np.testing.assert_allclose(psnr(other, black), [20.0, 40.0, np.inf], rtol=1e-4)


def gaussian_ssim(one, other):
    """Return SSIM (Wang et al. 2004, equation 13), averaged over all pixels with reflected borders; float64."""
    axis = np.exp(-np.square(np.arange(11) - 5.0) / (2 * 1.5**2))
    window = np.outer(axis, axis) / axis.sum() ** 2
    padded = [np.pad(x.astype(np.float64), 5, mode="reflect") for x in (one, other)]
    patches = [np.lib.stride_tricks.sliding_window_view(x, (11, 11)) for x in padded]
    mean_x, mean_y = ((patch * window).sum(axis=(2, 3)) for patch in patches)
    xx, yy = ((np.square(patch) * window).sum(axis=(2, 3)) for patch in patches)
    xy = (patches[0] * patches[1] * window).sum(axis=(2, 3))
    c1, c2 = 0.01**2, 0.03**2
    above = (2 * mean_x * mean_y + c1) * (2 * (xy - mean_x * mean_y) + c2)
    below = (mean_x**2 + mean_y**2 + c1) * (xx - mean_x**2 + yy - mean_y**2 + c2)
    return (above / below).mean()


def test_ssim_is_the_windowed_formula():
    one, other = images(3), images(3)
    other = (0.7 * one + 0.3 * other).astype(np.float32)
    expected = [gaussian_ssim(a[0], b[0]) for a, b in zip(one, other, strict=True)]
    np.testing.assert_allclose(ssim(one, other), expected, rtol=1e-3)
    np.testing.assert_allclose(ssim(one, one), 1.0, rtol=1e-5)


def test_ssim_of_small_images():
    """8x8 images use a uniform window of 7; for images below 7 pixels SSIM is NaN."""
    small = images(2, side=8)
    assert np.all(ssim(small, small) > 0.999)
    assert np.all(np.abs(ssim(small, small[::-1].copy())) < 0.9)
    assert np.isnan(ssim(images(2, side=6), images(2, side=6))).all()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Write random AlexNet convolutions with torchvision's names and return the file."""
    shapes = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}
    generator, values = torch.Generator().manual_seed(0), {}
    for layer, (out, of, side) in shapes.items():
        values[f"features.{layer}.weight"] = torch.randn(out, of, side, side, generator=generator) * 0.02
        values[f"features.{layer}.bias"] = torch.zeros(out)
    torch.save(values, tmp_path / "alexnet.pth")
    return tmp_path / "alexnet.pth"


def test_lpips_uses_the_given_weights_and_grows_with_the_difference(weights: Path) -> None:
    """It is 0 for equal images, symmetric, equal for grey images and their colour copies; it uses the weights."""
    measure = Lpips(weights)
    one, noise = images(3), images(3)
    near, far = ((1 - share) * one + share * noise for share in (0.1, 0.9))
    assert np.all(measure(one, one) == 0)
    assert np.all(measure(near, one) < measure(far, one))
    np.testing.assert_allclose(measure(one, far), measure(far, one), rtol=1e-4)
    np.testing.assert_allclose(
        measure(np.repeat(one, 3, axis=1), np.repeat(far, 3, axis=1)), measure(one, far), rtol=1e-4
    )
    assert similarity(one, far).lpips is None
    assert similarity(one, far, measure).lpips is not None
    values = torch.load(weights)
    torch.save({name: -value for name, value in values.items()}, weights)
    assert not np.allclose(Lpips(weights)(one, far), measure(one, far))


def test_lpips_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing"):
        Lpips(tmp_path / "none.pth")
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(DataError, match="torchvision's names"):
        Lpips(tmp_path / "text.pth")


def test_candidates_are_assigned_one_to_one():
    """Shuffled copies are assigned to their originals; two candidates near one image do not both take it."""
    private = images(6)
    order = np.array([3, 1, 5, 0, 2, 4])
    found = match(private[order], private)
    np.testing.assert_array_equal(order[found.order], np.arange(6))
    np.testing.assert_array_equal(found.images, private)
    assert np.isinf(found.psnr).all()
    twins = np.stack([private[0], private[0] + 0.01])
    assert sorted(match(twins, private[:2]).order.tolist()) == [0, 1]
    with pytest.raises(ValueError, match="cannot assign"):
        match(private[:2], private)


def comparison_of(reconstructed, private):
    mean = np.full(private.shape[1:], 0.5, dtype=np.float32)
    return compare(reconstructed, private, images(len(private)), mean)


def test_controls_and_verdict():
    """Noise of 0.05 gives 26 dB, the mean of uniform noise 10.8 (variance 1/12), unrelated noise 7.8 dB (1/6)."""
    private = images(8)
    good = comparison_of(private + np.float32(0.05) * RNG.standard_normal(private.shape, dtype=np.float32), private)
    np.testing.assert_allclose(good.matched.psnr, 26.0, atol=0.5)
    np.testing.assert_allclose(good.mean_image, 10.8, atol=0.5)
    np.testing.assert_allclose(good.unrelated.psnr, 7.8, atol=0.5)
    np.testing.assert_allclose(good.advantage, 26.0 - 10.8, atol=0.8)
    assert verdict([good]) == "recovered"
    assert verdict([comparison_of(images(8), private)]) == "recovered nothing"
    one_of_many = images(8)
    one_of_many[2] = private[2]
    assert verdict([comparison_of(one_of_many, private)]) == "recovered some"
    with pytest.raises(ValueError, match="at least one"):
        verdict([])


def test_many_images_are_not_recovered_by_chance():
    """Of 300 digits some are 6 dB nearer to other clients' digits than to unrelated ones, and the other way round."""
    digits = load_dataset("digits", None)
    known = digits.test.scaled(np.arange(len(digits.test)))
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(len(digits.train))
        private, others = (digits.train.scaled(part) for part in (order[:300], order[300:600]))
        chance = compare(others, private, known[:300], known.mean(axis=0))
        assert number_recovered([chance]) > 0
        assert number_by_chance([chance]) > 0
        assert verdict([chance]) == "recovered nothing"
    with_one = compare(np.concatenate([private[:1], others[1:]]), private, known[:300], known.mean(axis=0))
    assert verdict([with_one]) == "recovered some"  # far ahead, as no unrelated image is


def test_unrelated_images_must_beat_both_others_to_be_ahead_by_chance():
    """An unrelated image 15 dB above the attack and 2 dB above the mean image is no more ahead than the attack."""
    private = images(1)
    one = comparison_of(images(1), private).matched
    matched, unrelated = (replace(one, psnr=np.array([value])) for value in (5.0, 20.0))
    for mean_image, number in ((18.0, 0), (13.0, 1)):
        made = Comparison(matched=matched, unrelated=unrelated, mean_image=np.array([mean_image]))
        assert number_by_chance([made]) == number
        assert number_recovered([replace(made, matched=unrelated, unrelated=matched)]) == number


def test_images_are_compared_with_their_nearest_form():
    """Mirrored images, which clients with augmentation may have trained on, are exact; so is the mean image's form."""
    private = images(4)
    mirrored = np.ascontiguousarray(private[..., ::-1])
    forms = lambda image: np.stack([image, image[..., ::-1]])  # noqa: E731
    found = match(mirrored[::-1], private, forms)
    np.testing.assert_array_equal(found.private, mirrored)
    assert found.order.tolist() == [3, 2, 1, 0]
    assert np.isinf(found.psnr).all()
    assert np.isinf(psnr_in_order(mirrored, private, forms)).all()
    assert np.isfinite(psnr_in_order(mirrored, private)).all()


def test_one_candidate_is_no_second_image():
    """Two private images that resemble each other: one candidate recovers one of them, its copies no further one."""
    private = images(6)
    private[1] = private[0] + 0.01
    once = comparison_of(np.repeat(private[:1], 6, axis=0), private)
    assert (once.advantage >= 6).tolist() == [True, True, False, False, False, False]
    assert once.recovered.tolist() == [True, False, False, False, False, False]
    assert number_recovered([once, comparison_of(private, private)]) == 1 + 6


@pytest.mark.parametrize(
    ("num", "ahead", "expected"),
    [(4, 7.0, "recovered"), (4, 3.0, "recovered nothing"), (5, 3.0, "recovered"), (5, 0.5, "recovered nothing")],
)
def test_few_images_need_a_clear_margin(num, ahead, expected):
    """Four signed ranks reach p = 1/16 at best, five 1/32; advantages below 1 dB do not count."""
    private = images(num)
    base = comparison_of(images(num), private)
    better = np.maximum(base.unrelated.psnr, base.mean_image) + ahead + np.linspace(0, 0.01, num)
    matched = type(base.matched)(images=private, order=np.arange(num), private=private, psnr=better)
    made = Comparison(matched=matched, unrelated=base.unrelated, mean_image=base.mean_image)
    assert verdict([made]) == expected
