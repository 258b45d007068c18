"""Per-FedAvg: the gradient after a step, fixed points on quadratic problems, local rounds, and the adapted model."""

import numpy as np
import pytest
import torch
from members import full_batch_client, initial_arrays, initial_model, next_round, record_batches, upload_after
from plain import random_samples
from torch.nn import functional

from clients.fedavg import FedAvgClient
from clients.per_fedavg import PerFedAvgClient
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, train_epochs
from hyperfl_flwr.training.one_step import stepped

BATCHNORM = "own_networks:with_batchnorm"


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("first_order", [True, False])
def test_the_gradient_after_a_step_has_the_hessian_or_not(first_order):
    """For losses that are not quadratic it is (1 - alpha H) grad f2(u), by finite differences of f2(u(w))."""
    w, alpha, width = torch.tensor([0.7, -0.4], requires_grad=True), 0.3, 1e-6

    def one(values):
        return (values["w"] ** 4).sum() + values["w"].prod()

    def two(values):
        return (2 * values["w"]).sin().sum() + values["w"].prod() ** 2

    u = stepped({"w": w}, one, alpha, first_order=first_order)
    (gradient,) = torch.autograd.grad(two(u), w)
    if first_order:
        leaf = u["w"].detach().requires_grad_(True)
        (expected,) = torch.autograd.grad(two({"w": leaf}), leaf)
    else:

        def after(value):
            with torch.enable_grad():
                return float(two(stepped({"w": value.requires_grad_(True)}, one, alpha, first_order=True)).detach())

        sides = [[after(w.detach() + sign * width * axis) for sign in (1, -1)] for axis in torch.eye(2)]
        expected = torch.tensor([(up - down) / (2 * width) for up, down in sides])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-8)


A, B, P = np.array([1.0, 2.0, 5.0]), np.array([4.0, -2.0, 3.0]), np.array([0.2, 0.5, 0.3])
"""Curvatures a_i, minima b_i and shares p_i of three clients with f_i = a_i/2 (y - b_i)^2."""


def toy_round(x, alpha, rate, steps, *, first_order):
    """Return the mean of the three clients' models after one round from x."""
    trained, data = [], random_samples(1, (1, 1, 1), 2)
    for curvature, minimum in zip(A, B, strict=True):
        y = torch.tensor([x], requires_grad=True)

        def loss(values, a=curvature, b=minimum):
            return (a / 2 * (values["y"] - b).square()).sum()

        def objective(images, labels, y=y, loss=loss):
            return loss(stepped({"y": y}, loss, alpha, first_order=first_order)), None

        epochs, sets = Epochs(epochs=1, batch_size=1, steps=steps), [ParameterSet(parameters=[y], learning_rate=rate)]
        train_epochs(lambda images: images, sets, data, epochs, np.random.default_rng(0), objective)
        trained.append(float(y.detach()))
    return float(P @ trained)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("first_order", "power"), [(True, 1), (False, 2)])
def test_the_fixed_point_of_quadratic_losses(first_order, power):
    """It is the mean of b_i with weights p_i (1 - (1 - beta c_i)^K), c_i = a_i (1 - alpha a_i), squared with H."""
    alpha, rate, steps = 0.1, 0.05, 5
    at_zero, at_one = (toy_round(x, alpha, rate, steps, first_order=first_order) for x in (0.0, 1.0))
    found = at_zero / (1 - (at_one - at_zero))
    weights = P * (1 - (1 - rate * A * (1 - alpha * A) ** power) ** steps)
    assert found == pytest.approx(weights @ B / weights.sum(), rel=1e-11)
    without = P * (1 - (1 - rate * A) ** steps)
    assert abs(found - without @ B / without.sum()) > 0.05


@pytest.mark.parametrize("mode", ["fo", "hf"])
def test_a_round_is_algorithm_1(mode, tmp_path):
    """Batches of 20 and 10 samples, their first halves for the inner step; the Hessian's product by two gradients."""
    alpha, rate = 0.2, 0.1
    changes = {"batch-size": 20, "local-epochs": 2, "momentum": 0.0, "weight-decay": 0.0}
    member = full_batch_client(
        PerFedAvgClient, tmp_path, **changes, **{"per-fedavg.mode": mode, "per-fedavg.alpha": alpha}
    )
    seen = record_batches(member)
    found = upload_after(member)
    model = full_batch_client(FedAvgClient, tmp_path).model
    model.load_state_dict(initial_model(member), assign=True)
    parameters = list(model.parameters())

    def gradients(images, labels, **options):
        return torch.autograd.grad(functional.cross_entropy(model(images), labels), parameters, **options)

    assert [len(labels) for _, labels in seen] == [20, 10, 20, 10]
    for images, labels in seen:
        half, start_of_step = len(labels) // 2, [parameter.detach().clone() for parameter in parameters]
        inner = gradients(images[:half], labels[:half], create_graph=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, inner, strict=True):
                parameter.data = parameter - alpha * gradient
        outer = gradients(images[half:], labels[half:])
        with torch.no_grad():
            for parameter, value in zip(parameters, start_of_step, strict=True):
                parameter.data = value
        if mode == "hf":
            inner = gradients(images[:half], labels[:half], create_graph=True)
            product = torch.autograd.grad(inner, parameters, grad_outputs=outer)
            outer = [gradient - alpha * second for gradient, second in zip(outer, product, strict=True)]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, outer, strict=True):
                parameter -= rate * gradient
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("target", ["mlp", BATCHNORM])
def test_without_a_step_it_is_fedavg_on_the_second_halves(target, tmp_path):
    """With alpha = 0 it is SGD on the second half of each batch, and BatchNorm sees no other statistics."""
    member = full_batch_client(PerFedAvgClient, tmp_path, target, **{"batch-size": 20, "per-fedavg.alpha": 0.0})
    seen = record_batches(member)
    found = upload_after(member)
    model = full_batch_client(FedAvgClient, tmp_path, target).model
    model.load_state_dict(initial_model(member), assign=True)
    optimiser = torch.optim.SGD(model.train().parameters(), lr=0.1, momentum=0.5, weight_decay=0.02)
    for images, labels in seen:
        half = len(labels) // 2
        optimiser.zero_grad()
        functional.cross_entropy(model(images[half:]), labels[half:]).backward()
        optimiser.step()
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=0, atol=2e-6, err_msg=name)


