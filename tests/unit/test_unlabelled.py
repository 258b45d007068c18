"""A user's unlabelled samples: what is read, what is left out with a note, and what is refused with a clear error."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.registry import DATASETS, class_names
from hyperfl_flwr.data.sources.omniglot import CHARACTERS
from hyperfl_flwr.data.unlabelled import read_unlabelled

GREY, COLOUR = (1, 8, 6), (3, 8, 6)


def save(path: Path, mode: str = "L", size: tuple[int, int] = (6, 8), value: int = 51) -> Path:
    """Write an image whose pixels have one value (51 is a fifth of 255); `size` is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0]), value, np.uint8)).convert(mode).save(path)
    return path


def test_a_folder_is_read_with_the_folders_below_it_in_order(tmp_path: Path) -> None:
    """Hidden files are ignored; notes give the number of other files and say that folders are not read as labels."""
    for number, name in enumerate(("b.png", "a.JPG", "cats/c.bmp", ".hidden/d.png", "cats/.e.png")):
        save(tmp_path / name, value=51 * number)
    (tmp_path / "notes.txt").write_text("x")
    found = read_unlabelled(tmp_path, GREY)
    assert (found.column, found.names, len(found)) == ("file", ("a.JPG", "b.png", "cats/c.bmp"), 3)
    assert found.samples.shape == (3, *GREY)
    assert found.samples.dtype == np.float32
    np.testing.assert_allclose(found.samples[:, 0, 0, 0], [0.2, 0.0, 0.4], atol=0.01)  # JPEG is not exact
    assert found.notes[0].startswith("1 files of")
    assert "not read as labels" in found.notes[1]


