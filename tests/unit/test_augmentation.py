"""Random crops and flips of a batch, compared with torchvision's functions."""

import numpy as np
import torch
from torchvision.transforms import functional as transforms

from hyperfl_flwr.data.augmentation import Augmentation


def augmented(augmentation, images, seed):
    return augmentation(images, augmentation.draw([len(images)], np.random.default_rng(seed)))


def test_the_batches_of_a_pass_are_drawn_one_after_the_other():
    """Drawing a pass at once gives each batch the numbers that it gets when the batches are drawn one by one."""
    augmentation, rng = Augmentation(pad_value=(0.0,)), np.random.default_rng(3)
    one_by_one = torch.cat([augmentation.draw([size], rng) for size in (5, 5, 2)])
    assert torch.equal(augmentation.draw([5, 5, 2], np.random.default_rng(3)), one_by_one)


def test_augmentation_is_pad_crop_and_flip_of_torchvision():
    """Every image equals torchvision's pad, crop and flip with the offsets and flips that the generator draws."""
    images = torch.randn(16, 3, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    black = (-2.0, -1.5, -1.0)
    result = augmented(Augmentation(padding=2, pad_value=black), images, 5)
    draws = np.random.default_rng(5)
    tops, lefts = draws.integers(0, 5, size=(2, 16, 1))[..., 0]
    flips = draws.random((16, 1))[:, 0] < 0.5
    assert 0 < flips.sum() < 16
    for image, changed, top, left, flip in zip(images, result, tops, lefts, flips, strict=True):
        padded = torch.stack(
            [transforms.pad(plane[None], 2, fill=value)[0] for plane, value in zip(image, black, strict=True)]
        )
        expected = transforms.crop(padded, int(top), int(left), 9, 7)
        torch.testing.assert_close(changed, transforms.hflip(expected) if flip else expected, rtol=0, atol=0)


def test_all_changes_are_those_that_can_be_drawn():
    """Each of 3 x 3 positions, plain and flipped, is there once; without flips there are half as many."""
    augmentation = Augmentation(padding=1, pad_value=(0.0,))
    rows = {tuple(row) for row in augmentation.all_changes().tolist()}
    assert len(rows) == len(augmentation.all_changes()) == 18
    assert rows == {tuple(row) for row in augmentation.draw([2000], np.random.default_rng(0)).tolist()}
    assert len(Augmentation(padding=1, pad_value=(0.0,), flip=False).all_changes()) == 9


def test_augmentation_shifts_and_flips_uniformly():
    """Of 4,000 images with one bright pixel, each of the 9 x 9 places gets 1/81, i.e. 49 +- 35 (5 sigma of 7)."""
    images = torch.zeros(4000, 1, 33, 33)
    images[:, :, 16, 16] = 1  # the centre, where a flip changes nothing
    moved = augmented(Augmentation(pad_value=(0.0,)), images, 0)
    places = moved.sum(dim=(0, 1))
    assert places.sum() == 4000
    window = places[12:21, 12:21]
    assert window.sum() == 4000
    assert ((window - 4000 / 81).abs() < 35).all()


def test_augmentation_can_leave_out_the_flip_and_the_shift():
    """Without padding and flips, the images are unchanged, in a new tensor."""
    images = torch.randn(5, 1, 4, 4)
    result = augmented(Augmentation(padding=0, pad_value=(0.0,), flip=False), images, 0)
    torch.testing.assert_close(result, images, rtol=0, atol=0)
    assert result.data_ptr() != images.data_ptr()