def test_running_statistics_are_those_of_the_second_halves(tmp_path):
    """In one step the running mean of the first layer's outputs moves by a tenth of the second half's mean at u."""
    member = full_batch_client(PerFedAvgClient, tmp_path, BATCHNORM, **{"local-epochs": 1, "per-fedavg.alpha": 1e-9})
    seen = record_batches(member)
    found, first = upload_after(member), initial_arrays(member)
    ((images, _),) = seen
    outputs = functional.conv2d(images[15:], torch.tensor(first["extractor.network.0.weight"]))
    expected = 0.1 * (outputs.mean(dim=(0, 2, 3)) + torch.tensor(first["extractor.network.0.bias"]))
    np.testing.assert_allclose(found["extractor.network.1.running_mean"], expected.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_batchnorm_takes_the_batch_for_a_half_of_one_sample(size, tmp_path):
    """Both halves of two samples, and the first of three; with alpha = 0 it is SGD on what is left as the second."""
    target, length = "own_networks:with_batchnorm1d", {"batch-size": 30 - size, "local-epochs": 1}
    upload_after(full_batch_client(PerFedAvgClient, tmp_path, target, **length))  # a step on the first half, too
    member = full_batch_client(PerFedAvgClient, tmp_path, target, **length, **{"per-fedavg.alpha": 0.0})
    seen = record_batches(member)
    found = upload_after(member)
    model = full_batch_client(FedAvgClient, tmp_path, target).model
    model.load_state_dict(initial_model(member), assign=True)
    optimiser = torch.optim.SGD(model.train().parameters(), lr=0.1, momentum=0.5, weight_decay=0.02)
    assert [len(labels) for _, labels in seen] == [30 - size, size]
    for (images, labels), begin in zip(seen, [(30 - size) // 2, size - 2], strict=True):
        optimiser.zero_grad()
        functional.cross_entropy(model(images[begin:]), labels[begin:]).backward()
        optimiser.step()
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=0, atol=2e-6, err_msg=name)


def test_a_last_batch_of_one_sample_is_named(tmp_path):
    member = full_batch_client(FedAvgClient, tmp_path, "own_networks:with_batchnorm1d", **{"batch-size": 29})
    with pytest.raises(ValueError, match="n modulo batch-size is 1; take another batch-size, or another data"):
        upload_after(member)


def test_the_personalized_model_is_one_step_from_the_received_one(tmp_path):
    """It takes the mean loss of all training samples, in three parts here; `aggregate` is the received model."""
    changes = {"batch-size": 13, "local-epochs": 1, "per-fedavg.alpha": 0.5}
    member = full_batch_client(PerFedAvgClient, tmp_path, **changes)
    received = initial_arrays(member)
    arrays, _, found = member.fit(
        [value.copy() for value in received.values()], {"round": 1, "version": 0, "kept-version": 0}
    )
    data, model = member.context.data, full_batch_client(FedAvgClient, tmp_path).model
    model.load_state_dict({name: torch.tensor(value) for name, value in received.items()}, assign=True)
    assert found["aggregate-loss"] == evaluate(model, data.test_images, data.test_labels).mean_loss
    loss = functional.cross_entropy(model(data.train_images), data.train_labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected = {
        name: value.detach() - 0.5 * gradient
        for (name, value), gradient in zip(model.named_parameters(), gradients, strict=True)
    }
    for name, value in member.target_state().items():
        torch.testing.assert_close(value.detach(), expected[name], rtol=0, atol=1e-6)
    model.load_state_dict(expected)
    both = evaluate(model, data.test_images, data.test_labels).mean_loss
    assert found["personalized-loss"] == pytest.approx(both, rel=1e-6)
    uploaded = dict(zip(received, arrays, strict=True))
    assert np.abs(uploaded["classifier.bias"] - expected["classifier.bias"].numpy()).max() > 1e-3


def test_attention_has_second_derivatives(tmp_path):
    """Torch's fast kernels for it have none; with `hf` they are not used, and the model is another than with `fo`."""
    found = [
        upload_after(full_batch_client(PerFedAvgClient, tmp_path / mode, "own_networks:attention", **changes))
        for mode in ("fo", "hf")
        for changes in [{"per-fedavg.mode": mode, "per-fedavg.alpha": 0.5}]
    ]
    assert max(float(np.abs(found[0][name] - found[1][name]).max()) for name in found[0]) > 1e-4


def test_a_batch_of_one_sample_is_both_halves(tmp_path):
    """The last batch of 30 samples in batches of 29: the step and the loss after it are of the same sample."""
    member = full_batch_client(
        PerFedAvgClient, tmp_path, **{"batch-size": 29, "local-epochs": 1, "per-fedavg.alpha": 0.5}
    )
    values = next_round(member, initial_arrays(member), 1, 0)
    assert all(np.isfinite(value).all() for value in values.values())
    data = member.context.data
    one, label = data.train_images[:1], data.train_labels[:1]
    loss, _ = member.objective()(one, label)
    before = functional.cross_entropy(member.model(one), label)
    assert float(loss.detach()) < float(before.detach()) - 1e-3
