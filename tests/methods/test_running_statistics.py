"""BatchNorm in a federation: PRIV-HFL's clients keep their running statistics, the others average them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import small_settings
from torch.nn import functional

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.attacks.base import build_structure, stack
from hyperfl_flwr.attacks.ig import _simulation
from hyperfl_flwr.attacks.readout import read_out
from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import record_round
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint, private_arrays
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import group_of
from hyperfl_flwr.runs.run_directory import read_manifest
from strategies.fedavg import FedAvg

TINY = {"target": "resnet18", "num-clients": 2, "num-rounds": 1, "data.train-samples": 20, "data.test-samples": 10}
OWN = "own_networks:with_batchnorm"
NUM_PARAMETERS = 11_172_810
"""11,173,962 parameters of the CIFAR form, minus 9 * 2 * 64 for images of one channel."""


def statistics(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: value for key, value in arrays.items() if "running_" in key}


def test_priv_hfl_keeps_them_on_the_client(federate: Federate) -> None:
    """Messages hold parameters and generator only, and the clients' statistics differ."""
    run = federate("priv-hfl", **TINY)
    one, two = (statistics(arrays) for arrays in private_arrays(run).values())
    assert len(one) == 40
    assert all((one[key] != two[key]).any() for key in one if key.endswith("running_mean"))
    sent = last_checkpoint(run)[0]
    assert sent["changes/theta"].shape == (NUM_PARAMETERS,)
    assert {group_of(key) for key in sent} == {"changes", "generator", "server"}
    summary = json.loads((run / "summary.json").read_text())
    shared = sum(value.nbytes for key, value in sent.items() if not key.startswith("server/"))
    assert summary["bytes_up_per_client_round"] == summary["bytes_down_per_client_round"] == shared


def test_fedavg_averages_them(federate: Federate) -> None:
    """After one step a running mean is a tenth of the batch mean, averaged over both clients (first layer)."""
    run = federate("fedavg", **TINY, **{"data.partition": "iid"})
    arrays, _ = last_checkpoint(run)
    assert len(statistics(arrays)) == 40
    data = load_federated_data(RunConfig.from_flat(read_manifest(run)["settings"]).data_settings())
    target = build_target("resnet18", (1, 8, 8), 10)
    weight = initial_state(target, torch_generator(0, "model"))["extractor.conv1.weight"]
    images = torch.cat([data.client(client).train_images for client in range(2)])  # both clients have equally many
    expected = 0.1 * functional.conv2d(images, weight, padding=1).mean(dim=(0, 2, 3))
    got = torch.from_numpy(arrays["model/extractor.bn1.running_mean"])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "rate"), [("pfedme", "pfedme.server-rate"), ("scaffold", "scaffold.server-learning-rate")]
)
def test_a_step_of_the_server_beyond_the_mean_is_of_parameters_alone(
    method: str, rate: str, federate: Federate
) -> None:
    """Running statistics are those of the rate 1; twenty times their way would make variances negative."""
    changes = TINY | {"target": OWN, "data.partition": "iid"}
    plain, beyond = (last_checkpoint(federate(method, **changes, **{rate: value}))[0] for value in (1.0, 20.0))
    means = statistics(plain)
    assert len(means) == 2
    for key, mean in means.items():
        np.testing.assert_array_equal(beyond[key], mean)
    assert min((1 + 20 * (mean - 1)).min() for key, mean in means.items() if key.endswith("running_var")) < 0
    assert any((beyond[key] != plain[key]).any() for key in plain if key.startswith("model/") and key not in means)


def test_a_model_of_which_the_outputs_are_not_numbers_has_no_accuracy(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variances below 0 show in evaluations alone, since training normalises by batches; a warning says so."""

    def negative(_: FedAvg, means: SharedArrays) -> SharedArrays:
        return {key: -np.abs(value) - 1 if key.endswith("running_var") else value for key, value in means.items()}

    monkeypatch.setattr(FedAvg, "advance", negative)
    run = federate("fedavg", **TINY | {"target": OWN, "num-rounds": 2})
    summary, log = json.loads((run / "summary.json").read_text()), (run / "server.log").read_text()
    assert summary["test_accuracy_aggregate_per_client"] == [0, 0]
    for phase in ("round 2", "evaluation"):
        text = f"{phase}: warning: outputs of the received model are not numbers for the clients [0, 1]; they count"
        assert text in log
    assert "round 1: warning" not in log


@pytest.mark.parametrize("method", [name for name in METHODS if client_of(name).is_generated])
def test_no_hypernetwork_generates_them(method: str, federate: Federate) -> None:
    """The error says what the target has and which targets fit."""
    with pytest.raises(ConfigError, match=r"running statistics.*take cnn, lenet, mlp or mlp-500"):
        federate(method, **TINY)


def test_the_size_is_known() -> None:
    """The number of parameters is as torch counts them."""
    target = build_target("resnet18", (1, 8, 8), 10)
    assert sum(parameter.numel() for parameter in target.parameters()) == NUM_PARAMETERS
    colour = build_target("resnet18", (3, 32, 32), 10)
    assert sum(parameter.numel() for parameter in colour.parameters()) == NUM_PARAMETERS + 9 * 2 * 64
    assert torch.Size((3, 10)) == colour.to_empty(device="cpu")(torch.zeros(3, 3, 32, 32)).shape


def test_an_attack_reads_and_simulates_a_network_with_batchnorm(tmp_path: Path) -> None:
    """The client's own images reproduce the gradient read off its model, and an attack runs."""
    local = {"method": "fedavg", "batch-size": 2, "learning-rate": 0.05}
    target = make_attacked_round(small_settings(**TINY | local), Options(num_images=2))
    observed, knowledge = record_round(target, tmp_path), target.knowledge()
    assert any(key.endswith("running_var") for key in observed[0].received)
    reading, data = read_out(observed[0], knowledge), target.data().client(0)
    assert list(reading.parameters) == [name for name, _ in build_target("resnet18", (1, 8, 8), 10).named_parameters()]
    simulate = torch.func.vmap(_simulation(build_structure(knowledge), knowledge, 1))
    constants = stack([{**reading.parameters, "labels": data.train_labels}], torch.device("cpu"))
    found = simulate({"images": data.train_images[None]}, constants)
    expected = reading.gradient
    error = sum(float((found[name][0] - expected[name]).square().sum()) for name in expected)
    assert error < 1e-4 * sum(float(value.square().sum()) for value in expected.values())
    (result,) = audit(target, Options(attacks=["ig"], iterations=1), observed)["ig"].results
    assert np.isfinite(result.objective)
    assert result.images.shape == (2, 1, 8, 8)
