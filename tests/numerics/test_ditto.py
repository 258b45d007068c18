"""Ditto: the private model's closed form and its special cases; the shared model is FedAvg's, bit for bit."""

import json

import numpy as np
import pytest
from members import client, initial_model, rounds

from clients.ditto import DittoClient
from clients.fedavg import FedAvgClient
from clients.local import LocalClient
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics, private_arrays

SGD = {"batch-size": 7, "local-epochs": 2, "momentum": 0.5, "weight-decay": 0.02}


class Quadratic(DittoClient):
    """Minimises a/2 |p - b|^2 over the parameters p of each model, instead of the cross-entropy of samples."""

    a, b = 2.0, 0.25

    def objective(self):
        both = [*self.model.parameters(), *self.personal.parameters()]
        loss = lambda: self.a / 2 * sum((parameter - self.b).square().sum() for parameter in both)  # noqa: E731
        return lambda images, labels: (loss(), None)


@pytest.mark.parametrize("pull", [0.0, 0.5, 6.0])
def test_the_private_model_of_a_quadratic_loss(pull, tmp_path):
    """It tends to (a b + lambda x) / (a + lambda) with the received x, while the shared model tends to b."""
    member = client(Quadratic, tmp_path, {"local-epochs": 60, "weight-decay": 0.0, "ditto.pull": pull})
    sent = initial_model(member)
    model, stored = rounds(member, sent)
    for name, value in sent.items():
        expected = (member.a * member.b + pull * value) / (member.a + pull)
        np.testing.assert_allclose(stored[f"personal/{name}"], expected.numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(model[f"model/{name}"], np.full(value.shape, member.b), rtol=0, atol=1e-5)


@pytest.mark.parametrize("target", ["cnn", "own_networks:with_batchnorm", "own_networks:build"])
def test_the_private_model_without_a_pull_is_trained_alone(target, tmp_path):
    """After two rounds it is that of `local`, bit for bit: one initial model, the same batches, the same dropout."""
    member = client(DittoClient, tmp_path / "ditto", SGD | {"ditto.pull": 0.0}, target)
    _, stored = rounds(member, initial_model(member), 2)
    _, alone = rounds(client(LocalClient, tmp_path / "local", SGD, target), {}, 2)
    assert exact({key.replace("personal/", "model/"): value for key, value in stored.items()}) == exact(alone)


@pytest.mark.parametrize("target", ["own_networks:with_batchnorm", "own_networks:build"])
def test_an_upload_is_fedavgs(target, tmp_path):
    """Bit for bit with any pull, also with running statistics and with dropout."""
    uploads = []
    for kind in (DittoClient, FedAvgClient):
        member = client(kind, tmp_path / kind.__name__, SGD | {"ditto.pull": 3.0}, target)
        uploads.append(exact(rounds(member, initial_model(member), 2)[0]))
    assert uploads[0] == uploads[1]


def of_the_shared_model(run):
    """Return checkpoint, progress and metrics of a run, without those of the clients' own models."""
    arrays, progress = last_checkpoint(run)
    left_out = ("personalized", "unmask")
    rows = [{key: value for key, value in row.items() if not key.startswith(left_out)} for row in metrics(run)]
    return exact(arrays), progress, rows


def test_a_federation_has_fedavgs_shared_model(federate):
    """Three of five clients in each round, and two novel ones; the pull changes the private models alone."""
    plan = {"target": "mlp", "learning-rate": 0.1, "fraction_train": 0.6, "novel.clients": 2}
    runs = [federate("fedavg", **plan), *(federate("ditto", **plan, **{"ditto.pull": pull}) for pull in (0.1, 1.0))]
    first, *others = [of_the_shared_model(run) for run in runs]
    assert all(other == first for other in others)
    novel = [json.loads((run / "novel.json").read_text()) for run in runs]
    assert novel[0] == novel[1] == novel[2] != []
    weak, strong = (private_arrays(run) for run in runs[1:])
    assert weak.keys() == strong.keys()
    assert not any(np.array_equal(value, strong[file][key]) for file in weak for key, value in weak[file].items())


def test_secure_sums_are_fedavgs(federate):
    """The opened sums are exact integers, so that the shared models are equal bit for bit."""
    plan = {"secagg.enabled": True, "target": "mlp", "learning-rate": 0.1, "num_rounds": 1}
    first, second = (of_the_shared_model(federate(method, 3, **plan)) for method in ("fedavg", "ditto"))
    assert first == second
