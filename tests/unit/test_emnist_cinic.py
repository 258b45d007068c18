"""EMNIST and CINIC-10 are read from small files in their layout; the real files are not tested here."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data import registry as data_registry
from hyperfl_flwr.data.partition.equal_size import dominant_classes
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sources.torchvision import CIFAR10_CLASSES as CLASSES


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Give each test an empty cache on disk, with no data set loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    data_registry._load.cache_clear()


def write_emnist(root: Path, *, train: int, test: int) -> dict[str, np.ndarray]:
    """Write random images with all 62 labels in EMNIST's files: each image is stored transposed."""
    rng = np.random.default_rng(0)
    raw = root / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    written = {}
    for part, count in (("train", train), ("test", test)):
        images = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = (np.arange(count) % 62).astype(np.uint8)
        header = struct.pack(">iiii", 0x803, count, 28, 28)
        stored = images.transpose(0, 2, 1).tobytes()
        (raw / f"emnist-byclass-{part}-images-idx3-ubyte").write_bytes(header + stored)
        header = struct.pack(">ii", 0x801, count)
        (raw / f"emnist-byclass-{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
        written[f"{part}_images"], written[f"{part}_labels"] = images, labels
    return written


def test_emnist_is_read_upright(tmp_path):
    """Stored images are transposed back; `byclass` has 62 classes, and client sizes are the paper's."""
    written = write_emnist(tmp_path, train=124, test=62)
    dataset = load_dataset("emnist", tmp_path)
    for split, part in ((dataset.train, "train"), (dataset.test, "test")):
        np.testing.assert_array_equal(split.images[:, 0], written[f"{part}_images"])
        np.testing.assert_array_equal(split.labels, written[f"{part}_labels"])
    assert (dataset.num_classes, dataset.input_shape, dataset.augment) == (62, (1, 28, 28), False)
    assert (dataset.train_samples, dataset.test_samples) == (1000, 600)
    groups = [classes.tolist() for classes in dominant_classes(dataset.num_classes)]
    assert groups == [list(range(10)), list(range(10, 36)), list(range(36, 62))]  # digits, upper case, lower case


def write_cinic(root: Path, images: dict[str, np.ndarray]) -> None:
    """Write images [10, n, 32, 32, 3] of `train` and `test`, as PNG files in a folder for each class."""
    for part, of_classes in images.items():
        for name, pictures in zip(CLASSES, of_classes, strict=True):
            folder = root / "CINIC-10" / part / name
            folder.mkdir(parents=True)
            for number, pixels in enumerate(pictures):
                Image.fromarray(pixels).save(folder / f"cifar10-{part}-{number:04d}.png")


def random_cinic(root: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    counts = (("train", 3), ("test", 2))
    images = {part: rng.integers(0, 256, (10, count, 32, 32, 3)).astype(np.uint8) for part, count in counts}
    write_cinic(root, images)
    return images


def test_cinic10_is_read_from_its_folders(tmp_path):
    """Labels are in alphabetical order, as CIFAR-10's; `valid` may be missing; grey files get three channels."""
    images = random_cinic(tmp_path)
    grey = tmp_path / "CINIC-10" / "test" / "truck" / "zz-grey.png"
    Image.fromarray(images["test"][0, 0, :, :, 0]).save(grey)
    dataset = load_dataset("cinic10", tmp_path)
    for split, part in ((dataset.train, "train"), (dataset.test, "test")):
        flat = images[part].reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(split.images[: len(flat)], flat)
        np.testing.assert_array_equal(split.labels[: len(flat)], np.repeat(np.arange(10), len(flat) // 10))
    assert len(dataset.test) == 21
    np.testing.assert_array_equal(dataset.test.images[-1], np.stack([images["test"][0, 0, :, :, 0]] * 3))
    assert (dataset.num_classes, dataset.augment) == (10, True)
    data_registry._load.cache_clear()
    assert isinstance(load_dataset("cinic10", tmp_path).train.images.base, np.memmap)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("missing", r"must lie in .*CINIC-10.*missing: CINIC-10/test/ship.*doi:10.7488/ds/2448"),
        ("empty", "must contain images of every class, but has none of ship"),
        ("small", r"bad\.png must have 32x32 pixels, got 31x32"),
        ("garbage", r"bad\.png must be an image"),
    ],
)
def test_a_damaged_cinic10_is_reported(tmp_path, damage, text):
    random_cinic(tmp_path)
    folder = tmp_path / "CINIC-10" / "test" / "ship"
    if damage in ("missing", "empty"):
        shutil.rmtree(folder)
    if damage == "empty":
        folder.mkdir()
    if damage == "small":
        Image.fromarray(np.zeros((32, 31, 3), np.uint8)).save(folder / "bad.png")
    if damage == "garbage":
        (folder / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=text):
        load_dataset("cinic10", tmp_path)
