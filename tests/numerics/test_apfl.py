"""APFL: a round against the paper's formulas, and its special cases, bit for bit."""

import numpy as np
import pytest
import torch
from members import client, initial_model, rounds
from torch.func import functional_call
from torch.nn import functional

from clients.apfl import APFLClient
from clients.fedavg import FedAvgClient
from clients.local import LocalClient
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics

SGD = {"batch-size": 7, "local-epochs": 2, "momentum": 0.5, "weight-decay": 0.02}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("start", "adaptive"), [(0.3, True), (0.3, False), (0.0, True)])
def test_two_rounds_are_the_papers(start, adaptive, tmp_path):
    """Full batches without momentum in float64: alpha first, then both steps, u with w before its step.

    From 0 alpha would fall below its bound: w has moved down the loss, and v has not moved.
    """
    plan = {"batch-size": 30, "local-epochs": 3, "momentum": 0.0, "weight-decay": 0.0, "learning-rate": 0.2}
    member = client(APFLClient, tmp_path, plan | {"apfl.alpha": start, "apfl.adaptive": adaptive})
    sent = {name: value.double() for name, value in initial_model(member).items()}
    upload, stored = rounds(member, sent, 2)
    model, data, rate, alpha = member.new_target(), member.context.data, 0.2, start
    w, v = ({name: value.clone() for name, value in sent.items()} for _ in range(2))

    def gradient(values):
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        loss = functional.cross_entropy(functional_call(model, leaves, (data.train_images,)), data.train_labels)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def mixed():
        return {name: alpha * v[name] + (1 - alpha) * w[name] for name in w}

    for _ in range(2):
        if adaptive:
            found = gradient(mixed())
            slope = sum(float(((v[name] - w[name]) * found[name]).sum()) for name in w)
            alpha = min(1.0, max(0.0, alpha - rate * slope))
        for _ in range(3):
            of_w, of_u = gradient(w), gradient(mixed())
            w = {name: value - rate * of_w[name] for name, value in w.items()}
            v = {name: value - rate * alpha * of_u[name] for name, value in v.items()}
    for name in w:
        np.testing.assert_allclose(upload[f"model/{name}"], w[name], rtol=0, atol=1e-10)
        np.testing.assert_allclose(stored[f"personal/{name}"], v[name], rtol=0, atol=1e-7)
    np.testing.assert_allclose(stored["share/theta"], [alpha], rtol=0, atol=1e-7)
    assert (abs(alpha - start) > 1e-4) == (adaptive and start > 0)


@pytest.mark.parametrize("target", ["own_networks:with_batchnorm", "own_networks:build"])
def test_an_upload_is_fedavgs(target, tmp_path):
    """Bit for bit, also with running statistics and with dropout."""
    uploads = []
    for kind in (APFLClient, FedAvgClient):
        member = client(kind, tmp_path / kind.__name__, SGD, target)
        uploads.append(exact(rounds(member, initial_model(member), 2)[0]))
    assert uploads[0] == uploads[1]


@pytest.mark.parametrize("target", ["cnn", "own_networks:with_batchnorm", "own_networks:build"])
def test_with_the_private_model_alone_it_is_local(target, tmp_path):
    """With alpha = 1, not adapted: after two rounds the private model is that of `local`, bit for bit."""
    changes = SGD | {"apfl.alpha": 1.0, "apfl.adaptive": False}
    member = client(APFLClient, tmp_path / "apfl", changes, target)
    _, stored = rounds(member, initial_model(member), 2)
    _, alone = rounds(client(LocalClient, tmp_path / "local", SGD, target), {}, 2)
    assert stored.pop("share/theta") == 1
    assert exact({key.replace("personal/", "model/"): value for key, value in stored.items()}) == exact(alone)


def test_with_the_shared_model_alone_the_private_one_stays(tmp_path):
    """With alpha = 0, not adapted: v has no gradient, and the client's model is the shared one."""
    changes = SGD | {"apfl.alpha": 0.0, "apfl.adaptive": False, "weight-decay": 0.0}
    member = client(APFLClient, tmp_path, changes)
    sent = initial_model(member)
    upload, stored = rounds(member, sent)
    assert all(np.array_equal(stored[f"personal/{name}"], value) for name, value in sent.items())
    images = member.context.data.test_images
    assert torch.equal(member.predictor()(images), member.model(images))
    assert exact({f"model/{name}": value.numpy() for name, value in member.target_state().items()}) == exact(upload)


def test_a_federation_has_fedavgs_shared_model(federate):
    """Three of five clients in each round; the aggregate metrics are FedAvg's, the personalized ones are not."""
    plan = {"target": "mlp", "learning-rate": 0.1, "fraction_train": 0.6, "num_rounds": 3}
    runs = [federate(method, **plan) for method in ("fedavg", "apfl")]
    first, second = (exact(last_checkpoint(run)[0]) for run in runs)
    assert first == second
    shared, own = (
        [[{key: row[key] for key in row if key.startswith(name)} for row in metrics(run)] for run in runs]
        for name in ("aggregate", "personalized")
    )
    assert shared[0] == shared[1]
    assert own[0] != own[1]
