"""Validation data, which are a part of the training samples so that test data stay unseen; and the global test set."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import small_settings

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint
from hyperfl_flwr.core.errors import ConfigError, DataError
from hyperfl_flwr.data.federated_data import load_federated_data, load_local_data
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.results.report import write_report

SETTINGS = RunConfig.from_flat(small_settings()).data_settings()


def test_validation_data_are_a_part_of_the_training_data():
    """A quarter of the 40 samples, 10, are validation data, whose images are tested on; 30 stay for training."""
    plain, held = load_federated_data(SETTINGS), load_federated_data(replace(SETTINGS, validation_fraction=0.25))
    places = set()
    for client in range(SETTINGS.num_clients):
        train, validation = held.train_indices(client), held.test_indices(client)
        assert (len(train), len(validation)) == (30, 10)
        assert np.array_equal(np.sort(np.concatenate([train, validation])), plain.train_indices(client))
        expected = dict(zip(plain.train_indices(client).tolist(), plain.client(client).train_images, strict=True))
        images = torch.stack([expected[index] for index in validation.tolist()])
        assert torch.equal(held.client(client).test_images, images)
        places.add(tuple(np.searchsorted(plain.train_indices(client), validation).tolist()))
    assert len(places) == SETTINGS.num_clients  # each client draws its own
    assert held.dataset.test is plain.dataset.train
    assert not np.array_equal(held.test_indices(0), held.train_indices(0)[:10])


@pytest.mark.parametrize("partition", ["similarity", "dirichlet", "iid"])
def test_a_sample_that_is_used_twice_is_held_back_wherever_it_is_used(partition: str) -> None:
    """Five clients of 600 samples share the 1,347 of digits."""
    settings = replace(SETTINGS, num_clients=5, partition=partition, train_samples=600, validation_fraction=0.2)
    held = load_federated_data(settings)
    trained, validation = (
        np.concatenate([positions(client) for client in range(5)])
        for positions in (held.train_indices, held.test_indices)
    )
    assert not np.intersect1d(trained, validation).size
    assert len(trained) + len(validation) == 5 * 600
    assert len(np.unique(trained)) < len(trained)
    assert 0.17 < len(validation) / (5 * 600) < 0.23


def test_clients_of_few_samples_that_are_used_twice_are_refused() -> None:
    settings = replace(SETTINGS, num_clients=400, train_samples=4, validation_fraction=0.2)
    with pytest.raises(DataError, match=r"client \d+ would have 4 and 0, since samples that are used more than once"):
        load_federated_data(settings)


@pytest.mark.parametrize("fraction", [0.01, 0.999])
def test_a_fraction_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(DataError, match="of the 40 training samples of client 0"):
        load_federated_data(replace(SETTINGS, validation_fraction=fraction))


def test_validation_and_global_test_data_exclude_each_other():
    changes = {"data.validation-fraction": 0.2, "data.global-test": True}
    with pytest.raises(ConfigError, match="global-test must be false with data"):
        RunConfig.from_flat(small_settings() | changes)


def test_the_global_test_accuracy_is_that_of_all_test_images(federate: Federate) -> None:
    """FedAvg's final model, which all clients share, is evaluated here again on all test images of digits."""
    run = federate("fedavg", **{"data.global-test": True})
    summary = json.loads((run / "summary.json").read_text())
    target = build_target("cnn", (1, 8, 8), 10)
    arrays, _ = last_checkpoint(run)
    values = {key.removeprefix("model/"): torch.tensor(value) for key, value in arrays.items()}
    target.load_state_dict(values, assign=True)
    images, labels = load_federated_data(SETTINGS).global_test
    assert len(labels) == 450
    expected = evaluate(target, images, labels).accuracy  # equal for all clients; the summary has the mean
    assert summary["global_test_accuracy_aggregate"] == pytest.approx(expected, rel=1e-12)
    assert 0 < summary["global_test_accuracy"] < 1
    assert json.loads((federate("fedavg") / "summary.json").read_text())["global_test_accuracy"] is None


