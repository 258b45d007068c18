"""A client's data: its samples, their normalisation, and the report on samples that are used more than once."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import Compose, Normalize, ToTensor

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.dataset import Dataset, Split
from hyperfl_flwr.data.federated_data import DataSettings, FederatedData, load_federated_data
from hyperfl_flwr.data.partition.assign import assign
from hyperfl_flwr.data.partition.registry import PARTITIONS
from hyperfl_flwr.data.registry import load_dataset

TEST_DATA = os.environ.get("HYPERFL_TEST_DATA")
SETTINGS = DataSettings(
    dataset="digits",
    data_root="",
    num_clients=20,
    partition="similarity",
    seed=0,
    train_samples="auto",
    test_samples="auto",
    iid_fraction=0.2,
    dirichlet_alpha=0.3,
    shards_per_client=2,
    augmentation="auto",
    validation_fraction=0.0,
)


def synthetic(train_per_class, test_per_class, *, channels=3, train_samples=600, test_samples=600):
    """Return a data set of 10 balanced classes with random images 2x2."""
    rng = np.random.default_rng(0)
    splits = []
    for count in (train_per_class, test_per_class):
        labels = rng.permutation(np.repeat(np.arange(10), count))
        images = rng.integers(0, 256, (len(labels), channels, 2, 2)).astype(np.uint8)
        splits.append(Split(images=images, labels=labels))
    return Dataset(
        name="synthetic",
        num_classes=10,
        input_shape=(channels, 2, 2),
        train=splits[0],
        test=splits[1],
        mean=(0.4914, 0.4822, 0.4465)[:channels],
        std=(0.2023, 0.1994, 0.2010)[:channels],
        augment=True,
        train_samples=train_samples,
        test_samples=test_samples,
    )


def federate(settings, dataset):
    name, train, test = assign(settings, dataset)
    return FederatedData(dataset=dataset, partition=name, train=train, test=test)


def own_npz(tmp_path, clients, **more):
    """Write a federation's file, in which all images of client i have the value 10 i; return settings that use it."""
    clients = np.asarray(clients)
    path = tmp_path / "own.npz"
    images = np.zeros((len(clients), 4, 4), dtype=np.uint8) + (10 * clients[:, None, None]).astype(np.uint8)
    np.savez(path, images=images, labels=np.arange(len(clients)) % 2, clients=clients, **more)
    return replace(SETTINGS, dataset=f"npz:{path}", num_clients=len(set(clients.tolist())))


def test_digits_for_20_clients():
    """Each of 20 clients gets n = 51 training and 17 test images, without reuse.

    By hand: class 8 is the scarcest, with 130 training and 44 test images, of which the clients need 2.5333 n.
    """
    data = load_federated_data(SETTINGS)
    train, test = data.label_counts()
    assert set(train.sum(axis=1)) == {51}
    assert set(test.sum(axis=1)) == {17}
    assert (data.num_clients, data.partition) == (20, "similarity")
    assert not data.reuse["train"]["reused"]
    assert not data.reuse["test"]["reused"]
    assert load_federated_data(replace(SETTINGS)) is data


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural"}))
@pytest.mark.parametrize("num_clients", [1, 20, 100])
def test_every_partition_of_digits(name, num_clients):
    """No sample is used twice, labels are as counted, every client has data, and the report is valid JSON."""
    data = federate(replace(SETTINGS, partition=name, num_clients=num_clients), load_dataset("digits"))
    train, test = data.label_counts()
    for part, counts in (("train", train), ("test", test)):
        assert counts.shape == (num_clients, 10)
        assert counts.sum(axis=1).min() >= 1
        assert data.reuse[part]["max_uses"] == 1
        assert data.reuse[part]["draws"] == counts.sum() == data.reuse[part]["distinct"]
        assert json.loads(json.dumps(data.reuse[part])) == data.reuse[part]
    client = data.client(num_clients - 1)
    assert torch.bincount(client.train_labels, minlength=10).tolist() == train[-1].tolist()
    assert torch.bincount(client.test_labels, minlength=10).tolist() == test[-1].tolist()


def test_seeds_and_settings_decide_everything():
    dataset = load_dataset("digits")
    one, same, other = (federate(replace(SETTINGS, seed=seed), dataset) for seed in (0, 0, 1))
    for client in range(20):
        np.testing.assert_array_equal(one.train_indices(client), same.train_indices(client))
        np.testing.assert_array_equal(one.test_indices(client), same.test_indices(client))
    assert any(not np.array_equal(one.train_indices(client), other.train_indices(client)) for client in range(20))


def test_training_data_do_not_depend_on_the_test_size():
    dataset = load_dataset("digits")
    one, other = (federate(replace(SETTINGS, test_samples=size), dataset) for size in ("auto", 5))
    for client in range(20):
        np.testing.assert_array_equal(one.train_indices(client), other.train_indices(client))


