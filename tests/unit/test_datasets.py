"""Loading data sets: digits, torchvision's folders, the cache of decoded arrays, and missing or damaged files."""

import os
import shutil
import socket
import struct
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torchvision
from sklearn.datasets import load_digits

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data import cache
from hyperfl_flwr.data import registry as data_registry
from hyperfl_flwr.data.dataset import channel_statistics
from hyperfl_flwr.data.registry import DATASETS, load_dataset

TEST_DATA = os.environ.get("HYPERFL_TEST_DATA")
needs_data = pytest.mark.skipif(
    TEST_DATA is None, reason="set HYPERFL_TEST_DATA to a torchvision data root to test with the real files"
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Give each test an empty cache on disk, with no data set loaded; return its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    data_registry._load.cache_clear()
    return tmp_path / "xdg" / "hyperfl"


def write_idx(root: Path, folder: str, *, train: int, test: int, seed: int) -> dict[str, np.ndarray]:
    """Write random images in the format of MNIST's files (LeCun's idx: magic number, sizes, bytes)."""
    rng = np.random.default_rng(seed)
    raw = root / folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    written = {}
    for part, prefix, count in (("train", "train", train), ("test", "t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = rng.integers(0, 10, count).astype(np.uint8)
        header = struct.pack(">iiii", 0x803, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 0x801, count) + labels.tobytes())
        written[f"{part}_images"], written[f"{part}_labels"] = images, labels
    return written


def assert_holds(dataset, written):
    np.testing.assert_array_equal(dataset.train.images[:, 0], written["train_images"])
    np.testing.assert_array_equal(dataset.train.labels, written["train_labels"])
    np.testing.assert_array_equal(dataset.test.images[:, 0], written["test_images"])
    np.testing.assert_array_equal(dataset.test.labels, written["test_labels"])


def test_digits_are_scikit_learns_in_a_stratified_split():
    """Test data are a rounded quarter of the classes' 178, 182, 177, 183, 181, 182, 181, 179, 174 and 180 images."""
    dataset = load_dataset("digits")
    assert (dataset.num_classes, dataset.input_shape) == (10, (1, 8, 8))
    assert np.bincount(dataset.test.labels).tolist() == [44, 46, 44, 46, 45, 46, 45, 45, 44, 45]
    assert (len(dataset.train), len(dataset.test)) == (1347, 450)
    ours = np.concatenate([dataset.train.images, dataset.test.images])[:, 0]
    theirs = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    order = [sorted(range(len(images)), key=lambda i, x=images: x[i].tobytes()) for images in (ours, theirs)]
    np.testing.assert_array_equal(ours[order[0]], theirs[order[1]])
    assert ours.max() == 255
    assert dataset.mean == pytest.approx([np.mean(dataset.train.images / 255)])
    assert dataset.std == pytest.approx([np.std(dataset.train.images / 255)])


def test_a_second_call_returns_the_same_object():
    assert load_dataset("digits") is load_dataset("digits", Path("anywhere"))


@pytest.mark.parametrize("name", ["imagenet", "npz:PATH", "", "Digits"])
def test_unknown_names_are_refused(name):
    with pytest.raises(
        DataError,
        match="dataset must be one of digits, mnist, fashion-mnist, cifar10, cifar100, emnist, cinic10, omniglot, npz:",
    ):
        load_dataset(name)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files_are_read(tmp_path, name, folder):
    """Images and labels are read as written; normalisation and client sizes are the paper's."""
    written = write_idx(tmp_path, folder, train=30, test=20, seed=0)
    dataset = load_dataset(name, tmp_path)
    assert_holds(dataset, written)
    assert dataset.train.images.shape == (30, 1, 28, 28)
    assert dataset.train.labels.dtype == np.int64
    assert (dataset.mean, dataset.std, dataset.augment) == ((0.1307,), (0.3081,), False)
    assert (dataset.train_samples, dataset.test_samples) == (600, 600)


def test_decoded_arrays_are_mapped_from_the_cache(tmp_path, own_cache, monkeypatch):
    """A second process (simulated: nothing loaded, decoding impossible) maps the arrays that the first one wrote."""
    written = write_idx(tmp_path, "MNIST", train=30, test=20, seed=0)
    load_dataset("mnist", tmp_path)
    (folder,) = (own_cache / "decoded").iterdir()
    assert folder.name.startswith("mnist-")
    monkeypatch.setattr(torchvision.datasets, "MNIST", None)
    data_registry._load.cache_clear()
    dataset = load_dataset("mnist", tmp_path)
    assert_holds(dataset, written)
    assert isinstance(dataset.train.images.base, np.memmap)
    assert not dataset.train.images.flags.writeable


def test_other_roots_and_changed_files_are_never_stale(tmp_path):
    """Files of equal sizes are read again if only their path, or their content and time, differ."""
    first = write_idx(tmp_path / "a", "MNIST", train=30, test=20, seed=0)
    second = write_idx(tmp_path / "b", "MNIST", train=30, test=20, seed=1)
    assert_holds(load_dataset("mnist", tmp_path / "a"), first)
    assert_holds(load_dataset("mnist", tmp_path / "b"), second)
    third = write_idx(tmp_path / "a", "MNIST", train=30, test=20, seed=2)
    for path in DATASETS["mnist"].files(tmp_path / "a"):
        os.utime(path, ns=(1, 1))
    assert_holds(load_dataset("mnist", tmp_path / "a"), third)


@pytest.mark.parametrize("damage", ["truncate", "garbage", "remove", "other"])
def test_a_damaged_cache_is_rebuilt(tmp_path, own_cache, damage):
    written = write_idx(tmp_path, "MNIST", train=30, test=20, seed=0)
    load_dataset("mnist", tmp_path)
    (folder,) = (own_cache / "decoded").iterdir()
    victim = folder / "train_images.npy"
    content = victim.read_bytes()
    victim.unlink()
    if damage == "truncate":
        victim.write_bytes(content[:-100])
    elif damage == "garbage":
        victim.write_bytes(b"\0" * len(content))
    elif damage == "other":
        np.save(victim, np.zeros(3))
    for _ in range(2):
        data_registry._load.cache_clear()
        dataset = load_dataset("mnist", tmp_path)
        assert_holds(dataset, written)
    assert isinstance(dataset.train.images.base, np.memmap)
    assert [path.name for path in (own_cache / "decoded").iterdir()] == [folder.name]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, own_cache):
    written = write_idx(tmp_path, "MNIST", train=30, test=20, seed=0)
    own_cache.parent.mkdir()
    own_cache.write_text("a file where the folder should be")
    assert_holds(load_dataset("mnist", tmp_path), written)


def test_a_full_disk_leaves_nothing_behind(own_cache, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    arrays = {name: np.zeros(1) for name in cache.ARRAYS}
    assert cache.load_or_build("x", lambda: arrays) is arrays
    assert list((own_cache / "decoded").iterdir()) == []


@pytest.mark.parametrize("part", ["train-labels-idx1-ubyte", "train-images-idx3-ubyte"])
def test_damaged_files_are_reported(tmp_path, part):
    write_idx(tmp_path, "MNIST", train=30, test=20, seed=0)
    path = tmp_path / "MNIST" / "raw" / part
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"mnist must be those that torchvision downloads.*delete that folder"):
        load_dataset("mnist", tmp_path)


def test_lengths_that_differ_are_reported(tmp_path):
    write_idx(tmp_path, "MNIST", train=30, test=20, seed=0)
    write_idx(tmp_path / "other", "MNIST", train=29, test=20, seed=0)
    name = "MNIST/raw/train-labels-idx1-ubyte"
    shutil.copy(tmp_path / "other" / name, tmp_path / name)
    with pytest.raises(DataError, match="30 images with 29 labels"):
        load_dataset("mnist", tmp_path)


def test_cifar_files_that_are_not_the_original_are_refused_before_they_are_unpickled(tmp_path):
    """Files are compared with torchvision's checksums first, since a pickle from elsewhere could run code."""
    for path in DATASETS["cifar10"].files(tmp_path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"cos\nabort\n(tR.")  # unpickling this would end the process
    with pytest.raises(DataError, match="cifar10 must be those that torchvision downloads"):
        load_dataset("cifar10", tmp_path)


@pytest.mark.parametrize("name", sorted(name for name, spec in DATASETS.items() if spec.download_mb))
def test_missing_files_without_network(tmp_path, monkeypatch, name):
    """One error names folder, files and remedy; nothing is left on disk, and the socket timeout is restored."""

    def unreachable(*_args, **_kwargs):
        assert socket.getdefaulttimeout() == pytest.approx(10.0)
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    root = tmp_path / "data"
    with pytest.raises(DataError) as caught:
        load_dataset(name, root)
    message = str(caught.value)
    files = DATASETS[name].files(root)
    for part in (str(files[0].parent), *(file.name for file in files), "no route", "data-root", "digits"):
        assert part in message
    assert not root.exists()
    assert socket.getdefaulttimeout() is None


def test_an_interrupted_download_leaves_no_files(tmp_path, monkeypatch):
    """The connection breaks after the first of four files, which is removed; the user's own files stay."""
    fetched = []

    def breaks(_url, download_root, filename, **_kwargs):
        if fetched:
            raise urllib.error.URLError("reset")
        fetched.append(filename)
        (Path(download_root) / filename).write_bytes(b"half")

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", breaks)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    with pytest.raises(DataError, match="reset"):
        load_dataset("mnist", tmp_path)
    assert fetched
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["MNIST", "notes.txt", "raw"]


def test_a_download_completes_a_data_root(tmp_path, monkeypatch):
    """A download, replaced here by one that writes small files, fills a root that has one damaged file of the four."""
    written = write_idx(tmp_path / "server", "MNIST", train=30, test=20, seed=0)

    def fetch(_url, download_root, filename, **_kwargs):
        name = filename.removesuffix(".gz")
        shutil.copy(tmp_path / "server" / "MNIST" / "raw" / name, Path(download_root) / name)
        (Path(download_root) / filename).write_bytes(b"archive")

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", fetch)
    root = tmp_path / "data"
    (root / "MNIST" / "raw").mkdir(parents=True)
    (root / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(b"half of an earlier attempt")
    assert_holds(load_dataset("mnist", root), written)
    assert [path.name for path in root.iterdir()] == ["MNIST"]
    names = {path.name for path in (root / "MNIST" / "raw").iterdir()}
    assert names == {path.name for path in DATASETS["mnist"].files(root)}


@pytest.mark.parametrize(
    ("configured", "platform", "expected"),
    [
        ("/somewhere", "linux", "/somewhere/hyperfl"),
        ("/somewhere", "darwin", "/somewhere/hyperfl"),
        ("", "linux", "HOME/.cache/hyperfl"),
        ("relative", "linux", "HOME/.cache/hyperfl"),
        ("", "darwin", "HOME/Library/Caches/hyperfl"),
    ],
)
def test_cache_directory(monkeypatch, configured, platform, expected):
    """A relative $XDG_CACHE_HOME is ignored, as in the XDG base directory specification."""
    monkeypatch.setenv("XDG_CACHE_HOME", configured)
    monkeypatch.setattr(cache.sys, "platform", platform)
    assert str(cache.cache_directory()) == expected.replace("HOME", str(Path.home()))
    assert data_registry.default_data_root() == cache.cache_directory() / "data"


@needs_data
@pytest.mark.parametrize(
    ("name", "shape", "first_labels", "statistics"),
    [
        ("mnist", (60_000, 1, 28, 28), (5, 7), ([0.1307], [0.3081])),
        ("fashion-mnist", (60_000, 1, 28, 28), (9, 9), ([0.2860], [0.3530])),
        ("cifar10", (50_000, 3, 32, 32), (6, 3), ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])),
        ("cifar100", (50_000, 3, 32, 32), (19, 49), ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762])),
    ],
)
def test_real_files(name, shape, first_labels, statistics):
    """The files have the published sizes, first labels (frog and cat in CIFAR-10), channel statistics and balance."""
    dataset = load_dataset(name, Path(TEST_DATA))
    info = DATASETS[name]
    assert dataset.train.images.shape == shape
    assert (len(dataset.train), len(dataset.test)) == (info.train_size, info.test_size)
    assert (dataset.train.labels[0], dataset.test.labels[0]) == first_labels
    mean, std = channel_statistics(dataset.train.images[::5])
    assert mean == pytest.approx(statistics[0], abs=2e-3)
    assert std == pytest.approx(statistics[1], abs=2e-3)
    if name != "mnist":
        assert set(np.bincount(dataset.test.labels)) == {10_000 // info.num_classes}
    assert dataset.augment == name.startswith("cifar")
