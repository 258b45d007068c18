"""A user's `.npz` file: accepted contents, how they are read, and one clear error for everything else."""

import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.federated_data import DataSettings, load_federated_data
from hyperfl_flwr.data.registry import load_dataset

REAL = Path(os.environ.get("HYPERFL_TEST_DATA", "/nonexistent"))
CHARS74K = "chars74k_fnt_28x28.npz"
DIGITS, UPPER, LOWER = (range(10), range(10, 36), range(36, 62))  # EMNIST byclass's classes, and the font file's


def arrays(count=40, **changes):
    """Return a valid file's contents: `count` images of 6x5, of 4 classes in turn; a change to None removes a key."""
    rng = np.random.default_rng(0)
    content = {
        "images": rng.integers(0, 256, (count, 6, 5)).astype(np.uint8),
        "labels": np.arange(count) % 4,
        **changes,
    }
    return {key: value for key, value in content.items() if value is not None}


def load(tmp_path, **content):
    np.savez(tmp_path / "own.npz", **content)
    return load_dataset(f"npz:{tmp_path / 'own.npz'}")


def test_grey_images_with_a_split_by_label(tmp_path):
    """Of 40 images in 4 classes of 10, 8 are test images: a quarter of 10 rounds to 2."""
    content = arrays()
    dataset = load(tmp_path, **content)
    assert (dataset.num_classes, dataset.input_shape, dataset.augment) == (4, (1, 6, 5), False)
    assert np.bincount(dataset.test.labels).tolist() == [2] * 4
    assert np.bincount(dataset.train.labels).tolist() == [8] * 4
    assert dataset.train.images.dtype == np.uint8
    both = np.concatenate([dataset.train.images, dataset.test.images])[:, 0].reshape(40, -1)
    np.testing.assert_array_equal(np.unique(both, axis=0), np.unique(content["images"].reshape(40, -1), axis=0))
    assert dataset.mean == pytest.approx([dataset.train.images.mean() / 255])


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_first_and_last_are_the_same_data(tmp_path, channels):
    last = np.random.default_rng(0).integers(0, 256, (8, 6, 5, channels)).astype(np.uint8)
    labels, test = np.arange(8) % 2, {"test_labels": np.arange(8) % 2}
    one = load(tmp_path, images=last, labels=labels, test_images=last, **test)
    first = last.transpose(0, 3, 1, 2)
    two = load(tmp_path, images=first, labels=labels, test_images=last, **test)
    assert one is not two
    np.testing.assert_array_equal(one.train.images, first)
    np.testing.assert_array_equal(two.train.images, first)
    np.testing.assert_array_equal(two.test.images, first)


def test_a_relative_path_is_looked_up_in_the_data_root(tmp_path, monkeypatch):
    """A file of that name in the working directory is not read; the path may lead to a folder below the root."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    np.savez("own.npz", **arrays(80))
    np.savez(tmp_path / "own.npz", **arrays())
    dataset = load_dataset("npz:own.npz", tmp_path)
    assert len(dataset.train) == 32
    assert dataset.name == "npz:own.npz"
    assert len(load_dataset("npz:here/own.npz", tmp_path).train) == 60
    assert len(load_dataset(f"npz:{tmp_path / 'own.npz'}", tmp_path / "here").train) == 32


def test_a_relative_path_without_a_data_root_or_file_is_refused(tmp_path, monkeypatch):
    """The file in the working directory is not read, since other processes of a run work in other directories."""
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", **arrays())
    with pytest.raises(
        DataError,
        match=r"npz:own\.npz has a relative path, which needs data-root, but data-root is empty; set data-root to .*",
    ):
        load_dataset("npz:own.npz")
    with pytest.raises(
        DataError, match=r"own\.npz: must be an existing \.npz file; check the path after npz:"
    ) as caught:
        load_dataset("npz:own.npz", tmp_path / "data")
    assert str(tmp_path / "data" / "own.npz") in str(caught.value)


def test_other_keys_and_narrow_labels_are_taken(tmp_path):
    """Labels of one byte and an unknown key give the same data as a plain file."""
    content = arrays()
    plain = load(tmp_path, **content)
    narrow = content | {"labels": content["labels"].astype(np.uint8), "font": np.arange(40, dtype=np.uint16)}
    narrow |= {"labels_2": np.arange(40), "train_images": np.zeros(3), "groups0": np.arange(40)}  # labels is there, too
    narrow |= {"sample": np.arange(40), "group_names": np.array(["a"]), "x_test": np.zeros(3)}
    dataset = load(tmp_path, **narrow)
    assert dataset is not plain
    assert dataset.train.labels.dtype == np.int64
    np.testing.assert_array_equal(dataset.train.labels, plain.train.labels)
    np.testing.assert_array_equal(dataset.train.images, plain.train.images)


def grouped(data_root, name, **sizes):
    """Partition by similarity for six clients; return the data, and each client's training samples in three groups."""
    settings = DataSettings(
        dataset=f"npz:{name}", data_root=str(data_root), num_clients=6, partition="similarity", seed=0,
        iid_fraction=0.2, dirichlet_alpha=0.3, shards_per_client=2, augmentation="auto", validation_fraction=0.0,
        **sizes,
    )  # fmt: skip
    data = load_federated_data(settings)
    return data, [[counts[list(group)].sum() for group in (DIGITS, UPPER, LOWER)] for counts in data.label_counts()[0]]