def test_the_change_of_theta_is_recorded_from_the_second_round_on(federate: Federate) -> None:
    """It is the distance between a client's extractors after its last two rounds, as stored theta confirms."""
    run = federate("hyperfl", num_rounds=3, **{"checkpoint-every": 1})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert ["theta_change" in line for line in train] == [False, True, True]
    client = next(line for line in lines if line["kind"] == "client" and line["round"] == 3 and line["client"] == 1)
    folder = run / "clients" / "client-00001"
    before, after = (np.load(folder / f"round-{number:06d}.npz")["last/theta"] for number in (2, 3))
    assert client["theta_change"] == pytest.approx(float(np.linalg.norm(after - before)), rel=1e-4)
    assert 0 < client["theta_change"] < client["theta_norm"]


def test_a_small_natural_client_has_a_validation_sample(tmp_path):
    """15 % of two or three samples are rounded to none, and of two to one; a single sample cannot be divided."""
    clients = np.repeat(["a", "b", "c"], [2, 3, 20])
    rng = np.random.default_rng(0)
    path = tmp_path / "x.npz"

    def load(clients):
        features = {"features": rng.random((len(clients), 4)), "test_features": rng.random((4, 4))}
        np.savez(path, labels=np.arange(len(clients)) % 2, test_labels=np.arange(4) % 2, clients=clients, **features)
        changes = {"dataset": f"npz:{path}", "partition": "natural", "num_clients": len(set(clients))}
        return load_federated_data(replace(SETTINGS, validation_fraction=0.15, train_samples="auto", **changes))

    data = load(clients)
    sizes = [(len(data.train_indices(client)), len(data.test_indices(client))) for client in range(3)]
    assert sizes == [(1, 1), (2, 1), (17, 3)]
    with pytest.raises(
        DataError, match=r"makes 1 of the 1 training samples of client 0 .*leave out clients with a single"
    ):
        load(clients[1:])


def test_each_natural_client_holds_back_its_share_of_whole_groups(tmp_path):
    """Of ten groups of four samples two, whatever the classes are."""
    groups, path, rng = np.repeat(np.arange(50), 4), tmp_path / "x.npz", np.random.default_rng(0)
    features = {"features": rng.random((200, 4)), "test_features": rng.random((4, 4))}
    labels = {"labels": np.arange(200) % 2, "test_labels": np.arange(4) % 2}
    np.savez(path, clients=groups // 10, groups=groups, test_groups=np.arange(50, 54), **labels, **features)
    changes = {"dataset": f"npz:{path}", "partition": "natural", "num_clients": 5, "train_samples": "auto"}
    data = load_federated_data(replace(SETTINGS, validation_fraction=0.2, **changes))
    assert [len(data.test_indices(client)) for client in range(5)] == [8] * 5


@pytest.mark.parametrize("fraction", [1e-9, 0.02, 0.98, 1 - 1e-9])
@pytest.mark.parametrize("count", [2, 20])
def test_no_fraction_tells_how_many_samples_an_owner_has(tmp_path, fraction, count):
    """Where a share of them rounds to none or to all, one is held back, or one is left, and nothing is refused."""
    path = tmp_path / "own.npz"
    features = {"features": np.zeros((count, 4)), "test_features": np.zeros((4, 4))}
    np.savez(path, labels=np.arange(count) % 2, test_labels=np.arange(4) % 2, **features)
    owned = replace(SETTINGS.sample_format, has_owner=True)
    changes = {"dataset": f"npz:{path}", "train_samples": "auto", "sample_format": owned}
    data = load_local_data(replace(SETTINGS, validation_fraction=fraction, **changes), 1)
    held = 1 if fraction < 0.5 else count - 1
    assert (len(data.train_indices(1)), len(data.test_indices(1))) == (count - held, held)


@pytest.mark.parametrize(
    ("changes", "samples"),
    [({}, "test"), ({"data.validation-fraction": 0.2}, "validation"),
     ({"data.validation-fraction": 0.2, "keep": "best"}, "test")],
)  # fmt: skip
def test_the_report_names_the_samples_of_its_scores(
    changes: dict[str, float | str], samples: str, federate: Federate, tmp_path: Path
) -> None:
    page = write_report(federate("local", **changes), tmp_path / "report.html").read_text()
    assert f"on the client's {samples} samples" in " ".join(page.split())
    other = {"test": "validation", "validation": "test"}[samples]
    assert f"on the client's {other} samples" not in " ".join(page.split())
