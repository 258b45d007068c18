"""MOON: the contrastive loss, a round with its teachers, and the rounds that are FedAvg's."""

import copy
import math

import numpy as np
import pytest
import torch
from federations import small_settings, trained
from members import (
    FULL_BATCH,
    client,
    full_batch_client,
    initial_arrays,
    initial_model,
    next_round,
    rounds,
    upload_after,
)
from torch.nn import functional

from clients.fedala import FedALAClient
from clients.fedavg import FedAvgClient
from clients.moon import MoonClient, contrast
from hyperfl_flwr.contract.folders import current_private, exact, last_checkpoint, metrics

TARGET = "own_networks:with_batchnorm"


@pytest.mark.usefixtures("float64")
def test_the_contrastive_loss_is_that_of_the_paper():
    """It equals -log(exp(s+/tau) / (exp(s+/tau) + exp(s-/tau))) with cosines s (equation 3)."""
    features, received, previous = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))

    def cosine(other):
        return (features * other).sum(dim=1) / features.norm(dim=1) / other.norm(dim=1)

    up, down = (torch.exp(cosine(other) / 0.3) for other in (received, previous))
    expected = -torch.log(up / (up + down)).mean()
    torch.testing.assert_close(contrast(features, received, previous, 0.3), expected, rtol=0, atol=1e-14)
    assert float(contrast(features, features, -features, 0.3)) == pytest.approx(math.log1p(math.exp(-2 / 0.3)))


@pytest.mark.usefixtures("float64")
def test_teachers_that_agree_leave_no_gradient():
    """So it is in a client's first round: the loss is log 2 whatever the features are."""
    features, teacher = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    features.requires_grad_(True)
    loss = contrast(features, teacher, teacher.clone(), 0.5)
    assert float(loss.detach()) == pytest.approx(math.log(2), abs=1e-15)
    (gradient,) = torch.autograd.grad(loss, features)
    assert float(gradient.abs().max()) < 1e-16


def test_a_round_is_sgd_on_the_loss_with_both_teachers(tmp_path):
    """The second round: the teachers are the received model and that of the first round, both in evaluation mode."""
    mu, tau = 5.0, 0.5
    member = full_batch_client(MoonClient, tmp_path, TARGET, **{"moon.mu": mu, "moon.temperature": tau})
    previous = upload_after(member)
    received = {name: value + np.float32(0.05) for name, value in initial_arrays(member).items()}
    found = next_round(member, received, 2, 1)
    data = member.context.data
    model = full_batch_client(FedAvgClient, tmp_path, TARGET).model

    def loaded(values):
        network = copy.deepcopy(model).to_empty(device="cpu")
        network.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
        return network

    network, global_one, old = loaded(received).train(), loaded(received).eval(), loaded(previous).eval()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5, weight_decay=0.02)
    for _ in range(FULL_BATCH["local-epochs"]):
        optimiser.zero_grad()
        features = network.extractor(data.train_images)
        towards, away = (
            functional.cosine_similarity(features, teacher.extractor(data.train_images).detach()) / tau
            for teacher in (global_one, old)
        )
        loss = functional.cross_entropy(network.classifier(features), data.train_labels)
        (loss + mu * (torch.logaddexp(towards, away) - towards).mean()).backward()
        optimiser.step()
    for name, value in network.state_dict().items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=0, atol=3e-6, err_msg=name)
    kept = {name.removeprefix("previous/"): value for name, value in member.context.state.load(2).items()}
    assert exact(kept) == exact(found)


def test_a_first_round_is_fedavgs_bit_for_bit(tmp_path):
    """In whatever round it is; the second one differs, and a lost reply leads back to the first one's model."""
    member = full_batch_client(MoonClient, tmp_path / "a", TARGET, **{"moon.mu": 5.0})
    plain = full_batch_client(FedAvgClient, tmp_path / "b", TARGET)
    values = {name: value + np.float32(0.05) for name, value in initial_arrays(member).items()}
    first, of_fedavg = next_round(member, values, 3, 0), next_round(plain, values, 3, 0)
    assert exact(first) == exact(of_fedavg)
    lost = next_round(member, values, 4, 3)
    assert exact(lost) != exact(next_round(plain, values, 4, 3))
    again = full_batch_client(MoonClient, tmp_path / "a", TARGET, **{"moon.mu": 5.0})
    assert exact(next_round(again, values, 4, 3)) == exact(lost)


def test_a_federation_without_the_term_is_fedavgs_bit_for_bit(tmp_path):
    """Four rounds with three of five clients each; with mu = 1 the model differs."""
    runs = {}
    for name, method, mu in (("a", "fedavg", 1.0), ("b", "moon", 0.0), ("c", "moon", 1.0)):
        settings = {"method": method, "moon.mu": mu, "fraction-train": 0.6, "num-rounds": 4, "target": "mlp"}
        runs[name] = trained(small_settings(**settings, output=str(tmp_path / name)))
    (one, progress), (two, other) = last_checkpoint(runs["a"]), last_checkpoint(runs["b"])
    assert (exact(one), progress) == (exact(two), other)
    assert metrics(runs["a"]) == metrics(runs["b"])
    assert exact(last_checkpoint(runs["c"])[0]) != exact(two)
    assert len(current_private(runs["c"])) == 5


@pytest.mark.parametrize("kind", [MoonClient, FedALAClient])
def test_the_last_model_is_the_received_one_where_the_first_training_was_undone(kind, tmp_path):
    """Not the initial model, which a client that takes part for the first time in a later round never was near."""
    changes = {"learning-rate": 1e38, "privacy.unit": "client", "privacy.clip-norm": 1.0, "local-epochs": 3}
    member = client(kind, tmp_path, {"method": kind.__name__.removesuffix("Client").lower()} | changes, target="mlp")
    received = {name: value + 1 for name, value in initial_model(member).items()}
    uploaded, stored = rounds(member, received)
    last = {key.partition("/")[2]: value for key, value in stored.items() if member.copies_of_uploads[0] in key}
    assert list(last) == list(received)
    for name, value in received.items():
        np.testing.assert_array_equal(uploaded[f"model/{name}"], value)
        np.testing.assert_array_equal(last[name], value)
