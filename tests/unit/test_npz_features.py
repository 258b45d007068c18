"""Feature vectors in a user's `.npz` file: standardisation, partition, and one clear error for bad contents."""

import re

import numpy as np
import pytest
from test_npz import load

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.federated_data import load_federated_data


def vectors(count=40, length=7, **changes):
    """Return a valid file's contents: `count` vectors with features of very different sizes, the last one constant."""
    rng = np.random.default_rng(1)
    features = (rng.standard_normal((count, length)) + 5) * np.logspace(-9, 6, length)
    features[:, -1] = 1e9
    content = {"features": features, "labels": np.arange(count) % 4, **changes}
    return {key: value for key, value in content.items() if value is not None}


def shared_out(dataset, num_clients):
    """Partition a data set evenly, or by its client ids if it has any."""
    changes = {"dataset": dataset.name, "num-clients": num_clients, "data.partition": "iid"}
    return load_federated_data(RunConfig.from_flat(default_settings() | changes).data_settings())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_features_are_standardised_by_the_training_samples(tmp_path, dtype):
    """Each feature, however small, gets mean 0 and standard deviation 1; a constant one is shifted but not scaled."""
    dataset = load(tmp_path, **vectors(features=vectors()["features"].astype(dtype)))
    assert (dataset.num_classes, dataset.input_shape, dataset.augment) == (4, (7,), False)
    assert (len(dataset.train), len(dataset.test)) == (32, 8)
    assert dataset.train.images.dtype == np.float32
    federated = shared_out(dataset, 2)
    train = np.concatenate([federated.client(number).train_images for number in range(2)]).astype(np.float64)
    assert train.shape == (32, 7)
    spread = dataset.train.images.std(axis=0, dtype=np.float64)
    np.testing.assert_allclose(dataset.mean, dataset.train.images.mean(axis=0, dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(dataset.std, [*spread[:-1], 1], rtol=1e-6)
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(train.std(axis=0), [1] * 6 + [0], atol=1e-5)


def test_features_of_clients_are_a_natural_federation(tmp_path):
    """Each client has the training and test vectors of its id, unchanged except for the normalisation."""
    content = vectors(clients=np.array(["b", "a", "a", "c"] * 10))
    content |= {f"test_{key}": value[:8] for key, value in content.items()}
    dataset = load(tmp_path, **content)
    assert dataset.client_ids == ("a", "b", "c")
    data = shared_out(dataset, 3)
    assert data.partition == "natural"
    for number, rows in enumerate(([1, 2], [0], [3])):
        own, chosen = data.client(number), np.isin(np.arange(40) % 4, rows)
        features = content["features"].astype(np.float32)
        expected = (features - np.float32(dataset.mean)) / np.float32(dataset.std)
        np.testing.assert_allclose(own.train_images, expected[chosen], rtol=1e-6)
        np.testing.assert_allclose(own.test_images, expected[:8][chosen[:8]], rtol=1e-6)


VECTORS = np.zeros((40, 7), dtype=np.float32)
BROKEN = np.where(np.arange(40)[:, None] % 20 == 3, np.nan, VECTORS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": BROKEN}, "must be finite float32 numbers, but 2 of 40 vectors are not, the first is number 3"),
        ({"features": VECTORS + np.inf}, "must be finite float32 numbers, but 40 of 40 vectors are not"),
        ({"features": VECTORS.astype(float) + 1e300}, "must be finite float32 numbers, but 40 of 40 vectors are not"),
        ({"features": VECTORS.astype(np.int64)}, "features must be floats, got int64"),
        ({"features": VECTORS.astype(object)}, "no pickled objects"),
        ({"features": VECTORS[:, 0]}, "features must be vectors [n, D], got the shape (40,)"),
        ({"features": VECTORS[:, None]}, "features must be vectors [n, D], got the shape (40, 1, 7); store images"),
        ({"features": VECTORS[:, :0]}, "features must be vectors [n, D], got the shape (40, 0)"),
        ({"features": VECTORS[:39]}, "labels must be 39 integers, one per sample"),
        ({"images": np.zeros((40, 6, 5))}, "must have either images or features, got images and features"),
        ({"test_images": np.zeros((40, 6, 5))}, "must have either images or features, got features and test_images"),
        ({"test_features": VECTORS}, "must have the key test_labels"),
        ({"test_labels": np.zeros(4, dtype=int)}, "must have the key test_features"),
        (
            {"test_features": VECTORS[:, :6], "test_labels": np.zeros(40, dtype=int)},
            "test_features must have the shape of features, got lengths 6 and 7",
        ),
    ],
)
def test_bad_features_are_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        load(tmp_path, **vectors(**changes))
    assert str(tmp_path / "own.npz") in str(caught.value)
