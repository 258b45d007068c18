"""A user's folder of images is read, split, converted and cached; a folder that does not fit gives one clear error."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import Dataset
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_format import UNCHANGED, SampleFormat
from hyperfl_flwr.data.sources import image_folder

DIGITS = load_dataset("digits")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep decoded images out of the user's cache; return the folder that they are written to."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "hyperfl" / "decoded"


def write_digits(folder: Path, labels: str = "012", count: int = 8, suffix: str = ".png") -> Path:
    """Write the first images of some of scikit-learn's digits into a folder per digit; return `folder`."""
    for label in labels:
        (folder / label).mkdir(parents=True, exist_ok=True)
        images = DIGITS.train.images[DIGITS.train.labels == int(label)][:count, 0]
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / label / f"{number:04d}{suffix}")
    return folder


def save(path: Path, mode: str = "L", size: tuple[int, int] = (8, 8), value: int = 51) -> Path:
    """Write an image whose pixels all have one value; `size` is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0]), value, np.uint8)).convert(mode).save(path)
    return path


def read(path: Path, sample_format: SampleFormat = UNCHANGED) -> Dataset:
    return load_dataset(f"folder:{path}", None, sample_format)


def test_a_quarter_of_each_class_becomes_the_test_data(tmp_path: Path) -> None:
    """Two of the eight images of each of three digits are test data; the pixels are those of scikit-learn."""
    dataset = read(write_digits(tmp_path / "images"))
    assert (dataset.num_classes, dataset.input_shape, dataset.classes) == (3, (1, 8, 8), ("0", "1", "2"))
    assert np.bincount(dataset.train.labels).tolist() == [6, 6, 6]
    assert np.bincount(dataset.test.labels).tolist() == [2, 2, 2]
    assert (dataset.mean, dataset.std, dataset.augment) == ((0.5,), (0.5,), False)
    for label in range(3):
        parts = (part.images[part.labels == label] for part in (dataset.train, dataset.test))
        got = {image.tobytes() for image in np.concatenate(list(parts))}
        assert got == {image.tobytes() for image in DIGITS.train.images[DIGITS.train.labels == label][:8]}


def test_the_split_follows_from_the_seed_and_the_names(tmp_path: Path) -> None:
    """Equal names give the same split in another folder; another seed gives another split."""
    first = read(write_digits(tmp_path / "a", count=40))
    second = read(write_digits(tmp_path / "b", count=40))
    other = read(tmp_path / "a", SampleFormat(seed=1))
    np.testing.assert_array_equal(first.test.images, second.test.images)
    assert first.test.images.shape == other.test.images.shape
    assert not np.array_equal(first.test.images, other.test.images)


def test_the_owners_division_is_kept(tmp_path: Path) -> None:
    """The owner's folders train and test are used as they are.

    Images in subfolders of a class count; another folder (val), hidden files and files that are not images do not.
    """
    write_digits(tmp_path / "train", "01", 5)
    write_digits(tmp_path / "test", "12", 3)
    write_digits(tmp_path / "val", "9", 3)
    write_digits(tmp_path / "train" / "0", "5", 2)
    save(tmp_path / "train" / "0" / ".hidden.png")
    (tmp_path / "train" / "notes.txt").write_text("x")
    dataset = read(tmp_path)
    assert dataset.classes == ("0", "1", "2")
    assert np.bincount(dataset.train.labels).tolist() == [7, 5]
    assert np.bincount(dataset.test.labels).tolist() == [0, 3, 3]


@pytest.mark.parametrize("suffix", [".bmp", ".pgm", ".tiff", ".PNG"])
def test_formats_without_loss_are_the_same_data(tmp_path: Path, suffix: str) -> None:
    expected = read(write_digits(tmp_path / "png"))
    np.testing.assert_array_equal(read(write_digits(tmp_path / "x", suffix=suffix)).train.images, expected.train.images)


def test_classes_are_numbered_as_the_federation_does(tmp_path: Path) -> None:
    """Labels are positions in the agreed list, also if the node has no folder of a class (0) or an empty one (2)."""
    write_digits(tmp_path, "13")
    (tmp_path / "2").mkdir()
    dataset = read(tmp_path, SampleFormat(classes=("3", "2", "1", "0")))
    assert (dataset.num_classes, dataset.classes) == (4, ("3", "2", "1", "0"))
    assert np.bincount(dataset.train.labels).tolist() == [6, 0, 6]
    one_only = read(write_digits(tmp_path / "one", "7"), SampleFormat(classes=("6", "7")))
    assert set(one_only.train.labels) == {1}


def test_images_are_converted_to_the_agreed_shape(tmp_path: Path) -> None:
    """Images of any mode (grey, colour, palette, alpha) and size are converted.

    Plain images keep their value, and a chessboard of 2x2 pixels keeps its mean when it is halved.
    """
    for number, (mode, size) in enumerate([("L", (8, 8)), ("RGB", (4, 16)), ("P", (9, 5)), ("RGBA", (8, 8))]):
        save(tmp_path / "a" / f"{number}.png", mode, size, 100)
    board = np.kron(np.indices((4, 4)).sum(axis=0) % 2, np.ones((2, 2))).astype(np.uint8) * 200
    (tmp_path / "b").mkdir()
    for number in range(2):
        Image.fromarray(board).save(tmp_path / "b" / f"{number}.png")
    grey = read(tmp_path, SampleFormat(input_shape=(1, 8, 8)))
    assert set(np.unique(grey.train.images[grey.train.labels == 0])) == {100}
    np.testing.assert_array_equal(grey.test.images[grey.test.labels == 1][0, 0], board)
    colour = read(tmp_path, SampleFormat(input_shape=(3, 4, 4)))
    assert (colour.input_shape, colour.mean, colour.std) == ((3, 4, 4), (0.5,) * 3, (0.5,) * 3)
    halved = colour.test.images[colour.test.labels == 1][0]
    assert halved.shape == (3, 4, 4)
    assert np.abs(halved.astype(int).mean() - board.mean()) <= 1


def broken(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


SHAPE = SampleFormat(input_shape=(1, 8, 8))
LISTED = SampleFormat(classes=("0", "1"))


@pytest.mark.parametrize(
    ("change", "sample_format", "parts"),
    [
        (lambda f: shutil.rmtree(f), UNCHANGED, ["must be an existing folder", "check the path after folder:"]),
        (lambda f: [shutil.rmtree(f / n) for n in "012"], UNCHANGED, ["a folder of images for each class", "add them"]),
        (lambda f: [shutil.rmtree(f / n) for n in "02"], UNCHANGED, ["two or more classes, got 1"]),
        (
            lambda f: write_digits(f / "train", "01"),
            UNCHANGED,
            ["must have both folders train and test, or neither, but has only train"],
        ),
        (
            lambda f: [shutil.rmtree(f / n) for n in "012"] + [write_digits(f / n, "01") for n in ("Train", "Test")],
            UNCHANGED,
            ["must have folders train and test, or those of the classes, but has Test, Train; call the folders"],
        ),
        (
            lambda f: [shutil.rmtree(f / n) for n in "012"] + [write_digits(f / n, "01") for n in ("train", "val")],
            UNCHANGED,
            ["must have folders train and test, or those of the classes, but has train, val"],
        ),
        (
            lambda f: (f / "1" / "x.png").symlink_to("/nowhere/x.png"),
            UNCHANGED,
            ["1/x.png is a link to /nowhere/x.png, which is missing", "or remove the link"],
        ),
        (lambda f: (f / "9").symlink_to("/nowhere"), UNCHANGED, ["9 is a link to /nowhere, which is missing"]),
        (
            lambda f: (f / "1" / "p7").symlink_to("/nowhere"),
            UNCHANGED,
            ["1/p7 is a link to /nowhere, which is missing"],
        ),
        (lambda f: save(f / "a.png"), UNCHANGED, ["a.png: an image must lie in a folder named after its class"]),
        (lambda f: (f / "9").mkdir(), UNCHANGED, ["9 must contain images", "or list the federation's classes"]),
        (lambda f: None, LISTED, ["data.classes, 0,1, but also has 2", "rename or remove them"]),
        (lambda f: broken(f / "1" / "0003.png"), UNCHANGED, ["1/0003.png must be an image", "replace it"]),
        (lambda f: save(f / "1" / "x.png", size=(8, 9)), UNCHANGED, ["1 of ", "1/x.png, 9x8 with 1 channels", "1x8x8"]),
        (
            lambda f: save(f / "2" / "x.png", "RGB"),
            UNCHANGED,
            ["x.png, 8x8 with 3 channels", "data.input-shape=1x8x8"],
        ),
        (
            lambda f: Image.fromarray(np.full((8, 8), 4095, np.uint16)).save(f / "2" / "x.png"),
            SHAPE,
            [
                "1 of 6 images have more than 8 bits",
                "2/x.png, 8x8 with 1 channel of more than 8 bits (mode I;16)",
                "set data.window",
                "are 4095/4095",
            ],
        ),
        (
            lambda f: Image.new("L", (8, 8)).save(
                f / "0" / "x.tif", save_all=True, append_images=[Image.new("L", (8, 8))]
            ),
            SHAPE,
            ["0/x.tif must contain one image, got 2"],
        ),
    ],
)
def test_unfit_folders_are_refused(change, sample_format, parts, tmp_path: Path) -> None:
    folder = write_digits(tmp_path / "images")
    change(folder)
    with pytest.raises(DataError) as caught:
        read(folder, sample_format)
    assert str(folder) in str(caught.value)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_classes_may_be_called_as_parts_of_a_division_if_they_are_named(tmp_path: Path) -> None:
    for name in ("valid", "testing"):
        for number in range(4):
            save(tmp_path / "mine" / name / f"{number}.png", value=number)
    with pytest.raises(DataError, match="must have folders train and test, or those of the classes, but has testing"):
        read(tmp_path / "mine")
    assert len(read(tmp_path / "mine", SampleFormat(classes=("testing", "valid"))).train) == 6


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    """A link to a folder of images counts as one, one to a folder that it lies in as nothing."""
    for number in range(8):
        save(tmp_path / "elsewhere" / f"{number}.png", value=number)
        save(tmp_path / "own" / "calm" / "p1" / f"{number}.png", value=10 + number)
        save(tmp_path / "own" / "sick" / "p1" / f"{number}.png", value=20 + number)
    (tmp_path / "own" / "calm" / "p2").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "own" / "calm" / "p1" / "again").symlink_to(tmp_path / "own")
    found = read(tmp_path / "own")
    pixels = np.concatenate([found.train.images, found.test.images])[:, 0, 0, 0]
    assert sorted(pixels) == [*range(8), *range(10, 18), *range(20, 28)]
    save(tmp_path / "elsewhere" / "8.png", value=8)
    assert len(read(tmp_path / "own").train) + len(read(tmp_path / "own").test) == 25
    for name in ("calm/notes.txt", "notes.txt", ".#lock", "calm/.#lock"):  # none is an image or a folder
        (tmp_path / "own" / name).symlink_to("/nowhere")
    assert len(read(tmp_path / "own").train) + len(read(tmp_path / "own").test) == 25


def test_too_few_images_to_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a class with 2 or more images, one of them for the test"):
        read(write_digits(tmp_path, count=1))


def test_images_are_decoded_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process maps the decoded images; after a change they are decoded again and replaced in the cache."""
    folder = write_digits(tmp_path / "images")
    first = read(folder)
    assert read(folder) is first
    (kept,) = own_cache.iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    with monkeypatch.context() as patch:
        patch.setattr(image_folder, "_decode", lambda *_: pytest.fail("decoded again"))
        load_dataset.__globals__["_load"].cache_clear()
        again = read(folder)
    assert isinstance(again.train.images.base, np.memmap)
    np.testing.assert_array_equal(again.train.images, first.train.images)
    np.testing.assert_array_equal(again.test.labels, first.test.labels)
    save(folder / "0" / "0000.png", value=7)
    os.utime(folder / "0" / "0000.png", ns=(1, 1))
    changed = read(folder)
    assert (np.concatenate([changed.train.images, changed.test.images]) == 7).all(axis=(1, 2, 3)).sum() == 1
    assert [path for path in own_cache.iterdir() if path == kept] == []
    assert len(list(own_cache.iterdir())) == 1