def test_reuse_in_the_papers_setting():
    """The report gives the reuse for Fashion-MNIST's sizes and 100 clients with 600 training and 300 test samples.

    By hand: class 0 is dominant for 40 clients, class 1 for 20. Test samples: 40 * 80 + 100 * 6 = 3,800 and
    20 * 80 + 600 = 2,200 draws of 1,000. Training samples: 40 * 160 + 100 * 12 = 7,600 and 20 * 160 + 1,200 = 4,400
    draws of 6,000.
    """
    settings = replace(SETTINGS, num_clients=100, train_samples=600, test_samples=300)
    data = federate(settings, synthetic(6000, 1000, channels=1))
    train, test = data.reuse["train"], data.reuse["test"]
    assert train["per_class"]["draws"] == [7600, 4400] * 5
    assert train["per_class"]["max_uses"] == [2, 1] * 5
    assert train["largest_ratio"] == pytest.approx(7600 / 6000, abs=1e-4)
    assert train["distinct"] == 5 * 6000 + 5 * 4400
    assert test["per_class"]["draws"] == [3800, 2200] * 5
    assert test["largest_ratio"] == 3.8
    assert (test["draws"], test["distinct"], test["available"]) == (30_000, 10_000, 10_000)


def test_copies_of_a_sample_are_refused_where_noise_protects_single_records():
    """The partition that noise for single records does not cover gives its clients copies; a smaller one does not."""
    settings = replace(SETTINGS, partition="dirichlet", train_samples=600, num_clients=10)
    data = load_federated_data(settings)
    assert any(len(np.unique(data.train_indices(client))) < 600 for client in range(10))
    with pytest.raises(DataError, match=r"data.train-samples must be small enough .* among its 600; set"):
        load_federated_data(replace(settings, distinct=True))
    assert load_federated_data(replace(settings, distinct=True, train_samples="auto")).num_clients == 10


@pytest.mark.parametrize(
    ("changes", "distinct"),
    [({}, False), ({"dp.epsilon": 4.0}, True), ({"method": "it-pfl", "novel.epsilons": "none,1"}, True)],
)
def test_settings_with_noise_for_single_records_ask_for_distinct_samples(changes, distinct):
    method = {"method": "fedavg"} | changes
    config = RunConfig.from_flat(default_settings(method["method"]) | method)
    assert config.data_settings().distinct is distinct


def test_automatic_sizes_stop_at_the_recommended_ones():
    """With enough data, 20 clients get the paper's sizes, 600 and 300; shards use all data, 3,000 per client."""
    dataset = synthetic(6000, 1000, test_samples=300)
    for name in ("similarity", "iid"):
        train, test = federate(replace(SETTINGS, partition=name), dataset).label_counts()
        assert set(train.sum(axis=1)) == {600}
        assert set(test.sum(axis=1)) == {300}
    train, _ = federate(replace(SETTINGS, partition="shards"), dataset).label_counts()
    assert set(train.sum(axis=1)) == {3000}


def test_images_are_normalised_like_torchvision():
    """A client's images equal those of ToTensor and Normalize, image by image."""
    dataset = synthetic(20, 20)
    data = federate(replace(SETTINGS, num_clients=3), dataset)
    client = data.client(2)
    transform = Compose([ToTensor(), Normalize(dataset.mean, dataset.std)])
    for split, indices, images, labels in (
        (dataset.train, data.train_indices(2), client.train_images, client.train_labels),
        (dataset.test, data.test_indices(2), client.test_images, client.test_labels),
    ):
        expected = torch.stack([transform(split.images[index].transpose(1, 2, 0)) for index in indices])
        torch.testing.assert_close(images, expected)
        assert images.dtype == torch.float32
        assert labels.tolist() == split.labels[indices].tolist()
        assert labels.dtype == torch.int64


def test_clients_move_to_a_type_and_device():
    client = load_federated_data(SETTINGS).client(0)
    moved = client.to("cpu", torch.float64)
    assert moved.train_images.dtype == moved.test_images.dtype == torch.float64
    assert moved.train_labels.dtype == torch.int64
    torch.testing.assert_close(moved.train_images.float(), client.train_images)
    assert client.to("cpu").train_images is client.train_images
    assert client.augmentation is None


def test_tensors_of_the_last_clients_are_kept(monkeypatch):
    """A client that is asked for again is not made again, while the limit allows it; equal tensors otherwise."""
    data = federate(SETTINGS, load_dataset("digits"))
    first = data.client(0)
    assert data.client(0) is first
    monkeypatch.setattr("hyperfl_flwr.data.federated_data.CACHED_BYTES", first.num_bytes + data.client(1).num_bytes)
    assert data.client(1) is data.client(1)
    assert data.client(0) is first
    data.client(2)  # 1 was asked for least recently
    assert data.client(0) is first
    monkeypatch.setattr("hyperfl_flwr.data.federated_data.CACHED_BYTES", 0)
    again = data.client(0)
    assert data.client(0) is not again
    assert torch.equal(data.client(0).train_images, first.train_images)


