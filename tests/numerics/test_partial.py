"""FedPer, LG-FedAvg, FedBN: which entries stay private, and that the training is FedAvg's, bit for bit."""

import re
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest
import torch
from federations import small_settings
from members import client, initial_model, rounds

from clients.engine.partial import PartialClient
from clients.fedavg import FedAvgClient
from clients.fedbn import FedBNClient
from clients.fedper import FedPerClient
from clients.lg_fedavg import LGFedAvgClient
from clients.local import LocalClient
from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import record_round
from hyperfl_flwr.contract.folders import exact, last_checkpoint, private_arrays
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.models.groups import Entries, groups_of, initial_groups, normalisation_names
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.messages import Reduction

SGD = {"batch-size": 7, "local-epochs": 2, "momentum": 0.5, "weight-decay": 0.02}
NORMED = "own_networks:with_batchnorm"
MEAN = Reduction.MEAN_BY_EXAMPLES


def named_in_the_target(arrays):
    """Return a client's arrays by their names in the target network."""
    prefixes = {"model": "", "layers": "", "normalisation": "", "extractor": "extractor.", "classifier": "classifier."}
    return {prefixes[key.partition("/")[0]] + key.partition("/")[2]: value for key, value in arrays.items()}


def trained(kind, folder, target):
    """Return all arrays of a client after two rounds, in which it is sent its own upload."""
    member = client(kind, folder / kind.__name__, SGD, target)
    groups = initial_groups(member.new_target(), member.shared, 0)
    sent = {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
    assert list(sent) == member.keys()
    upload, stored = rounds(member, sent, 2)
    return named_in_the_target(upload), named_in_the_target(stored)


class NothingPrivate(PartialClient):
    """A method that keeps no entries."""

    shared: ClassVar[Mapping[str, Reduction]] = {"layers": MEAN, "normalisation": MEAN}


class AllPrivate(PartialClient):
    """A method that shares no entries."""

    private: ClassVar[tuple[str, ...]] = ("normalisation", "layers")


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (FedPerClient, "cnn"),
        (LGFedAvgClient, NORMED),
        (FedBNClient, NORMED),
        (NothingPrivate, NORMED),
        pytest.param(FedBNClient, "cnn", id="FedBN without normalisation layers"),
    ],
)
def test_one_client_alone_trains_fedavgs_model(kind, target, tmp_path):
    """Private and shared entries are trained as one network, so that together they are FedAvg's after two rounds."""
    upload, stored = trained(kind, tmp_path, target)
    assert not upload.keys() & stored.keys()
    member = client(FedAvgClient, tmp_path / "fedavg", SGD, target)
    expected, _ = rounds(member, initial_model(member), 2)
    assert exact(upload | stored) == exact(named_in_the_target(expected))


def test_with_all_entries_private_it_is_local(tmp_path):
    _, stored = trained(AllPrivate, tmp_path, NORMED)
    _, alone = rounds(client(LocalClient, tmp_path / "local", SGD, NORMED), {}, 2)
    assert exact(stored) == exact(named_in_the_target(alone))


@pytest.mark.parametrize("method", ["fedper", "lg-fedavg", "fedbn"])
def test_a_round_averages_the_shared_part_alone(method, federate):
    """After one round it is FedAvg's mean; each client's private part is that of its own training alone."""
    plan = {"num_rounds": 1, "learning-rate": 0.1, "target": NORMED}
    run, fedavg, local = (federate(name, **plan) for name in (method, "fedavg", "local"))
    shared, whole = (named_in_the_target(last_checkpoint(found)[0]) for found in (run, fedavg))
    kept, alone = (
        {file: named_in_the_target(arrays) for file, arrays in private_arrays(found).items()} for found in (run, local)
    )
    assert len(kept) == 5
    assert kept.keys() == alone.keys()
    for file, arrays in kept.items():
        assert arrays.keys() | shared.keys() == whole.keys()
        assert not arrays.keys() & shared.keys()
        assert exact(arrays) == exact({name: alone[file][name] for name in arrays})
    assert exact(shared) == exact({name: whole[name] for name in shared})


