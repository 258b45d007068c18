"""Omniglot by drawer, from small files in its layout, and from the real files if they are available."""

import io
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data import registry as data_registry
from hyperfl_flwr.data.federated_data import DataSettings, load_federated_data
from hyperfl_flwr.data.registry import DATASETS, load_dataset
from hyperfl_flwr.data.sources import omniglot
from hyperfl_flwr.data.sources.omniglot import CHARACTERS, DRAWERS, FOLDER, SETS

REAL = Path(os.environ.get("HYPERFL_TEST_DATA", "/nonexistent"))
needs_omniglot = pytest.mark.skipif(
    not all((REAL / FOLDER / f"{name}.zip").is_file() for name in SETS),
    reason=f"set HYPERFL_TEST_DATA to a data root with {FOLDER}/images_background_small1.zip and small2.zip",
)
SMALL = dict.fromkeys(CHARACTERS, 4)
IN_SET = (
    ("Balinese", "Early_Aramaic", "Greek", "Korean", "Latin"),
    ("Greek", "Japanese_(katakana)", "Latin", "Sanskrit", "Tagalog"),
)
SETTINGS = DataSettings(
    dataset="omniglot",
    data_root="",
    num_clients=20,
    partition="natural",
    seed=0,
    train_samples="auto",
    test_samples="auto",
    iid_fraction=0.2,
    dirichlet_alpha=0.3,
    shards_per_client=2,
    augmentation="auto",
    validation_fraction=0.0,
)


@pytest.fixture(autouse=True)
def small_alphabets(request, monkeypatch, tmp_path):
    """Give each test an empty cache on disk; alphabets have four characters in tests that use the small files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    data_registry._load.cache_clear()
    if "root" in request.fixturenames:
        monkeypatch.setattr(omniglot, "CHARACTERS", SMALL)


def drawing(alphabet: str, character: int, drawer: str) -> np.ndarray:
    """Return a drawing, with ink False: a square whose place depends on the alphabet, the character and the drawer.

    Its side is 15 of 105 pixels, exactly 4 of 28, and it is moved by multiples of 15.
    """
    place = list(CHARACTERS).index(alphabet) * 4 + character + 32 * int(drawer)
    paper = np.ones((105, 105), dtype=bool)
    row, column = divmod(place % 49, 7)
    paper[15 * row : 15 * row + 15, 15 * column : 15 * column + 15] = False
    return paper


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def write(root: Path) -> None:
    """Write both archives as Omniglot's authors pack them, with entries for folders; two alphabets are in both."""
    (root / FOLDER).mkdir(parents=True)
    for name, alphabets in zip(SETS, IN_SET, strict=True):
        with zipfile.ZipFile(root / FOLDER / f"{name}.zip", "w") as archive:
            archive.writestr(f"{name}/", b"")
            archive.writestr(f"__MACOSX/{name}/Greek/character01/._0000_01.png", b"no image")
            archive.writestr(f"{name}/Greek/character01/._0000_01.png", b"no image")
            for alphabet in alphabets:
                for character in range(4):
                    for drawer in DRAWERS:
                        file = f"{name}/{alphabet}/character{character + 1:02d}/{character:04d}_{drawer}.png"
                        archive.writestr(file, png(drawing(alphabet, character, drawer)))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("omniglot")
    write(root)
    return root


@pytest.fixture
def root(packed, tmp_path):
    return shutil.copytree(packed, tmp_path / "data")


def unpack(root: Path, *names: str) -> None:
    for name in names:
        archive = root / FOLDER / f"{name}.zip"
        shutil.unpack_archive(archive, root / FOLDER)
        archive.unlink()


def test_every_drawing_is_read_once_with_its_drawer_and_alphabet(root):
    """For each of 8 alphabets a drawer has 3 training images and 1 test image; ink is bright, 105 pixels become 28."""
    dataset = load_dataset("omniglot", root)
    assert (dataset.num_classes, dataset.input_shape, dataset.augment) == (8, (1, 28, 28), False)
    assert (len(dataset.train), len(dataset.test)) == (480, 160)
    assert dataset.client_ids == DRAWERS
    found = set()
    for split, count in ((dataset.train, 3), (dataset.test, 1)):
        assert (np.bincount(split.clients * 8 + split.labels) == [count] * 160).all()
        for image, label, client in zip(split.images[:, 0], split.labels, split.clients, strict=True):
            expected = [
                255 * ~drawing(list(CHARACTERS)[label], number, DRAWERS[client])[::15, ::15] for number in range(4)
            ]
            (character,) = [number for number in range(4) if (image[::4, ::4] == expected[number]).all()]
            np.testing.assert_array_equal(image, np.kron(expected[character], np.ones((4, 4))))
            found.add((label, client, character))
    assert len(found) == 640
    assert dataset.mean == pytest.approx([dataset.train.images.mean() / 255])


