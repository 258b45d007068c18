"""The settings `class-weights` and `sample-weights`: what training has more often, for every method."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import of_every_method, small_settings
from torch.nn import functional

from clients.engine.node_checks import checks_of
from clients.novel.joining import JoiningNode
from hyperfl_flwr.app.node import NodeApp
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError, DataError, RefusalError, RunFailedError
from hyperfl_flwr.data.dataset import Split
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_weights import Weighting
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.protocol.queries import JoiningStep
from hyperfl_flwr.training.local_sgd import batches
from hyperfl_flwr.training.weighted_order import weighted_order

ONE_CLASS = ",".join("1" if number == 0 else "0" for number in range(10))


def data_of(tmp_path, settings=None, **content):
    """Return the data of a file with 40 samples of 4 classes in turn, of one client unless `settings` say otherwise."""
    rng = np.random.default_rng(0)
    samples = {"images": rng.integers(0, 256, (40, 6, 5)).astype(np.uint8), "labels": np.arange(40) % 4}
    np.savez(tmp_path / "own.npz", **samples | content)
    chosen = {"dataset": f"npz:{tmp_path / 'own.npz'}", "num-clients": 1, "data.partition": "iid"} | (settings or {})
    return load_federated_data(RunConfig.from_flat(default_settings() | chosen).data_settings())


@of_every_method
def test_a_method_learns_the_only_class_that_has_a_weight(method, federate):
    """Networks that were trained on samples of class 0 alone name it for every sample."""
    settings = {"data.partition": "iid", "local-epochs": 5, "learning-rate": 0.05, "class-weights": ONE_CLASS}
    run = federate(method, 1, num_rounds=2, **settings)
    config = RunConfig.from_flat(small_settings(method=method, **settings))
    counts = load_federated_data(config.data_settings()).label_counts()[1][: config.num_clients]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["test_accuracy"] == pytest.approx((counts[:, 0] / counts.sum(axis=1)).mean())


def test_equal_weights_change_nothing(federate):
    plain, equal = federate("fedavg"), federate("fedavg", class_weights=",".join(["3"] * 10))
    one, two = (json.loads((run / "summary.json").read_text()) for run in (plain, equal))
    assert one["test_accuracy_per_client"] == two["test_accuracy_per_client"]
    assert (plain / "metrics.jsonl").read_text().count("\n") == (equal / "metrics.jsonl").read_text().count("\n")


@pytest.mark.parametrize("seed", range(20))
def test_a_pass_has_each_sample_as_often_as_its_weight_says(seed):
    rng = np.random.default_rng(seed)
    weights = rng.choice([0.0, 0.5, 1.0, 7.0], 60)
    order = weighted_order(weights, rng)
    expected = 60 * weights / weights.sum()
    counts = np.bincount(order, minlength=60)
    assert len(order) == 60
    assert (np.floor(expected) <= counts).all()
    assert (counts <= np.ceil(expected)).all()
    for weight in np.unique(weights):  # so do all samples of one weight together
        of_weight = weights == weight
        assert abs(counts[of_weight].sum() - expected[of_weight].sum()) < 1


def test_passes_have_the_right_frequencies_on_average():
    rng, weights = np.random.default_rng(0), np.array([1.0, 2.5, 0.3, 1.7])
    counts = sum(np.bincount(weighted_order(weights, rng), minlength=4) for _ in range(4000))
    np.testing.assert_allclose(counts / 4000, 4 * weights / weights.sum(), atol=0.03)


@pytest.mark.parametrize("largest", [1e-320, 1e-300, 1.0, 1e300, 1.7e308])
def test_weights_near_the_limits_of_float64_count_like_others(largest):
    """Their sum would overflow, or their products vanish."""
    weights = np.array([1.0, 1.0, 0.5, 0.25]) * largest
    counts = sum(np.bincount(weighted_order(weights, np.random.default_rng(seed)), minlength=4) for seed in range(500))
    np.testing.assert_allclose(counts / 500, 4 * np.array([1.0, 1.0, 0.5, 0.25]) / 2.75, atol=0.1)
    split = Split(
        images=np.zeros((4, 1)), labels=np.array([0, 0, 1, 1]), weights=np.array([1.0, 0.5, 1.0, 0.5]) * largest
    )
    found = Weighting(classes=f"{largest},{largest}").of_client(split, np.arange(4), 2)
    np.testing.assert_allclose(found / found.max(), [1, 0.5, 1, 0.5], rtol=1e-2)
    balanced = Weighting(classes="balanced").of_client(split, np.arange(4), 2)
    np.testing.assert_allclose(balanced, np.array([2, 1, 2, 1]) / 3, rtol=1e-2)


def test_equal_weights_have_each_sample_once():
    for seed in range(50):
        order = weighted_order(np.full(33, 0.1), np.random.default_rng(seed))
        np.testing.assert_array_equal(np.sort(order), np.arange(33))


def test_the_gradient_of_a_pass_is_that_of_the_weighted_loss(tmp_path):
    """With weights whose expected numbers are whole, each pass has exactly these numbers."""
    federated = data_of(tmp_path, labels=np.arange(40) % 2, settings={"class-weights": "1,3"})
    data = federated.client(0)
    layer = torch.nn.Linear(30, 2).double()

    def gradient(loss):
        return torch.autograd.grad(loss, layer.weight)[0]

    inputs, labels = data.train_images.flatten(1).double(), data.train_labels
    classes = torch.tensor([1.0, 3.0], dtype=torch.float64)
    wanted = gradient(functional.cross_entropy(layer(inputs), labels, weight=classes))
    drawn = [gradient_of(layer, data, np.random.default_rng(seed)) for seed in range(400)]
    assert len(labels) == 30
    torch.testing.assert_close(torch.stack(drawn).mean(dim=0), wanted, atol=0.01, rtol=0.05)


def gradient_of(layer, data, rng):
    """Return the mean gradient of a pass."""
    ((images, labels),) = batches(data, len(data.train_labels), rng)
    loss = functional.cross_entropy(layer(images.flatten(1).double()), labels)
    return torch.autograd.grad(loss, layer.weight)[0]


@pytest.mark.parametrize("content", [{}, {"weights": np.linspace(0.5, 2, 40)}])
def test_balanced_classes_have_the_same_total(tmp_path, content):
    labels = np.repeat([0, 1, 2], [24, 12, 4])
    for client in (0, 1):
        settings = {"class-weights": "balanced", "num-clients": 2}
        data = data_of(tmp_path, labels=labels, settings=settings, **content).client(client)
        totals = np.bincount(data.train_labels.numpy(), weights=data.train_weights)
        assert totals[totals > 0] == pytest.approx(1)


def test_weights_of_samples_and_classes_are_multiplied(tmp_path):
    weights = np.linspace(0, 2, 40)
    federated = data_of(tmp_path, weights=weights, settings={"class-weights": "1,1,5,1"})
    dataset, indices = federated.dataset, federated.train_indices(0)
    assert dataset.test.weights is not None  # of the same file; nothing reads them
    wanted = dataset.train.weights[indices] * np.array([1, 1, 5, 1])[dataset.train.labels[indices]]
    found = federated.client(0).train_weights
    np.testing.assert_allclose(found / found.max(), wanted / wanted.max())
    assert set(dataset.train.weights) <= set(weights)


def test_weights_of_a_file_are_used_unless_they_are_switched_off(tmp_path):
    weights = np.arange(40) + 1
    assert data_of(tmp_path, weights=weights).client(0).train_weights is not None
    assert data_of(tmp_path, weights=weights, settings={"sample-weights": "none"}).client(0).train_weights is None
    assert data_of(tmp_path, weights=np.full(40, 7)).client(0).train_weights is None
    assert data_of(tmp_path).client(0).train_weights is None


def test_held_back_samples_take_their_weights_along(tmp_path):
    data = data_of(tmp_path, weights=np.arange(40) + 1).client(0)
    kept = data.with_training(torch.tensor([3, 1, 4]))
    np.testing.assert_array_equal(kept.train_weights, data.train_weights[[3, 1, 4]])
    assert torch.equal(kept.train_labels, data.train_labels[[3, 1, 4]])
    one = np.zeros(len(data.train_labels))
    one[0] = 1
    with pytest.raises(DataError, match="no sample that is trained on has a weight above 0"):
        replace(data, train_weights=one).with_training(torch.tensor([1, 2]))
    assert replace(data, train_weights=None).with_training(torch.tensor([0])).train_weights is None


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (np.ones(39), "must be 40 numbers, one per training sample"),
        (np.ones((40, 1)), "must be 40 numbers"),
        (np.array(["1"] * 40), "must be 40 numbers"),
        (np.full(40, -1.0), "finite and at least 0, 40 of 40 are not"),
        (np.array([np.nan] + [1.0] * 39), "finite and at least 0, 1 of 40 are not"),
        (np.array([np.inf] + [1.0] * 39), "finite and at least 0"),
        (np.zeros(40), "must not all be 0"),
    ],
)
def test_wrong_weights_of_a_file_are_refused(tmp_path, weights, text):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 6, 5)).astype(np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(40) % 4, weights=weights)
    with pytest.raises(DataError, match=text):
        load_dataset(f"npz:{tmp_path / 'own.npz'}")


@pytest.mark.parametrize("text", ["", "heavy", "1,-1", "1,nan", "1,inf", "0,0", "1;2", "1,,2"])
def test_wrong_class_weights_are_refused(text):
    with pytest.raises(ConfigError, match="class-weights must be none, balanced, or a number of at least 0"):
        RunConfig.from_flat(default_settings() | {"class-weights": text})


@pytest.mark.parametrize("text", ["1,2", ",".join("1" * 11)])
def test_class_weights_need_a_number_for_each_class(text, federate):
    with pytest.raises(RunFailedError, match=f"must have a number for each of the 10 classes, got {text}"):
        federate("fedavg", class_weights=text)


def test_a_client_without_a_sample_of_positive_weight_is_refused():
    split = Split(images=np.zeros((3, 1)), labels=np.array([0, 1, 1]))
    weighting = Weighting(classes="1,0")
    assert weighting.of_client(split, np.array([0, 1]), 2).tolist() == [1, 0]
    with pytest.raises(DataError, match="a sample with a weight above 0"):
        weighting.of_client(split, np.array([1, 2]), 2)


def test_noisy_steps_refuse_weights(tmp_path):
    private = default_settings() | {"method": "fedavg", "dp.epsilon": 1.0}
    with pytest.raises(ConfigError, match=r"class-weights must be none with dp\.epsilon above 0"):
        RunConfig.from_flat(private | {"class-weights": "balanced"})
    given = {"method": "fedavg", "dp.epsilon": 1.0}
    with pytest.raises(DataError, match=r"must not have weights .* sample-weights=none"):
        data_of(tmp_path, weights=np.arange(40) + 1, settings=given)
    ignored = data_of(tmp_path, weights=np.arange(40) + 1, settings=given | {"sample-weights": "none"})
    assert ignored.client(0).train_weights is None


@pytest.mark.parametrize("text", ["1,0,1,1", "1,1,1,11"])
def test_a_node_with_an_owner_refuses_weights_that_single_out_a_class(tmp_path, text):
    data_of(tmp_path)
    own = {"data": f"npz:{tmp_path / 'own.npz'}", "num-partitions": 1, "partition-id": 0, "state-dir": str(tmp_path)}
    settings = default_settings() | {"method": "fedavg", "num-clients": 1}
    with pytest.raises(RefusalError, match="must not differ by more than a factor of 10 on"):
        NodeApp(NodeConfig.of(own), settings | {"class-weights": text}).data()
    data = NodeApp(NodeConfig.of(own), settings | {"class-weights": "1,1,1,10"}).data()
    assert set(data.client(0).train_weights) == {0.1, 1}


def test_a_node_that_joins_refuses_them_too(tmp_path):
    """The settings of a joining step are the server's."""
    data_of(tmp_path)
    recipe = TargetRecipe(target="mlp", input_shape=(1, 6, 5), mean=(0.5,), std=(0.5,), classes=("0", "1", "2", "3"))
    text = json.dumps(default_settings() | {"method": "pfedhn", "class-weights": "0,0,0,1"})
    own = {"join-data": f"npz:{tmp_path / 'own.npz'}", "novel-output": str(tmp_path / "out"), "device": "cpu"}
    joining = JoiningNode.of(NodeConfig.of(own | {"partition-id": 0, "num-partitions": 1}))
    with pytest.raises(RefusalError, match="must not differ by more than a factor of 10"):
        joining._member(JoiningStep(settings=text, number=1, is_last=False), recipe, checks_of(joining.node, print))
