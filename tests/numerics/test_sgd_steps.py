"""Local epochs of SGD, and FedAvg, against autograd gradients and a written-out optimiser."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from plain import Samples, Sgd, cross_entropy, digits_cnn, leaves, random_samples

from clients.engine.context import ClientContext
from clients.fedavg import FedAvgClient
from hyperfl_flwr.app import client as client_app
from hyperfl_flwr.app import server as server_app
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import ClientData, load_federated_data
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, batches, train_epochs


def settings(changes):
    return default_settings() | {"method": "fedavg", "device": "cpu"} | changes


def fedavg_loss(values, images, labels):
    features = digits_cnn(images, {name.removeprefix("extractor."): value for name, value in values.items()})
    return cross_entropy(features @ values["classifier.weight"].T + values["classifier.bias"], labels)


def fit_fedavg(data, rate, tmp_path, changes):
    """Return (initial values, values after one round of FedAvg's client, its reported numbers)."""
    config = RunConfig.from_flat(settings({"learning-rate": rate} | changes))
    context = ClientContext(
        config=config,
        client=0,
        data=data,
        device=torch.device("cpu"),
        state=PrivateState(tmp_path, "experiment", 0),
    )
    values = ordinary_parameters(build_target("cnn", (1, 8, 8), 10), torch_generator(0, "model"))
    client = FedAvgClient(context)
    names = [key.removeprefix("model/") for key in list(client.keys())]
    arrays, num_examples, metrics = client.fit(
        [values[name].numpy().copy() for name in names], {"round": 1, "version": 0, "kept-version": 0}
    )
    assert num_examples == len(data.train_labels)
    return values, {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}, metrics


def client_data(num):
    train, test = random_samples(num, (1, 8, 8), 10), random_samples(7, (1, 8, 8), 10, seed=1)
    return ClientData(
        train_images=train.train_images,
        train_labels=train.train_labels,
        test_images=test.train_images,
        test_labels=test.train_labels,
        augmentation=None,
        num_classes=10,
    )


@pytest.mark.usefixtures("float64")
def test_fedavg_with_one_full_batch_is_one_step_of_gradient_descent(tmp_path):
    """The result is w - rate * grad, by autograd with torch.nn.functional; the reported loss is before the step."""
    data = client_data(30)
    values, trained, metrics = fit_fedavg(
        data, 0.1, tmp_path, {"batch-size": 30, "local-epochs": 1, "momentum": 0.0, "weight-decay": 0.0}
    )
    names = list(values)
    start = leaves(values, names)
    loss = fedavg_loss(start, data.train_images, data.train_labels)
    gradients = torch.autograd.grad(loss, [start[name] for name in names])
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(trained[name], values[name] - 0.1 * gradient, rtol=0, atol=1e-13)
    assert metrics["train-loss"] == pytest.approx(float(loss.detach()), rel=1e-12)


@pytest.mark.usefixtures("float64")
def test_fedavg_with_momentum_and_weight_decay_is_the_recursion(tmp_path):
    """Six full-batch steps (independent of the sample order) equal b <- .5 b + g + w p, p <- p - rate b.

    The reported loss is that of the last pass, before its step; `personalized` is measured after
    all six, `aggregate` before.
    """
    data = client_data(30)
    changes = {"batch-size": 30, "local-epochs": 6, "momentum": 0.5, "weight-decay": 0.02}
    values, trained, metrics = fit_fedavg(data, 0.1, tmp_path, changes)
    names = list(values)
    optimiser, expected = Sgd(0.1, momentum=0.5, weight_decay=0.02), values
    for _ in range(6):
        expected = leaves(expected, names)
        loss = fedavg_loss(expected, data.train_images, data.train_labels)
        expected = optimiser.step(expected, loss, names)
    for name in names:
        torch.testing.assert_close(trained[name], expected[name], rtol=0, atol=1e-12)
    assert metrics["train-loss"] == pytest.approx(float(loss.detach()), rel=1e-12)
    for kind, weights in (("aggregate", values), ("personalized", expected)):
        loss = fedavg_loss(weights, data.test_images, data.test_labels)
        assert metrics[f"{kind}-loss"] == pytest.approx(float(loss), rel=1e-11)


def linear_problem(num=23):
    """Return (data, weights [4, 6] of softmax regression, predict)."""
    data = random_samples(num, (1, 2, 3), 4)
    weights = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return data, weights, lambda images: images.flatten(1) @ weights.T


def test_every_pass_is_a_permutation_with_a_short_last_batch():
    """23 samples in batches of 5, 5, 5, 5 and 3: each sample once a pass, in a different order every pass."""
    data, weights, predict = linear_problem()
    weights.requires_grad_(True)
    part = ParameterSet(parameters=[weights], learning_rate=0.1)
    train_epochs(predict, [part], data, Epochs(epochs=3, batch_size=5), np.random.default_rng(0))
    assert [len(index) for index in data.seen] == [5, 5, 5, 5, 3] * 3
    orders = [torch.cat(data.seen[5 * number : 5 * number + 5]).tolist() for number in range(3)]
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_batches_keep_images_and_labels_together():
    """Each image holds its number, and its label in the batch is that number modulo 10."""
    numbers = torch.arange(31)
    data = Samples(numbers.to(torch.float64).reshape(31, 1, 1, 1), numbers % 10)
    pairs = [(images.flatten(), labels) for images, labels in batches(data, 8, np.random.default_rng(1))]
    assert [len(labels) for _, labels in pairs] == [8, 8, 8, 7]
    for images, labels in pairs:
        assert torch.equal(images.long() % 10, labels)


def test_softmax_regression_by_numpy():
    """Three passes equal numpy with gradient (softmax - onehot)^T x / n, momentum .9, decay .1 and short last batches.

    The loss returned is the mean over the SAMPLES of the last pass, each batch before its step.
    """
    data, weights, predict = linear_problem()
    expected, buffer = weights.numpy().copy(), np.zeros((4, 6))
    weights.requires_grad_(True)
    part = ParameterSet(parameters=[weights], learning_rate=0.2)
    epochs = Epochs(epochs=3, batch_size=5, momentum=0.9, weight_decay=0.1)
    loss = train_epochs(predict, [part], data, epochs, np.random.default_rng(0))
    total = 0.0
    for number, (images, labels) in enumerate(data.batches(data.seen)):
        x, y = images.flatten(1).numpy(), labels.numpy()
        exponentials = np.exp(x @ expected.T)
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        if number >= 10:
            total -= np.log(probabilities[np.arange(len(y)), y]).sum()
        probabilities[np.arange(len(y)), y] -= 1
        buffer = 0.9 * buffer + probabilities.T @ x / len(y) + 0.1 * expected
        expected = expected - 0.2 * buffer
    np.testing.assert_allclose(weights.detach().numpy(), expected, rtol=0, atol=1e-13)
    assert loss == pytest.approx(total / 23, rel=1e-12)


def one_step(predict, sets, data, weight_decay=0.0):
    before = [value.detach().clone() for part in sets for value in part.parameters]
    epochs = Epochs(epochs=1, batch_size=len(data.train_labels), weight_decay=weight_decay)
    train_epochs(predict, sets, data, epochs, np.random.default_rng(0))
    after = [value.detach() for part in sets for value in part.parameters]
    return [old - new for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize("clip", [0.0, 0.01, 0.3, 100.0])
def test_clipping_bounds_the_joint_norm_of_a_set(clip):
    """A step with rate 1 is g min(1, clip / |g|), |g| over both tensors of the set; with clip 0 it is g."""
    data = random_samples(20, (1, 2, 3), 4)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)

    def predict(images):
        return images.flatten(1) @ weight.T + bias

    gradients = torch.autograd.grad(cross_entropy(predict(data.train_images), data.train_labels), [weight, bias])
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert 0.3 < norm < 100
    moved = one_step(predict, [ParameterSet(parameters=[weight, bias], learning_rate=1.0, clip_norm=clip)], data)
    scale = min(1.0, clip / norm) if clip else 1.0
    for step, gradient in zip(moved, gradients, strict=True):
        torch.testing.assert_close(step, scale * gradient, rtol=1e-5, atol=1e-12)
    if 0 < clip < norm:
        assert math.hypot(*(float(step.norm()) for step in moved)) == pytest.approx(clip, rel=1e-5)


def test_sets_are_clipped_apart_and_have_their_own_rates():
    """Both sets exceed their bounds, so they move by rate times bound, 2 * 0.01 and 3 * 0.02."""
    data = random_samples(20, (1, 2, 3), 4)
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    sets = [
        ParameterSet(parameters=[weight], learning_rate=2.0, clip_norm=0.01),
        ParameterSet(parameters=[bias], learning_rate=3.0, clip_norm=0.02),
    ]
    moved = one_step(lambda images: images.flatten(1) @ weight.T + bias, sets, data)
    assert float(moved[0].norm()) == pytest.approx(0.02, rel=1e-4)
    assert float(moved[1].norm()) == pytest.approx(0.06, rel=1e-4)


def test_weight_decay_is_added_after_clipping():
    """With a clip of 1e-9 only weight decay remains: the step is rate * 0.25 * w, larger than the clip."""
    data, weights, predict = linear_problem()
    before = weights.clone()
    weights.requires_grad_(True)
    part = ParameterSet(parameters=[weights], learning_rate=0.5, clip_norm=1e-9)
    (moved,) = one_step(predict, [part], data, weight_decay=0.25)
    torch.testing.assert_close(moved, 0.125 * before, rtol=0, atol=1e-8)


def unequal_federation(tmp_path):
    """Write and return a data file of two clients with 12 and 36 training images of 8x8."""
    rng = np.random.default_rng(0)
    clients, test_clients = np.repeat([0, 1], [12, 36]), np.repeat([0, 1], [5, 5])
    path = tmp_path / "two.npz"
    np.savez(
        path,
        images=rng.random((48, 8, 8)).astype(np.float32),
        labels=np.arange(48) % 10,
        clients=clients,
        test_images=rng.random((10, 8, 8)).astype(np.float32),
        test_labels=np.arange(10),
        test_clients=test_clients,
    )
    return path


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_fedavg_averages_by_numbers_of_samples(num_nodes, tmp_path):
    """The result is sum_i n_i w_i / sum_i n_i, n = (12, 36), w_i one autograd gradient step from the common start.

    float32 all the way: 1e-6 of the weights. The plain mean of the two is more than ten times further away.
    """
    changes = {
        "dataset": f"npz:{unequal_federation(tmp_path)}",
        "data.partition": "natural",
        "num-clients": 2,
        "num-rounds": 1,
        "local-epochs": 1,
        "batch-size": 48,
        "learning-rate": 0.5,
        "momentum": 0.0,
        "weight-decay": 0.0,
        "output": str(tmp_path / "run"),
    }
    config = RunConfig.from_flat(settings(changes))
    grid = InProcessGrid(client_app.app, num_nodes, config.flat(), {"simulated": True})
    averaged, _ = read_arrays(server_app.run(grid, config) / "checkpoints" / "round-000001.npz")
    values = ordinary_parameters(build_target("cnn", (1, 8, 8), 10), torch_generator(0, "model"))
    names, models = list(values), []
    federation = load_federated_data(replace(config.data_settings()))
    for client in (0, 1):
        data = federation.client(client)
        start = leaves(values, names)
        loss = fedavg_loss(start, data.train_images, data.train_labels)
        models.append(Sgd(0.5).step(start, loss, names))
        assert len(data.train_labels) == (12, 36)[client]
    plain_mean_differs = 0.0
    for name in names:
        weighted = (12 * models[0][name].numpy() + 36 * models[1][name].numpy()) / 48
        np.testing.assert_allclose(averaged[f"model/{name}"], weighted, rtol=0, atol=1e-6)
        plain = (models[0][name].numpy() + models[1][name].numpy()) / 2
        plain_mean_differs = max(plain_mean_differs, float(np.abs(plain - weighted).max()))
    assert plain_mean_differs > 1e-5


@pytest.mark.parametrize(("steps", "sizes"), [(2, [5, 5]), (5, [5, 5, 3, 5, 5])])
def test_a_number_of_steps_instead_of_passes(steps, sizes):
    """13 samples in batches of 5: passes start as needed, in different orders; the loss is the mean over all steps."""
    data, losses = random_samples(13, (1, 8, 8), 10), []

    def predict(images):
        return images.flatten(1)[:, :10] * scale

    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    epochs = Epochs(epochs=9, batch_size=5, steps=steps)
    one = ParameterSet(parameters=[scale], learning_rate=0.0)
    loss = train_epochs(predict, [one], data, epochs, np.random.default_rng(0))
    assert [len(index) for index in data.seen] == sizes
    for images, labels in data.batches(data.seen):
        losses.append(float(cross_entropy(predict(images), labels).detach()) * len(labels))
    assert loss == pytest.approx(sum(losses) / sum(sizes), rel=1e-12)
    if steps == 5:
        assert data.seen[0].tolist() != data.seen[3].tolist()
        assert sorted(torch.cat(data.seen[:3]).tolist()) == list(range(13))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_constant_gradient_reaches_as_far_as_stated(momentum):
    """With a linear loss, K steps of SGD move a parameter by rate * a(K, beta) times the gradient."""
    data, weight = random_samples(10, (1, 2, 2), 3), torch.zeros(3, dtype=torch.float64, requires_grad=True)
    slope = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    epochs = Epochs(epochs=3, batch_size=4, momentum=momentum)
    loss = train_epochs(
        lambda images: images, [ParameterSet(parameters=[weight], learning_rate=0.1)], data, epochs,
        np.random.default_rng(0), lambda images, labels: (slope @ weight, None),
    )  # fmt: skip
    assert epochs.num_steps(10) == 9
    torch.testing.assert_close(weight.detach(), -0.1 * epochs.reach(10) * slope)
    assert math.isfinite(loss)


def test_an_objective_replaces_the_cross_entropy_and_its_added_term_is_not_reported():
    data = random_samples(6, (1, 2, 2), 3)
    epochs = Epochs(epochs=1, batch_size=6)

    def trained(objective):
        weight = torch.full((3,), 0.25, requires_grad=True)
        part = ParameterSet(parameters=[weight], learning_rate=1.0)
        loss = train_epochs(
            lambda images: weight.expand(len(images), 3), [part], data, epochs, np.random.default_rng(0), objective
        )
        return loss, weight.detach()

    loss, plain = trained(None)
    assert loss == pytest.approx(math.log(3))

    def objective_with(term):
        def objective(images, labels):
            return torch.nn.functional.cross_entropy(weight.expand(len(images), 3), labels), term(weight)

        return objective

    weight = torch.full((3,), 0.25, requires_grad=True)
    part = ParameterSet(parameters=[weight], learning_rate=1.0)
    reported = train_epochs(
        lambda images: images, [part], data, epochs, np.random.default_rng(0), objective_with(lambda w: 2 * w.sum())
    )
    assert reported == pytest.approx(loss)
    torch.testing.assert_close(weight.detach(), plain - 2)