def test_a_secure_sum_of_classifiers_is_fedavgs(federate):
    """Both are fixed-point sums; the step of the numbers follows from the number of clients alone."""
    plan = {"secagg.enabled": True, "target": "mlp", "learning-rate": 0.1, "num_rounds": 1}
    part, whole = (last_checkpoint(federate(method, 3, **plan))[0] for method in ("lg-fedavg", "fedavg"))
    assert set(part) == {"classifier/weight", "classifier/bias"}
    assert exact(part) == exact({key: whole[key.replace("classifier/", "model/classifier.")] for key in part})


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("resnet18", 4 * 20),  # seventeen in the blocks and stem, and three in shortcuts, which are not called "bn"
        ("own_networks:build", 2),  # GroupNorm
        ("own_networks:attention", 4),  # two LayerNorms
        ("cnn", 0),
        ("mlp", 0),
    ],
)
def test_normalisation_layers_are_found_by_type(target, number):
    """Of BatchNorm with its running mean and variance."""
    network = build_target(target, (1, 8, 8), 10)
    found = normalisation_names(network)
    assert len(found) == number
    for name in found:
        assert "Norm" in type(network.get_submodule(name.rpartition(".")[0])).__name__
    if target == "resnet18":
        assert "extractor.layer2.0.downsample.1.running_var" in found


def test_entries_are_a_view_of_the_network():
    """Loading them changes the network at these entries only; others are refused."""
    network = build_target(NORMED, (1, 8, 8), 10).to_empty(device="cpu")
    before = {name: value.clone().zero_() for name, value in network.state_dict().items()}
    network.load_state_dict(before)
    group = groups_of(network)["normalisation"]
    assert isinstance(group, Entries)
    assert [name for name, _ in group.named_parameters()] == [n for n in group.state_dict() if "running" not in n]
    group.load_state_dict({name: torch.ones_like(value) for name, value in group.state_dict().items()}, assign=True)
    assert {name for name, value in network.state_dict().items() if value.all()} == set(normalisation_names(network))
    with pytest.raises(ValueError, match="expected the entries"):
        group.load_state_dict(before)


def test_fedbn_needs_normalisation_layers(federate, tmp_path):
    with pytest.raises(ConfigError, match=re.escape("target = cnn has no normalisation layers, which fedbn keeps")):
        federate("fedbn", target="cnn")
    assert not list(tmp_path.iterdir())


def test_a_joining_client_trains_its_normalisation_layers_alone(federate, tmp_path):
    """With the shared layers as constants: they keep their values, and the private ones all change."""
    run = federate("fedbn", num_rounds=1)
    sent = {key: torch.tensor(value) for key, value in last_checkpoint(run)[0].items()}
    member = client(FedBNClient, tmp_path, SGD, NORMED)
    member.receive({key: value.numpy() for key, value in sent.items()}, 0)
    start = {name: value.clone() for name, value in member.model.state_dict().items()}
    member.join(2, np.random.default_rng(0))
    moved = {name for name, value in member.model.state_dict().items() if not torch.equal(value, start[name])}
    assert moved == set(normalisation_names(member.model))


@pytest.mark.parametrize(("method", "target"), [("lg-fedavg", "cnn"), ("fedbn", "own_networks:attention")])
def test_labels_are_read_off_a_shared_classifier(method, target, tmp_path):
    """After one step on three images, the gradient of the classifier's bias gives their labels."""
    attacked = make_attacked_round(
        small_settings(**{"method": method, "target": target, "batch-size": 3, "momentum": 0.0}), Options(num_images=3)
    )
    (result,) = audit(attacked, Options(attacks=["idlg"]), record_round(attacked, tmp_path))["idlg"].results
    assert result.labels.tolist() == sorted(attacked.data().client(0).train_labels.tolist())
