"""kNN-Per: neighbours and mixtures in closed form, the choice of the weight, and runs that are FedAvg's."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import small_settings, trained
from members import SIZE, full_batch_client, initial_arrays, upload_after

from clients.fedavg import FedAvgClient
from clients.knn_per import KNNPerClient
from clients.novel.answers import assess
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.protocol.queries import CORRECT, QuerySpec
from hyperfl_flwr.results.export import model_of_run
from hyperfl_flwr.training.neighbours import Neighbours, best_weight, mixed


@pytest.mark.usefixtures("float64")
def test_neighbours_have_the_weights_of_the_kernel():
    """Three of five samples, exp(-d^2 / F), also where all weights are below the smallest number."""
    rng = np.random.default_rng(0)
    stored, asked = rng.normal(size=(5, 4)), rng.normal(size=(2, 4))
    labels = np.array([2, 0, 2, 1, 0])
    for scale in (1.0, 100.0):
        found = Neighbours(torch.tensor(scale * stored), torch.tensor(labels), 3, 3).probabilities(
            torch.tensor(scale * asked)
        )
        for row, sample in zip(found, asked, strict=True):
            squares = scale**2 * ((stored - sample) ** 2).sum(axis=1)
            nearest = np.argsort(squares)[:3]
            weights = np.exp(-(squares[nearest] - squares.min()) / 4)
            expected = [weights[labels[nearest] == label].sum() / weights.sum() for label in range(3)]
            np.testing.assert_allclose(row.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_with_all_samples_at_one_distance_it_is_the_frequency_of_labels():
    """Here k is above n, so that all samples count."""
    labels = torch.tensor([0, 1, 1, 3, 1])
    found = Neighbours(torch.eye(5), labels, 4, 100).probabilities(torch.zeros(2, 5))
    torch.testing.assert_close(found, torch.tensor([[0.2, 0.6, 0.0, 0.2]] * 2), rtol=0, atol=1e-15)


@pytest.mark.usefixtures("float64")
def test_probabilities_are_mixed_and_not_logits():
    """The logarithms of l softmax + (1 - l) kNN; with l = 1 those of the softmax, with l = 0 finite ones of the kNN."""
    logits, neighbours = torch.tensor([[1.0, 2.0, -1.0]]), torch.tensor([[0.0, 0.25, 0.75]])
    network = logits.exp() / logits.exp().sum()
    for weight in (0.3, 1.0):
        found = mixed(logits, neighbours, weight).exp()
        torch.testing.assert_close(found, weight * network + (1 - weight) * neighbours, rtol=0, atol=1e-15)
    alone = mixed(logits, neighbours, 0.0)
    assert alone.isfinite().all()
    torch.testing.assert_close(alone.exp(), neighbours, rtol=0, atol=1e-15)


@pytest.mark.usefixtures("float64")
def test_the_weight_with_most_correct_predictions_is_chosen():
    """The network is right on the first two samples, the neighbours are on the third; ties go to the lower loss."""
    logits = torch.tensor([[0.4, 0.0], [0.4, 0.0], [0.4, 0.0]])
    neighbours = torch.tensor([[0.45, 0.55], [0.45, 0.55], [0.0, 1.0]])
    labels = torch.tensor([0, 0, 1])
    network = math.exp(0.4) / (1 + math.exp(0.4))
    enough = next(w for w in (0.1, 0.2, 0.3, 0.4, 0.5) if w * network + (1 - w) * 0.45 > 0.5)
    weights = [tenth / 10 for tenth in range(11)]
    found = best_weight(logits, neighbours, labels, weights)
    correct = [w for w in weights if enough <= w and w * network + (1 - w) * 0.0 < 0.5]
    assert len(correct) > 1
    losses = [-(2 * math.log(w * network + (1 - w) * 0.45) + math.log(w * (1 - network) + 1 - w)) for w in correct]
    assert found == correct[int(np.argmin(losses))]
    assert best_weight(logits, neighbours, torch.tensor([0, 0, 0]), weights) == 1.0
    assert best_weight(logits, neighbours, torch.tensor([1, 1, 1]), weights) == 0.0


def test_the_predictor_uses_the_clients_own_training_samples(tmp_path):
    """After a round: the mixture with features of the trained network in evaluation mode; `aggregate` is likewise."""
    target, settings = "own_networks:with_batchnorm", {"knn-per.neighbours": 3, "knn-per.weight": 0.3}
    member = full_batch_client(KNNPerClient, tmp_path, target, **settings)
    values = initial_arrays(member)
    arrays, number, found = member.fit(
        [value.copy() for value in values.values()], {"round": 1, "version": 0, "kept-version": 0}
    )
    assert number == SIZE
    data, model = member.context.data, full_batch_client(FedAvgClient, tmp_path, target).model
    for kind, state in (("aggregate", values), ("personalized", dict(zip(values, arrays, strict=True)))):
        model.load_state_dict({name: torch.tensor(value) for name, value in state.items()}, assign=True)
        with torch.no_grad():
            stored, asked = (model.eval().extractor(images) for images in (data.train_images, data.test_images))
            squares = ((asked[:, None] - stored[None]) ** 2).sum(dim=2)
            nearest = squares.topk(3, largest=False)
            weights = torch.softmax(-nearest.values / stored.shape[1], dim=1)
            votes = torch.zeros(len(asked), 10).scatter_add_(1, data.train_labels[nearest.indices], weights)
            chances = 0.3 * torch.softmax(model.classifier(asked), dim=1) + 0.7 * votes
            loss = -chances[torch.arange(len(asked)), data.test_labels].log().mean()
        assert found[f"{kind}-loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize(("size", "share", "number"), [(30, 1 / 3, 10), (10, 0.99, 9), (1, 0.9, 0), (0, 0.5, 0)])
def test_all_samples_but_one_are_held_back_at_most(size, share, number, tmp_path):
    data = full_batch_client(KNNPerClient, tmp_path).context.data
    assert data.with_training(torch.arange(size)).num_held_back(share) == number


def test_held_back_samples_are_neither_trained_on_nor_neighbours(tmp_path):
    """A third of 30 samples: the same ones in every round. The number that is reported stays that of all samples."""
    member = full_batch_client(KNNPerClient, tmp_path, **{"knn-per.held-back": 1 / 3, "local-epochs": 1})
    images, labels = member.held_back
    kept = member.training_data()
    assert (len(labels), len(kept.train_labels)) == (10, 20)
    parts = torch.cat([images, kept.train_images]).flatten(1)
    whole = member.context.data.train_images.flatten(1)
    assert sorted(parts.tolist()) == sorted(whole.tolist())
    again = full_batch_client(KNNPerClient, tmp_path, **{"knn-per.held-back": 1 / 3})
    assert torch.equal(again.held_back[0], images)
    plain = full_batch_client(FedAvgClient, tmp_path / "b", **{"local-epochs": 1})
    plain.context.data.train_images.set_(kept.train_images)
    plain.context.data.train_labels.set_(kept.train_labels)
    assert exact(upload_after(member)) == exact(upload_after(plain))


def test_the_chosen_weight_is_used(tmp_path):
    """Half of the samples are copies of others: neighbours know them, a network without training does not.

    The set share of the network, 1, has no effect.
    """
    changes = {"knn-per.held-back": 0.5, "knn-per.neighbours": 1, "knn-per.weight": 1.0}
    member = full_batch_client(KNNPerClient, tmp_path, **changes)
    data = member.context.data
    half = SIZE // 2
    data.train_images[half:], data.train_labels[half:] = data.train_images[:half], data.train_labels[:half]
    member = KNNPerClient(member.context)
    values = initial_arrays(member)
    member.receive({f"model/{name}": value for name, value in values.items()}, 0)
    chosen = member.predictor()(data.test_images)
    assert chosen.exp().sum(dim=1).allclose(torch.ones(len(chosen)))
    accuracy = evaluate(member.predictor(), *member.held_back).accuracy
    assert accuracy > evaluate(member.model, *member.held_back).accuracy


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return runs of FedAvg and of kNN-Per, with the shares 1 and 0.5: four rounds with three of five clients."""
    folder, runs = tmp_path_factory.mktemp("knn-per"), []
    for name, method, weight in (("a", "fedavg", 0.5), ("b", "knn-per", 1.0), ("c", "knn-per", 0.5)):
        settings = {"method": method, "knn-per.weight": weight, "fraction-train": 0.6, "num-rounds": 4}
        runs.append(trained(small_settings(**settings, target="mlp", output=str(folder / name))))
    return runs


