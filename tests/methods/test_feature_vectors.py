"""Federations on feature vectors: every method trains on them, and they are refused where images are needed."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import small_settings
from sklearn.datasets import load_digits
from torch.nn import functional

from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import recorded_round
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import current_private, last_checkpoint, outcome
from hyperfl_flwr.contract.grids import KilledError, KilledGrid, PermutedGrid, Settings
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.rng import numpy_generator, torch_generator
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.launch.planning import plan
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics

NATURAL: Settings = {
    "data.partition": "natural", "data.train-samples": "auto", "data.test-samples": "auto", "priv-hfl.distill": False,
}  # fmt: skip


@pytest.fixture
def digits(tmp_path: Path) -> Callable[[int], Settings]:
    """Return a function that writes n of scikit-learn's digits as vectors [n, 64] of five wards of unequal size."""

    def write(number: int) -> Settings:
        bunch = load_digits()
        wards = np.array([f"ward-{place}" for place in (0, 0, 0, 1, 1, 2, 2, 3, 4)])
        np.savez(
            tmp_path / "digits.npz",
            features=bunch.data[:number],
            labels=bunch.target[:number],
            clients=wards[np.arange(number) % len(wards)],
        )
        return {"dataset": f"npz:{tmp_path / 'digits.npz'}", **NATURAL}

    return write


def losses(run: Path) -> list[float]:
    return [row[kind] for row in read_metrics(run) for kind in ("personalized_loss", "aggregate_loss") if kind in row]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fedbn"])
def test_every_method_trains_on_them_with_dropout(
    method: str, digits: Callable[[int], Settings], federate: Federate
) -> None:
    """Two rounds (one per phase with it-pfl) give a complete run with finite losses.

    FedBN refuses the built-in perceptrons, which have no normalisation layers. FedFTG's generator is of images.
    """
    settings = digits(180) | {"target": "mlp-500", "fedftg.iterations": 0}
    run = federate(method, **settings)
    assert np.isfinite(losses(run)).all()
    summary = json.loads((run / "summary.json").read_text())
    assert len(summary["test_accuracy_per_client"]) == NUM_CLIENTS
    assert read_manifest(run)["partitioned_by"] == "natural"
    assert sum(map(sum, read_manifest(run)["label_counts"]["train"])) == 135


def test_the_same_seed_is_bit_equal_whatever_the_nodes_are_called(
    digits: Callable[[int], Settings], federate: Federate
) -> None:
    """A second run with other node ids and another order of nodes and replies gives the same bits."""
    settings = digits(180) | {"target": "mlp-500"}
    run = federate("it-pfl", **settings)
    assert [row["phase"] for row in read_metrics(run) if row["kind"] == "train"] == ["embeddings", "fine-tuning"]
    assert outcome(run) == outcome(federate("it-pfl", grid=PermutedGrid, **settings))


@pytest.mark.parametrize("method", ["fedavg", "it-pfl"])
def test_the_number_of_nodes_does_not_change_the_dropout(
    method: str, digits: Callable[[int], Settings], federate: Federate
) -> None:
    """One round on 1, 2 and 5 nodes gives equal results up to the rounding of float32 sums in another order.

    The encoder is averaged, since Adam would enlarge the rounding.
    """
    settings: dict[str, Any] = digits(180) | {"target": "mlp-500", "num_rounds": 1}
    settings |= {"it-pfl.fine-tune-rounds": 0, "it-pfl.encoder-optimiser": "mean"}
    runs = [federate(method, nodes, **settings) for nodes in (1, 2, 5)]
    expected, _ = last_checkpoint(runs[0])
    for run in runs[1:]:
        assert current_private(run) == current_private(runs[0])
        for key, value in last_checkpoint(run)[0].items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-7, err_msg=key)


def test_a_killed_run_goes_on_with_the_dropout_of_its_round(
    digits: Callable[[int], Settings], federate: Federate
) -> None:
    """A run killed in round 3 and resumed equals a straight run."""
    settings: dict[str, Any] = digits(180) | {"target": "mlp-500", "num_rounds": 3, "checkpoint_every": 1}
    straight = federate("fedavg", **settings)
    settings["output"] = str(straight.parent / "run-111")
    with pytest.raises(KilledError):
        federate("fedavg", grid=partial(KilledGrid, in_round=3), **settings)
    assert outcome(federate("fedavg", resume=settings["output"], **settings | {"output": ""})) == outcome(straight)