def test_62_classes_have_the_three_groups_of_emnist(tmp_path):
    """A fifth of 310 samples, 62, has one of each class; the rest is of the client's group, e.g. of digits."""
    images = np.random.default_rng(0).integers(0, 256, (62 * 80, 4, 4)).astype(np.uint8)
    np.savez(tmp_path / "chars.npz", images=images, labels=(np.arange(62 * 80) % 62).astype(np.uint8))
    data, counts = grouped(tmp_path, "chars.npz", train_samples=310, test_samples=62)
    assert data.dataset.num_classes == 62
    assert counts == [[258, 26, 26], [10, 274, 26], [10, 26, 274]] * 2


@pytest.mark.skipif(
    not (REAL / CHARS74K).is_file(), reason=f"set HYPERFL_TEST_DATA to a data root with {CHARS74K} to test with it"
)
def test_the_real_fonts_stand_in_for_emnist():
    """Of 1,016 fonts of 62 characters (De Campos et al., 2009), a quarter for each character, 254, is test data."""
    data, counts = grouped(REAL, CHARS74K, train_samples=1000, test_samples=600)
    dataset = data.dataset
    assert (dataset.num_classes, dataset.input_shape, dataset.client_ids) == (62, (1, 28, 28), None)
    assert np.bincount(dataset.train.labels).tolist() == [762] * 62
    assert np.bincount(dataset.test.labels).tolist() == [254] * 62
    assert [int(np.argmax(of_client)) for of_client in counts] == [0, 1, 2, 0, 1, 2]
    assert min(max(of_client) for of_client in counts) > 800
    assert not data.reuse["train"]["reused"]


def test_floats_stay_and_may_be_nan(tmp_path):
    images = np.random.default_rng(0).random((40, 6, 5))
    images[:10] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = load(tmp_path, **arrays(images=images, clients=np.repeat(range(4), 10)))
    assert dataset.train.images.dtype == np.float32
    assert np.isnan(dataset.train.images[dataset.train.clients == 0]).all()
    others = dataset.train.images[dataset.train.clients > 0]
    assert dataset.mean == pytest.approx([others.mean(dtype=np.float64)])
    assert dataset.std == pytest.approx([others.std(dtype=np.float64)])


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        ([30, 4, 4, 30, -7] * 8, ("-7", "4", "30")),
        (["b", "a", "a", "b", "10"] * 8, ("10", "a", "b")),
        ([b"b", b"a", b"a", b"b", b"10"] * 8, ("10", "a", "b")),
    ],
)
def test_clients_are_numbered_in_sorted_order_and_split_one_by_one(tmp_path, ids, names):
    """Of the clients' 8, 16 and 16 images, 2, 4 and 4 are test data."""
    dataset = load(tmp_path, **arrays(clients=np.array(ids)))
    assert dataset.client_ids == names
    assert np.bincount(dataset.train.clients).tolist() == [6, 12, 12]
    assert np.bincount(dataset.test.clients).tolist() == [2, 4, 4]


def test_given_test_data_are_used(tmp_path):
    content = arrays(clients=np.array(["x", "y"] * 20))
    content |= {f"test_{key}": value[:10] for key, value in content.items()}
    dataset = load(tmp_path, **content)
    assert (len(dataset.train), len(dataset.test)) == (40, 10)
    assert dataset.test.clients.tolist() == [0, 1] * 5
    without = load(tmp_path, **{key: value for key, value in content.items() if key != "test_clients"})
    assert without.test.clients is None
    assert without.train.clients is not None


def test_a_changed_file_is_read_again(tmp_path):
    """A file with four classes of 20 replaces one with classes of 10; then 15 of each are for training."""
    first = load(tmp_path, **arrays())
    assert load_dataset(f"npz:{tmp_path / 'own.npz'}") is first
    assert len(load(tmp_path, **arrays(80)).train) == 60


def test_the_split_is_fixed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = load(tmp_path / "a", **arrays()), load(tmp_path / "b", **arrays())
    np.testing.assert_array_equal(one.train.images, two.train.images)


