"""FedDF in federations: its special case, what a distillation changes, and models that it cannot distil."""

from typing import Any

import numpy as np
import pytest

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint
from hyperfl_flwr.core.errors import ConfigError
from strategies.feddf import FedDF

SAMPLED = {"fraction_train": 0.6, "num_rounds": 3, "local_epochs": 2}


def test_without_steps_it_is_fedavg_bit_for_bit(federate: Federate) -> None:
    """Three of five clients each in the first rounds; with steps the model differs."""
    runs = {
        name: exact(last_checkpoint(federate(method, **SAMPLED, **changes))[0])
        for name, method, changes in (
            ("fedavg", "fedavg", {}),
            ("none", "feddf", {"feddf.steps": 0}),
            ("some", "feddf", {"feddf.steps": 1}),
        )
    }
    assert runs["none"] == runs["fedavg"]
    assert runs["some"] != runs["fedavg"]


@pytest.mark.parametrize("changes", [{"num_clients": 1}, {"fraction_train": 0.2, "last_round": "sampled"}])
def test_from_a_single_model_nothing_is_learnt(changes: dict[str, Any], federate: Federate) -> None:
    """Its logits are the student's, up to rounding, which Adam would turn into whole steps: the round is FedAvg's."""
    runs = [exact(last_checkpoint(federate(method, num_rounds=2, **changes))[0]) for method in ("fedavg", "feddf")]
    assert runs[0] == runs[1]


def test_running_statistics_are_those_of_the_mean(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distillation trains all parameters, and leaves the averaged statistics of BatchNorm as they are."""
    means: list[dict[str, np.ndarray]] = []
    mean = FedDF._mean

    def recorded(self: Any) -> dict[str, np.ndarray]:
        means.append(mean(self))
        return {key: value.copy() for key, value in means[-1].items()}

    monkeypatch.setattr(FedDF, "_mean", recorded)
    arrays, _ = last_checkpoint(federate("feddf", num_rounds=1, target="own_networks:with_batchnorm"))
    (before,) = means
    equal = {key: np.array_equal(value, before[key]) for key, value in arrays.items()}
    assert {key for key, same in equal.items() if same} == {key for key in arrays if "running" in key}
    assert any("running" in key for key in arrays)


def test_a_mean_that_cannot_be_distilled_is_kept(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """With models of which the logits overflow, the round ends with FedAvg's mean."""
    plain = federate("feddf", num_rounds=1, **{"feddf.steps": 0})
    models = FedDF.models_of_clients
    monkeypatch.setattr(
        FedDF,
        "models_of_clients",
        lambda self: [{name: value * np.float32(1e30) for name, value in one.items()} for one in models(self)],
    )
    run = federate("feddf", num_rounds=1)
    assert exact(last_checkpoint(run)[0]) == exact(last_checkpoint(plain)[0])
    assert "not finite after the server's steps, so the mean of the models is kept" in (run / "server.log").read_text()


@pytest.mark.parametrize("unlabelled", ["cifar10", "npz:/nowhere/file.npz"])
def test_data_that_do_not_fit_end_the_run_before_it_begins(unlabelled: str, federate: Federate) -> None:
    with pytest.raises(ConfigError, match=r"feddf\.unlabelled: "):
        federate("feddf", **{"feddf.unlabelled": unlabelled})
    federate("feddf", num_rounds=1, **{"feddf.unlabelled": unlabelled, "feddf.steps": 0})