def test_a_step_is_one_of_gradient_descent_with_the_units_left_out(
    digits: Callable[[int], Settings], federate: Federate
) -> None:
    """Two rounds of FedAvg equal autograd steps with dropout masks drawn from the same seeds, in float64.

    Each client takes one step on all its samples. The masks differ between rounds and between clients.
    """
    rate = 0.1
    settings = digits(90) | {"target": "mlp-500", "batch-size": 90, "momentum": 0.0, "weight-decay": 0.0}
    run = federate("fedavg", **settings, **{"learning-rate": rate, "checkpoint-every": 1})
    data = load_federated_data(RunConfig.from_flat(read_manifest(run)["settings"]).data_settings())
    target = build_target("mlp-500", (64,), 10)
    state = {key: value.double() for key, value in initial_state(target, torch_generator(0, "model")).items()}
    for server_round in (1, 2):
        steps, sizes = [], []
        for client in range(NUM_CLIENTS):
            own = data.client(client)
            order = numpy_generator(0, "training", client, server_round).permutation(len(own.train_labels))
            numbers = torch.rand(len(order), 500, generator=torch_generator(0, "dropout", client, server_round))
            leaves = {key: value.clone().requires_grad_() for key, value in state.items()}
            hidden = own.train_images[order].double()
            for name in ("extractor.fc1", "extractor.fc2"):
                hidden = (hidden @ leaves[f"{name}.weight"].T + leaves[f"{name}.bias"]).clamp(min=0)
            hidden = torch.where(numbers < 0.2, 0.0, hidden / 0.8)
            logits = hidden @ leaves["classifier.weight"].T + leaves["classifier.bias"]
            gradients = torch.autograd.grad(functional.cross_entropy(logits, own.train_labels[order]), leaves.values())
            steps.append(gradients)
            sizes.append(len(order))
        for place, key in enumerate(state):
            mean = sum(size * step[place] for size, step in zip(sizes, steps, strict=True)) / sum(sizes)
            state[key] = state[key] - rate * mean
        arrays, _ = Checkpoints(run / "checkpoints").load(server_round)
        for key, value in state.items():
            np.testing.assert_allclose(arrays[f"model/{key}"], value, rtol=1e-4, atol=1e-6, err_msg=key)


def test_fedavg_learns_digits(digits: Callable[[int], Settings], federate: Federate) -> None:
    """Three rounds of two epochs reach more than 0.88 test accuracy; guessing gives 0.1."""
    settings: dict[str, Any] = digits(1797) | {"local_epochs": 2, "num_rounds": 3, "learning_rate": 0.05}
    summary = json.loads((federate("fedavg", target="mlp-500", **settings) / "summary.json").read_text())
    assert summary["test_accuracy_aggregate"] > 0.88


def test_the_two_optimisers_of_hyperfl_leave_out_the_same_units(
    digits: Callable[[int], Settings], federate: Federate
) -> None:
    """`factored` gives the same parameters and evaluation losses as `plain`, which uses autograd."""
    settings: dict[str, Any] = digits(180) | {"target": "mlp-500", "num_rounds": 1}
    runs = [federate("hyperfl", **settings, **{"hyperfl.head-optimiser": name}) for name in ("plain", "factored")]
    expected, got = (last_checkpoint(run)[0] for run in runs)
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-3, atol=1e-5, err_msg=key)
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-4)


@pytest.mark.parametrize("target", ["cnn", "lenet", "resnet18"])
def test_convolutions_refuse_them(target: str, digits: Callable[[int], Settings], federate: Federate) -> None:
    """The error comes before anything is written: when planning, and when the server learns of the nodes' data."""
    settings = digits(90) | {"target": target}
    message = (
        rf"{target} target needs images .*, got vectors of the shape \(64,\), which mlp and mlp-500 take "
        r"\(target=mlp\); choose"
    )
    with pytest.raises(ConfigError, match=message):
        federate("fedavg", **settings)
    with pytest.raises(ConfigError, match=message):
        plan(small_settings(**settings))


def test_distillation_refuses_them(digits: Callable[[int], Settings], federate: Federate) -> None:
    settings = digits(90) | {"target": "mlp", "priv-hfl.distill": True}
    with pytest.raises(ConfigError, match=r"priv-hfl\.distill needs images .* vectors of the shape \(64,\); set it to"):
        federate("priv-hfl", **settings)


def test_attacks_refuse_vectors_and_dropout(digits: Callable[[int], Settings], federate: Federate) -> None:
    """Attacks are refused both for a recorded round and when a new one is set up."""
    settings = digits(90)
    run = federate("fedavg", **settings, **{"target": "mlp", "audit.clients": "0", "audit.rounds": "1"})
    vectors = r"the attacks search for images, the data are vectors of the shape \(64,\); that is no proof of safety"
    with pytest.raises(ConfigError, match=vectors):
        recorded_round(run, {})[0].knowledge()
    del settings["data.train-samples"]
    few = Options(num_images=NUM_CLIENTS, samples=1)
    with pytest.raises(ConfigError, match=vectors):
        make_attacked_round(small_settings(**settings, method="fedavg", target="mlp"), few)
    with pytest.raises(ConfigError, match=r"cannot repeat local steps with dropout, which the mlp-500 target has"):
        make_attacked_round(small_settings(method="fedavg", target="mlp-500"), few)