def test_the_models_are_fedavgs_bit_for_bit(pair):
    """With any share; with the share 1 all accuracies and losses are, too, and otherwise they differ."""
    arrays = [exact(last_checkpoint(run)[0]) for run in pair]
    assert arrays[0] == arrays[1] == arrays[2]
    fedavg, network, both = (metrics(run) for run in pair)
    assert fedavg == network
    assert network != both


def test_the_global_network_is_exported_and_a_clients_predictions_are_not(pair):
    found = model_of_run(pair[2], None)
    assert found.score is None
    for name, value in model_of_run(pair[0], None).tensors.items():
        assert torch.equal(found.tensors[name], value)
    with pytest.raises(RunDirectoryError, match=r"client 1 of knn-per cannot be exported: .* without --client"):
        model_of_run(pair[2], 1)


@pytest.mark.parametrize(("kind", "is_kept"), [(FedAvgClient, True), (KNNPerClient, False)])
def test_a_node_keeps_no_model_that_is_not_the_clients(kind, is_kept, tmp_path):
    """The accuracy in the file would be that of the mixture, and its tensors the network's alone."""
    member = full_batch_client(kind, tmp_path)
    member.context = replace(member.context, keeps_model=True, mean=(0.0,), std=(1.0,), classes=tuple("0123456789"))
    upload_after(member)
    assert (tmp_path / "client-00000" / "model.npz").exists() == is_kept


def test_a_novel_client_uses_the_network_alone(tmp_path):
    """It is right where the network is, here on all samples, although the neighbours have the share 1."""
    member = full_batch_client(KNNPerClient, tmp_path, **{"num-clients": 1, "knn-per.weight": 0.0})
    values = initial_arrays(member)
    member.receive({f"model/{name}": value for name, value in values.items()}, 0)
    data = member.context.data
    with torch.no_grad():
        data.test_labels.copy_(member.model(data.test_images).argmax(dim=1))
    assert evaluate(member.predictor(), data.test_images, data.test_labels).accuracy < 1
    member.context = replace(member.context, client=1)
    counts, number = assess(member, {f"model/{name}": value[None] for name, value in values.items()}, QuerySpec())
    assert (counts[CORRECT].tolist(), number) == ([7], 7)