SLOW_WRITER = """
import sys
import numpy as np
from hyperfl_flwr.data.registry import load_dataset

save = np.save
def slow(*words, **named):
    save(*words, **named)
    print("written", flush=True)
    sys.stdin.readline()
np.save = slow
load_dataset(f"folder:{sys.argv[1]}")
"""
"""Decodes a folder of images, and waits for a line after it has written the training and after the test images."""


def slow_writer(folder: Path) -> subprocess.Popen[str]:
    """Start `SLOW_WRITER`, and wait until it has written the training images."""
    words = [sys.executable, "-c", SLOW_WRITER, str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


def test_images_of_a_process_that_was_killed_do_not_stay(tmp_path: Path, own_cache: Path) -> None:
    """The next process deletes them, whatever its folder; a process that still writes is not disturbed."""
    killed, writing = write_digits(tmp_path / "killed"), write_digits(tmp_path / "writing")
    process = slow_writer(killed)
    process.kill()
    process.communicate()
    process = slow_writer(writing)
    (left,) = own_cache.iterdir()  # the writer has deleted what the other one has left
    assert (left / "train_images.npy").stat().st_size > 0
    read(write_digits(tmp_path / "third"))
    assert left in own_cache.iterdir()
    process.communicate("\n\n")
    assert process.returncode == 0
    load_dataset.__globals__["_load"].cache_clear()
    assert isinstance(read(writing).train.images.base, np.memmap)
    assert [path.name for path in own_cache.iterdir() if path.name.startswith(".")] == []
    assert len(list(own_cache.iterdir())) == 2


def test_the_owner_may_keep_decoded_images_elsewhere(tmp_path: Path, own_cache: Path) -> None:
    folder = write_digits(tmp_path / "images")
    read(folder, SampleFormat(cache=tmp_path / "state"))
    assert len(list((tmp_path / "state" / "decoded").iterdir())) == 1
    assert not own_cache.exists()


def test_a_relative_path_is_looked_up_in_the_data_root(tmp_path: Path) -> None:
    write_digits(tmp_path / "here" / "images")
    assert load_dataset("folder:here/images", tmp_path).name == "folder:here/images"
    with pytest.raises(
        DataError, match="folder:here/images has a relative path, which needs data-root, but data-root is empty"
    ):
        load_dataset("folder:here/images")


def test_a_folder_is_shared_out_like_any_data_set(tmp_path: Path) -> None:
    """Three clients share 6 x 3 training images: each gets six, with values in [-1, 1]."""
    folder = write_digits(tmp_path / "images")
    changes = {"dataset": f"folder:{folder}", "num-clients": 3, "data.partition": "iid"}
    data = load_federated_data(RunConfig.from_flat(default_settings() | changes).data_settings())
    clients = [data.client(number) for number in range(3)]
    assert [len(own.train_labels) for own in clients] == [6, 6, 6]
    pixels = np.concatenate([own.train_images for own in clients])
    assert (pixels.min(), pixels.max()) == (-1, 1)


@pytest.mark.parametrize(
    ("sample_format", "message"),
    [
        (SampleFormat(input_shape=(3, 32, 32)), "digits must have the shape 3x32x32 (data.input-shape), got 1x8x8"),
        (SampleFormat(classes=("a", "b")), "data.classes must name the 10 classes of digits, got 2 names"),
        (
            SampleFormat(normalisation=((0.1, 0.2), (1.0, 1.0))),
            "data.normalisation must have 1 or 1 numbers for each of MEAN and STD, got 2",
        ),
    ],
)
def test_named_data_must_be_what_is_agreed_on(sample_format: SampleFormat, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset("digits", None, sample_format)
    assert message in str(caught.value)


def test_npz_data_are_seen_as_agreed(tmp_path: Path) -> None:
    """The agreed classes, normalisation and shape apply to an .npz file, here one without the last of three classes.

    Statistics of the images normalise them, but not those of an owner's images, which are unknown to others.
    """
    np.savez(tmp_path / "a.npz", images=np.full((8, 8, 8, 3), 51, np.uint8), labels=np.arange(8) % 2)
    name, three = f"npz:{tmp_path / 'a.npz'}", SampleFormat(classes=("x", "y", "z"))
    dataset = load_dataset(name, None, three)
    assert (dataset.num_classes, dataset.classes, dataset.mean[0]) == (3, ("x", "y", "z"), pytest.approx(0.2))
    assert load_dataset(name, None, replace(three, has_owner=True)).mean == (0.5,) * 3
    given = SampleFormat(normalisation=((0.25,), (0.75,)), has_owner=True)
    assert (load_dataset(name, None, given).mean, load_dataset(name, None, given).std) == ((0.25,) * 3, (0.75,) * 3)
    with pytest.raises(DataError, match="3x9x9"):
        load_dataset(name, None, SampleFormat(input_shape=(3, 9, 9)))