@pytest.mark.parametrize("client", [-1, 20])
def test_unknown_clients_are_refused(client):
    with pytest.raises(IndexError, match=re.escape(f"client must be in 0..19, got {client}")):
        load_federated_data(SETTINGS).client(client)


@pytest.mark.parametrize("asked", ["similarity", "natural"])
def test_own_data_with_client_ids_are_partitioned_naturally(tmp_path, asked):
    """A quarter of the 8, 4 and 12 images of the three clients becomes test data: 2, 1 and 3."""
    settings = own_npz(tmp_path, [5] * 8 + [2] * 4 + [9] * 12)
    data = load_federated_data(replace(settings, partition=asked))
    assert data.partition == "natural"
    train, test = data.label_counts()
    assert train.sum(axis=1).tolist() == [3, 6, 9]
    assert test.sum(axis=1).tolist() == [1, 2, 3]
    for client, value in enumerate([20, 50, 90]):
        for split, indices in (
            (data.dataset.train, data.train_indices(client)),
            (data.dataset.test, data.test_indices(client)),
        ):
            assert (split.images[indices] == value).all()


def test_natural_clients_share_out_a_common_test_pool(tmp_path):
    """Without test_clients, two equal clients share a test pool of 4 images per class: each gets 2 per class."""
    test = {"test_images": np.zeros((8, 4, 4), dtype=np.uint8), "test_labels": np.arange(8) % 2}
    data = load_federated_data(own_npz(tmp_path, [0] * 8 + [1] * 8, **test))
    assert data.label_counts()[1].tolist() == [[2, 2], [2, 2]]
    assert not data.reuse["test"]["reused"]


def test_the_number_of_clients_must_be_the_number_of_ids(tmp_path):
    settings = replace(own_npz(tmp_path, [0, 1, 2] * 4), num_clients=20)
    with pytest.raises(DataError, match=r"which is 3, got 20; set num-clients to 3"):
        load_federated_data(settings)


def test_natural_needs_client_ids():
    with pytest.raises(DataError, match="natural needs a data set with client ids, but digits has none"):
        load_federated_data(replace(SETTINGS, partition="natural"))


def test_nan_stays_with_its_client(tmp_path):
    images = np.random.default_rng(0).random((24, 4, 4)).astype(np.float32)
    images[:8] = np.nan
    path = tmp_path / "nan.npz"
    np.savez(path, images=images, labels=np.arange(24) % 2, clients=np.repeat([0, 1, 2], 8))
    data = load_federated_data(replace(SETTINGS, dataset=f"npz:{path}", num_clients=3))
    assert data.client(0).train_images.isnan().all()
    assert not data.client(1).train_images.isnan().any()
    together = torch.cat([data.client(1).train_images, data.client(2).train_images])
    assert together.mean().item() == pytest.approx(0, abs=1e-5)
    assert together.std(correction=0).item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition": "random"}, "data.partition must be one of similarity, iid"),
        ({"num_clients": 0}, "num-clients must be at least 1, got 0"),
        ({"train_samples": 0}, "data.train-samples must be at least 1"),
        ({"test_samples": -3}, "data.test-samples must be at least 1, got -3"),
        ({"iid_fraction": 1.5}, "data.iid-fraction must be between 0 and 1, got 1.5"),
        ({"iid_fraction": float("nan")}, "data.iid-fraction"),
        ({"dirichlet_alpha": 0.0}, "data.dirichlet-alpha must be a number above 0"),
        ({"shards_per_client": 0}, "data.shards-per-client must be at least 1"),
        ({"num_clients": 1348}, "num-clients must be at most the number of training samples 1347, got 1348"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(DataError, match=re.escape(message)):
        load_federated_data(replace(SETTINGS, **changes))


def test_the_border_is_black_after_normalisation():
    """Images are padded with black, which is (0 - mean) / std after normalisation."""
    client = federate(replace(SETTINGS, num_clients=3), synthetic(20, 20)).client(0)
    assert client.augmentation.pad_value == pytest.approx([-0.4914 / 0.2023, -0.4822 / 0.1994, -0.4465 / 0.2010])
    assert (client.augmentation.padding, client.augmentation.flip) == (4, True)


@pytest.mark.skipif(
    TEST_DATA is None, reason="set HYPERFL_TEST_DATA to a torchvision data root to test with the real files"
)
def test_real_cifar10_in_the_papers_setting(monkeypatch, tmp_path):
    """20 clients get 600 and 300 images without reuse; client 0 has 172 and 86 images of class 0."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = load_federated_data(replace(SETTINGS, dataset="cifar10", data_root=str(Path(TEST_DATA))))
    train, test = data.label_counts()
    assert train[0].tolist() == [172] * 3 + [12] * 7
    assert test[0].tolist() == [86] * 3 + [6] * 7
    assert not data.reuse["train"]["reused"]
    client = data.client(19)
    assert client.train_images.shape == (600, 3, 32, 32)
    drawn = client.augmentation.draw([50], np.random.default_rng(0))
    augmented = client.augmentation(client.train_images[:50], drawn)
    assert augmented.shape == (50, 3, 32, 32)