IMAGES = np.zeros((40, 6, 5), dtype=np.uint8)
TEST = {"test_images": IMAGES, "test_labels": np.zeros(40, dtype=int)}
INFINITE = np.full((40, 6, 5), np.inf, dtype=np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": None}, "must have the key images or features, got only labels"),
        ({"labels": None}, "must have the key labels"),
        (
            {"group": np.zeros(40, dtype=int)},
            "the key group would not be read, but is nearly groups; rename it to groups",
        ),
        ({"Client": np.zeros(40, dtype=int)}, "the key Client would not be read, but is nearly clients"),
        ({"sample_weight": np.ones(40)}, "the key sample_weight would not be read, but is nearly weights"),
        ({"images_test": IMAGES}, "the key images_test would not be read, but is nearly test_images"),
        ({"testLabels": np.zeros(40, dtype=int)}, "the key testLabels would not be read, but is nearly test_labels"),
        ({"test_images": IMAGES}, "must have the key test_labels"),
        ({"test_labels": np.zeros(40, dtype=int)}, "must have the key test_images"),
        ({"test_clients": np.zeros(40, dtype=int)}, "must have the keys clients, test_images"),
        ({"images": np.zeros((40, 30), dtype=np.uint8)}, "3 or 4 dimensions"),
        ({"images": np.zeros((40, 2, 6, 5), dtype=np.uint8)}, "must have 1 or 3 channels"),
        ({"images": np.zeros((40, 3, 6, 3), dtype=np.uint8)}, "only one axis of 1 or 3 channels"),
        ({"images": np.zeros((0, 6, 5), dtype=np.uint8), "labels": np.zeros(0, dtype=int)}, "must not be empty"),
        ({"images": IMAGES.astype(np.int64)}, "must be uint8 or floats in [0, 1], got int64"),
        ({"images": IMAGES + 254.5}, "must be in [0, 1] if they are floats, got 254.5"),
        ({"images": IMAGES - 0.5}, "must be in [0, 1] if they are floats, got -0.5"),
        ({"images": INFINITE}, "must be in [0, 1] if they are floats, got inf"),
        ({"images": IMAGES.astype(object)}, "no pickled objects"),
        ({"labels": np.zeros(39, dtype=int)}, "labels must be 40 integers"),
        ({"labels": np.zeros((40, 1), dtype=int)}, "labels must be 40 integers"),
        ({"labels": np.zeros(40)}, "labels must be 40 integers, one per sample, got float64"),
        ({"labels": np.full(40, -1)}, "labels must be 0..K-1, got -1"),
        ({"labels": np.full(40, 2024)}, "got the label 2024"),
        ({"clients": np.zeros(39, dtype=int)}, "clients must be 40 integers or strings"),
        ({"clients": np.zeros(40)}, "clients must be 40 integers or strings"),
        ({"clients": np.array(["a", 1] * 20, dtype=object)}, "no pickled objects"),
        ({"clients": np.arange(40)}, "every client must have 2 or more samples"),
        ({"images": IMAGES[:1], "labels": np.zeros(1, dtype=int)}, "must have 2 or more samples"),
        ({"images": IMAGES[:3], "labels": np.arange(3)}, "must have a class with 2 or more samples"),
        ({**TEST, "test_images": IMAGES[:, :5]}, "test_images must have the shape of images"),
        ({**TEST, "test_labels": np.zeros(4, dtype=int)}, "test_labels must be 40 integers"),
        (
            {**TEST, "clients": np.arange(40) % 2, "test_clients": np.arange(40) % 3},
            "test_clients must occur in clients, got 2",
        ),
        (
            {**TEST, "clients": np.arange(40) % 2, "test_clients": np.array(["0", "1"] * 20)},
            "test_clients must occur in clients",
        ),
        (
            {**TEST, "clients": np.arange(40) % 2, "test_clients": np.zeros(40, dtype=int)},
            "every client must have test data, but client 1 has none",
        ),
    ],
)
def test_bad_contents_are_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        load(tmp_path, **arrays(**changes))
    assert str(tmp_path / "own.npz") in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "folder", "text", "truncated", "npy", "empty"])
def test_files_that_are_no_npz_are_refused(tmp_path, kind):
    path = tmp_path / "own.npz"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("images and labels")
    elif kind == "truncated":
        np.savez(path, **arrays())
        path.write_bytes(path.read_bytes()[:-200])
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "empty":
        path.touch()
    with pytest.raises(DataError, match=r"own\.npz: must be an"):
        load_dataset(f"npz:{path}")


def test_damaged_contents_are_refused(tmp_path):
    """A flipped byte inside an array fails the archive's checksum."""
    path = tmp_path / "own.npz"
    np.savez(path, **arrays(400))
    content = bytearray(path.read_bytes())
    content[3000] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"reading images\.npy failed"):
        load_dataset(f"npz:{path}")
