"""FedRoD: balanced softmax, the two separate losses of a round, and which model is which."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from members import SIZE, full_batch_client, initial_arrays, initial_model, next_round, upload_after
from torch.nn import functional

from clients.fedavg import FedAvgClient
from clients.fedrod import FedRoDClient, balanced_softmax, samples_in_a_pass
from hyperfl_flwr.contract.folders import exact
from hyperfl_flwr.data.dataset import Split
from hyperfl_flwr.data.sample_weights import Weighting
from hyperfl_flwr.metrics.evaluation import evaluate

SEEN = 6
"""Number of classes that the client has samples of; the others are absent."""


@pytest.mark.usefixtures("float64")
def test_balanced_softmax_weights_the_classes_by_their_counts():
    """The probability of y is n_y exp(g_y) / sum_k n_k exp(g_k); an absent class gets no gradient."""
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels, counts = torch.tensor([0, 2, 3, 3, 0]), torch.tensor([7, 0, 2, 9])
    weighted = counts * logits.detach().exp()
    expected = -(weighted[torch.arange(5), labels] / weighted.sum(dim=1)).log().mean()
    loss = balanced_softmax(logits, labels, counts)
    torch.testing.assert_close(loss.detach(), expected, rtol=0, atol=1e-14)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[:, 1] == 0).all()
    assert (gradient[:, [0, 2, 3]] != 0).all()


@pytest.mark.parametrize("target", ["mlp", "own_networks:with_batchnorm"])
def test_two_rounds_are_sgd_on_the_two_losses(target, tmp_path):
    """Each classifier takes steps along its own loss, and the extractor along the balanced one alone."""
    member = full_batch_client(FedRoDClient, tmp_path, target, num_classes=SEEN)
    found = upload_after(member, 2)
    data, model = member.context.data, full_batch_client(FedAvgClient, tmp_path, target).model
    model.load_state_dict(initial_model(member), assign=True)
    counts = torch.bincount(data.train_labels, minlength=10)
    assert (counts > 0).tolist() == [True] * SEEN + [False] * 4
    own = [torch.zeros_like(parameter, requires_grad=True) for parameter in model.train().classifier.parameters()]
    for _ in range(2):
        shared, private = (
            torch.optim.SGD(values, lr=0.1, momentum=0.5, weight_decay=0.02) for values in (model.parameters(), own)
        )
        for _ in range(4):
            features = model.extractor(data.train_images)
            generic = model.classifier(features)
            personalized = functional.linear(features.detach(), *own) + generic.detach()
            shared.zero_grad()
            private.zero_grad()
            # log 0 is -inf only for classes that no label has.
            functional.cross_entropy(generic + counts.float().log(), data.train_labels).backward()
            functional.cross_entropy(personalized, data.train_labels).backward()
            shared.step()
            private.step()
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=0, atol=5e-6, err_msg=name)
    for value, expected in zip(member.context.state.load(2).values(), own, strict=True):
        np.testing.assert_allclose(value, expected.detach().numpy(), rtol=0, atol=5e-6)
    assert max(float(each.detach().norm()) for each in own) > 0.01


def test_the_private_classifier_does_not_move_the_upload(tmp_path):
    """Bit for bit: the same model is uploaded with the classifier of the first round and with zeros."""
    member = full_batch_client(FedRoDClient, tmp_path / "a")
    received = upload_after(member)
    found = next_round(member, received, 2, 1)
    assert float(np.abs(member.context.state.load(1)["offset/weight"]).max()) > 0.01
    fresh = next_round(full_batch_client(FedRoDClient, tmp_path / "b"), received, 2, 0)
    assert exact(found) == exact(fresh)


def test_the_upload_tells_which_classes_a_client_has(tmp_path):
    """Without weight decay the classifier's rows of absent classes stay, bit for bit; all other rows move."""
    member = full_batch_client(FedRoDClient, tmp_path, num_classes=SEEN, **{"weight-decay": 0.0})
    before, after = initial_arrays(member), upload_after(member)
    for name in ("classifier.weight", "classifier.bias"):
        moved = (before[name] != after[name]).reshape(10, -1).any(axis=1)
        assert moved.tolist() == [True] * SEEN + [False] * 4