def test_clients_are_drawers_whatever_the_partition(root):
    """Each of the 20 clients has its drawer's images only: 3 for training and 1 for testing of each of 8 alphabets."""
    for partition in ("natural", "similarity"):
        data = load_federated_data(replace(SETTINGS, data_root=str(root), partition=partition))
        assert data.partition == "natural"
        train, test = data.label_counts()
        assert (train.tolist(), test.tolist()) == ([[3] * 8] * 20, [[1] * 8] * 20)
        for client in range(20):
            assert set(data.dataset.train.clients[data.train_indices(client)]) == {client}
            assert set(data.dataset.test.clients[data.test_indices(client)]) == {client}
    with pytest.raises(DataError, match=r"which is 20, got 5; set num-clients to 20"):
        load_federated_data(replace(SETTINGS, data_root=str(root), num_clients=5))


@pytest.mark.parametrize("unpacked", [SETS, SETS[:1]])
def test_unpacked_archives_are_the_same_data(root, unpacked):
    before = load_dataset("omniglot", root)
    unpack(root, *unpacked)
    after = load_dataset("omniglot", root)
    assert before is not after
    for one, two in ((before.train, after.train), (before.test, after.test)):
        np.testing.assert_array_equal(one.images, two.images)
        np.testing.assert_array_equal(one.labels, two.labels)
        np.testing.assert_array_equal(one.clients, two.clients)


def test_clients_are_mapped_from_the_cache_too(root, monkeypatch, tmp_path):
    """A second process reads no archive; a cache that has lost its files of clients is built again."""
    first = load_dataset("omniglot", root)
    data_registry._load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(omniglot, "_decode", None)
        second = load_dataset("omniglot", root)
    assert isinstance(second.train.images.base, np.memmap)
    np.testing.assert_array_equal(second.test.clients, first.test.clients)
    (folder,) = (tmp_path / "xdg" / "hyperfl" / "decoded").iterdir()
    for name in ("train_clients.npy", "test_clients.npy"):
        (folder / name).unlink()
    np.save(folder / "train_clients.npy", np.zeros(3, dtype=np.int64))
    data_registry._load.cache_clear()
    third = load_dataset("omniglot", root)
    np.testing.assert_array_equal(third.train.clients, first.train.clients)
    assert (folder / "test_clients.npy").is_file()


@pytest.mark.parametrize("absent", [SETS, SETS[1:]])
def test_missing_archives_are_named(root, absent):
    for name in absent:
        (root / FOLDER / f"{name}.zip").unlink()
    with pytest.raises(DataError) as caught:
        load_dataset("omniglot", root)
    told = str(caught.value).partition("missing: ")[2]
    assert f"must lie in {root / FOLDER}" in str(caught.value)
    assert [f"{FOLDER}/{name}.zip" in told for name in SETS] == [name in absent for name in SETS]
    assert "github.com/brendenlake/omniglot" in told
    assert "data-root" in told


def test_damaged_archives_are_reported(root):
    archive = root / FOLDER / f"{SETS[1]}.zip"
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(
        DataError, match=r"reading images_background_small2 below .* failed: .*; copy its archive again"
    ):
        load_dataset("omniglot", root)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("missing", "must contain 4 drawings of Tagalog by drawer 07, got 3; copy the archives"),
        ("drawer", "must contain 0 drawings of Tagalog by drawer 21, got 1"),
        ("alphabet", "must contain 0 drawings of Klingon by drawer 07, got 1"),
        ("size", r"Tagalog/character01/0000_07\.png in .* must have 105x105 pixels, got 105x104"),
        ("garbage", r"Tagalog/character01/0000_07\.png in .* must be an image"),
    ],
)
def test_files_that_are_not_omniglots_are_reported(root, damage, text):
    unpack(root, SETS[1])
    folder = root / FOLDER / SETS[1] / "Tagalog" / "character01"
    file = folder / "0000_07.png"
    if damage == "missing":
        file.unlink()
    elif damage == "drawer":
        shutil.copy(file, folder / "0000_21.png")
    elif damage == "alphabet":
        shutil.copytree(folder, root / FOLDER / SETS[1] / "Klingon" / "character01", ignore=lambda _, names: names)
        shutil.copy(file, root / FOLDER / SETS[1] / "Klingon" / "character01")
    elif damage == "size":
        file.write_bytes(png(np.ones((104, 105), dtype=bool)))
    else:
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match=text):
        load_dataset("omniglot", root)


@needs_omniglot
def test_real_omniglot_by_drawer():
    """The eight alphabets have 242 characters by 20 drawers (Lake et al.), of which 60 per drawer are test data.

    A quarter, rounded half to even, of 24, 22, 24, 47, 40, 26, 42, 17 is 6, 6, 6, 12, 10, 6, 10, 4.
    """
    data = load_federated_data(replace(SETTINGS, data_root=str(REAL)))
    dataset, info = data.dataset, DATASETS["omniglot"]
    assert (len(dataset.train), len(dataset.test)) == (info.train_size, info.test_size) == (20 * 182, 20 * 60)
    train, test = data.label_counts()
    assert test.tolist() == [[6, 6, 6, 12, 10, 6, 10, 4]] * 20
    assert (train + test).tolist() == [list(CHARACTERS.values())] * 20
    images = np.concatenate([dataset.train.images, dataset.test.images])
    assert len(np.unique(images.reshape(4840, -1), axis=0)) >= 4830  # some dots are equal, but no file was read twice
    assert 0.05 < images.mean() / 255 < 0.12  # the drawings have 7.5 to 8 % ink: black is the background
    assert images[:, :, 0].mean() < 1
    assert images.max() == 255