def test_colours_and_black_and_white_are_read_as_they_are(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = read_unlabelled(tmp_path, COLOUR)
    np.testing.assert_array_equal(found.samples[0], pixels.transpose(2, 0, 1) / np.float32(255))
    assert found.notes == ()
    save(tmp_path / "bits" / "a.png", mode="1", value=255)
    np.testing.assert_array_equal(read_unlabelled(tmp_path / "bits", GREY).samples, np.ones((1, *GREY)))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    save(tmp_path / "a.png", value=0)
    first = read_unlabelled(tmp_path, GREY)
    assert read_unlabelled(tmp_path, GREY) is first
    with pytest.raises(ValueError, match="read-only"):
        first.samples[0] = 1
    save(tmp_path / "bb.png", value=255)
    np.testing.assert_array_equal(read_unlabelled(tmp_path, GREY).samples.mean(axis=(1, 2, 3)), [0, 1])


def test_files_of_images_and_of_features(tmp_path: Path) -> None:
    """Whole numbers are scaled to [0, 1], floats are not; a note names the keys that are not used."""
    np.savez(tmp_path / "a.npz", images=np.full((2, 8, 6), 51, np.uint8), labels=[0, 1], test_images=np.ones(3))
    found = read_unlabelled(tmp_path / "a.npz", GREY)
    np.testing.assert_allclose(found.samples, np.full((2, *GREY), 0.2), rtol=1e-6)
    assert (found.column, found.names) == ("index", ("0", "1"))
    assert found.notes == ("test_images, labels in a.npz are not used",)
    np.savez(tmp_path / "b.npz", features=np.full((4, 5), -7.5))
    found = read_unlabelled(tmp_path / "b.npz", (5,))
    np.testing.assert_array_equal(found.samples, np.full((4, 5), -7.5, np.float32))
    assert found.notes == ()


def broken(path: Path) -> Path:
    path.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    return path


def cut(path: Path) -> Path:
    save(path, mode="RGB", size=(60, 80))
    path.write_bytes(path.read_bytes()[:100])
    return path


@pytest.mark.parametrize(
    ("make", "shape", "parts"),
    [
        (
            lambda f: (f / "notes.txt").write_text("x"),
            GREY,
            ["contains no images", ".png", "give a folder with images"],
        ),
        (lambda f: save(f / "a.png", size=(8, 6)), GREY, ["8x6 pixels (height, width)", "a.png, 6x8 with 1 channels"]),
        (lambda f: save(f / "a.png", mode="RGB"), GREY, ["1 channels of 8 bits (grey)", "with 3 channels (mode RGB)"]),
        (lambda f: save(f / "a.png"), COLOUR, ["3 channels of 8 bits (RGB)", "with 1 channels (mode L)"]),
        (
            lambda f: save(f / "a.png", mode="RGBA"),
            COLOUR,
            ["4 channels (mode RGBA)", "hyperfl predict --convert"],
        ),
        (lambda f: (save(f / "a.png"), save(f / "b.png", size=(9, 9))), GREY, ["1 of 2 do not, the first is b.png"]),
        (lambda f: broken(f / "a.png"), GREY, ["a.png must be an image, but reading it", "remove or replace it"]),
        (lambda f: cut(f / "a.png"), (3, 80, 60), ["a.png must be an image"]),
        (lambda f: save(f / "a.png"), (5,), ["feature vectors of 5 numbers", "give an .npz"]),
    ],
)
def test_unfit_folders_are_refused(make, shape, parts, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(DataError) as caught:
        read_unlabelled(tmp_path, shape)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("arrays", "shape", "parts"),
    [
        ({"images": np.zeros((2, 6, 8))}, GREY, ["must have the shape 1x8x6, like those of the run, got 1x6x8"]),
        ({"images": np.zeros((2, 8, 6, 3))}, GREY, ["must have the shape 1x8x6", "got 3x8x6"]),
        ({"features": np.zeros((2, 5))}, GREY, ["must have the shape 1x8x6", "got 5"]),
        ({"images": np.zeros((2, 8, 6))}, (5,), ["must have the shape 5", "got 1x8x6"]),
        ({"labels": np.zeros(2)}, GREY, ["must have the key images or features, got neither"]),
        ({"images": np.zeros((2, 8, 6)), "features": np.zeros((2, 5))}, GREY, ["got images and features"]),
        (
            {"images": np.full((2, 8, 6), np.nan)},
            GREY,
            ["all samples must be finite, but 2 are not, the first is 0", "remove or repair"],
        ),
        ({"images": np.zeros((0, 8, 6))}, GREY, ["must not be empty"]),
    ],
)
def test_unfit_files_are_refused(arrays, shape, parts, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError) as caught:
        read_unlabelled(tmp_path / "a.npz", shape)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_what_is_no_folder_and_no_npz_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone does not exist; give a folder of images, an \.npz or a \.csv file"):
        read_unlabelled(tmp_path / "gone", GREY)
    with pytest.raises(DataError, match=r"a\.png is neither a folder nor an \.npz or \.csv file"):
        read_unlabelled(save(tmp_path / "a.png"), GREY)
    with pytest.raises(DataError, match="must be an existing"):
        read_unlabelled(tmp_path / "gone.npz", GREY)


def test_names_of_classes_go_with_the_data_sets() -> None:
    named = {name: spec.classes for name, spec in DATASETS.items() if spec.classes}
    assert len(named) == 6
    for name, names in named.items():
        assert len(set(names)) == len(names) == DATASETS[name].num_classes
        assert class_names(name, len(names)) == names
    assert class_names("npz:mine.npz", 3) == ("0", "1", "2")
    assert list(CHARACTERS) == list(class_names("omniglot", 8))


def test_names_are_those_of_the_sources() -> None:
    """The names of Fashion-MNIST's and EMNIST's classes are those in torchvision's tables."""
    datasets = pytest.importorskip("torchvision").datasets
    assert class_names("fashion-mnist", 10) == tuple(datasets.FashionMNIST.classes)
    assert class_names("emnist", 62) == tuple(sorted(datasets.EMNIST.classes_split_dict["byclass"]))


def test_cifars_names_are_those_of_its_files() -> None:
    root = Path(os.environ.get("HYPERFL_TEST_DATA", "gone"))
    for name, file, key in (
        ("cifar10", "cifar-10-batches-py/batches.meta", "label_names"),
        ("cifar100", "cifar-100-python/meta", "fine_label_names"),
    ):
        if not (root / file).is_file():
            pytest.skip("HYPERFL_TEST_DATA names no folder with CIFAR")
        with (root / file).open("rb") as stored:
            assert list(class_names(name, 0)) == pickle.load(stored)[key]