def test_with_equal_counts_the_shared_model_is_fedavgs(tmp_path):
    """A constant added to all logits changes no gradient: equal to rounding, and not equal with other counts."""
    uploads = {}
    for kind in (FedRoDClient, FedAvgClient):
        for balanced in (True, False):
            member = full_batch_client(kind, tmp_path / f"{kind.__name__}-{balanced}")
            if balanced:
                member.context.data.train_labels.copy_(torch.arange(SIZE) % 10)
            uploads[kind, balanced] = upload_after(member)
    for name, value in uploads[FedAvgClient, True].items():
        np.testing.assert_allclose(uploads[FedRoDClient, True][name], value, rtol=0, atol=1e-6)
    one, two = (uploads[kind, False]["classifier.bias"] for kind in (FedRoDClient, FedAvgClient))
    assert float(np.abs(one - two).max()) > 1e-3


def test_weights_of_samples_change_the_prior_once(tmp_path):
    """With balanced classes the prior is uniform, so that the shared model is FedAvg's on the same weighted batches."""
    labels, uploads = torch.cat([torch.arange(10), torch.zeros(SIZE - 10, dtype=torch.int64)]), {}
    for kind in (FedRoDClient, FedAvgClient):
        member = full_batch_client(kind, tmp_path / kind.__name__)
        member.context.data.train_labels.copy_(labels)
        assert samples_in_a_pass(member.context.data).tolist() == [SIZE - 9, *[1] * 9]
        split = Split(images=np.empty((SIZE, 0)), labels=labels.numpy())
        weights = Weighting(classes="balanced").of_client(split, np.arange(SIZE), 10)
        member.context = replace(member.context, data=replace(member.context.data, train_weights=weights))
        torch.testing.assert_close(samples_in_a_pass(member.context.data), torch.full((10,), SIZE / 10))
        uploads[kind] = upload_after(member)
    for name, value in uploads[FedAvgClient].items():
        np.testing.assert_allclose(uploads[FedRoDClient][name], value, rtol=0, atol=1e-6)


def test_samples_without_weight_do_not_count(tmp_path):
    """Own weights of samples: a class of which all have the weight 0 is an absent one."""
    data = full_batch_client(FedRoDClient, tmp_path).context.data
    data.train_labels.copy_(torch.arange(SIZE) % 3)
    weights = np.array([0.0, 1e-300, 3e-300] * (SIZE // 3))
    expected = torch.tensor([0, SIZE / 4, SIZE * 3 / 4, *[0] * 7])
    torch.testing.assert_close(samples_in_a_pass(replace(data, train_weights=weights)), expected)


def test_a_client_that_joins_trains_its_classifier_alone(tmp_path):
    """Ten rounds on a constant model lower the loss of both classifiers' sum."""
    member = full_batch_client(FedRoDClient, tmp_path)
    values = initial_arrays(member)
    member.receive({f"model/{name}": value for name, value in values.items()}, 0)
    data = member.context.data
    before = evaluate(member.predictor(), data.train_images, data.train_labels).mean_loss
    member.join(10, np.random.default_rng(0))
    assert evaluate(member.predictor(), data.train_images, data.train_labels).mean_loss < before - 0.05
    assert exact({name: value.numpy() for name, value in member.received_state().items()}) == exact(values)


def test_aggregate_is_the_received_model_and_personalized_has_both_classifiers(tmp_path):
    """Losses on the client's test data after the first round, which has made the private classifier."""
    member = full_batch_client(FedRoDClient, tmp_path)
    received = upload_after(member)
    config = {"round": 2, "version": 1, "kept-version": 1}
    _, _, found = member.fit(list(received.values()), config)
    data, alone = member.context.data, full_batch_client(FedAvgClient, tmp_path).model
    alone.load_state_dict({name: torch.tensor(value) for name, value in received.items()}, assign=True)
    assert found["aggregate-loss"] == evaluate(alone, data.test_images, data.test_labels).mean_loss
    alone.load_state_dict(dict(member.target_state()), assign=True)
    both = evaluate(alone, data.test_images, data.test_labels).mean_loss
    assert found["personalized-loss"] == pytest.approx(both, rel=1e-6)
    alone.load_state_dict(dict(member.received_state()), assign=True)
    assert abs(evaluate(alone, data.test_images, data.test_labels).mean_loss - both) > 1e-3
