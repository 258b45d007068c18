"""PriFedSync: the elastic pull, its special case FedAvg, and what is stated about noisy steps."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import small_settings
from test_noisy_steps import NOISY, member

from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.privacy.accounting import central_limit_epsilon, record_epsilon, record_noise
from hyperfl_flwr.privacy.gaussian_mechanism import smallest_epsilon


def test_a_full_pull_without_noise_is_fedavg_bit_for_bit(federate: Federate) -> None:
    """Four rounds with three of five clients each; with the default pull the mean differs."""
    plan: dict[str, Any] = {"fraction_train": 0.6, "num_rounds": 4, "target": "own_networks:with_batchnorm"}
    one = federate("fedavg", **plan, **{"learning-rate": 0.05})
    same, other = (
        federate("prifedsync", **plan, **{"learning-rate": 0.05, "prifedsync.pull": pull}) for pull in (1.0, 0.1)
    )
    assert exact(last_checkpoint(same)[0]) == exact(last_checkpoint(one)[0])
    assert metrics(same) == metrics(one)
    assert exact(last_checkpoint(other)[0]) != exact(last_checkpoint(one)[0])


def test_the_own_model_is_pulled_before_it_is_trained(tmp_path: Path) -> None:
    """With a vanishing rate, theta + pull (mean - theta) is sent and kept; the evaluation before is of the mean."""
    flat = small_settings(method="prifedsync", **{"learning-rate": 1e-30, "prifedsync.pull": 0.25})
    config = resolved(RunConfig.from_flat(flat))
    one = member(config, tmp_path)
    generator = torch.Generator().manual_seed(3)
    shapes = {name: value.shape for name, value in one.model.state_dict().items()}
    own, mean = ({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(2))
    one.context.state.save(3, {f"own/{name}": value.numpy() for name, value in own.items()})
    sent = [value.numpy() for value in mean.values()]
    arrays, _, found = one.fit(sent, {"round": 7, "version": 3, "kept-version": 3})
    for name, array in zip(shapes, arrays, strict=True):
        np.testing.assert_allclose(array, own[name] + 0.25 * (mean[name] - own[name]), rtol=0, atol=1e-6)
    kept, trained = one.context.state.load(7), exact(dict(zip(shapes, arrays, strict=True)))
    assert exact({key.partition("/")[2]: value for key, value in kept.items()}) == trained
    received = member(config, tmp_path)
    _, _, expected = received.evaluate(sent, {"version": 7})
    assert found["aggregate-loss"] == expected["aggregate-loss"] != found["personalized-loss"]
    stored = {key: torch.tensor(value) for key, value in kept.items()}
    assert exact({key: value.numpy() for key, value in received.personalized_model(stored).items()}) == trained


def test_the_statement_has_what_was_taken_and_the_papers_number(federate: Federate) -> None:
    """One of two clients in rounds 1 to 3, both in round 4: the epsilon of the busier one, by both accountants."""
    run = federate("prifedsync", num_clients=2, num_rounds=4, fraction_train=0.5, **NOISY)
    rows = [row for row in metrics(run) if row["kind"] == "client" and row["round"] == 4]
    steps = int(max(row["private_steps"] for row in rows))
    assert 4 < steps <= 8
    noise, entry = record_noise(8.0, 1e-5, 0.5, 8), json.loads((run / "summary.json").read_text())["privacy"]
    assert (entry["epsilon"], entry["unit"], entry["reason"]) == (8.0, "record", None)
    assert entry["epsilon_taken"] == pytest.approx(record_epsilon(noise, 0.5, steps, 1e-5))
    mu = 0.5 * math.sqrt(steps * (math.exp(1 / noise**2) - 1))
    assert entry["epsilon_central_limit"] == pytest.approx(smallest_epsilon(1 / mu, 1e-5, 1.0))
    said = f"({entry['epsilon_taken']:.2f} for the steps taken; the central limit says"
    assert said in (run / "server.log").read_text()


def test_the_central_limit_is_no_bound() -> None:
    """600 steps of a twelfth: close to the accountant. Few steps of a large batch: far below it."""
    usual = (2.367, 1 / 12, 600, 1e-5)
    assert central_limit_epsilon(*usual) == pytest.approx(record_epsilon(*usual), rel=0.05)
    assert central_limit_epsilon(0.8, 0.01, 10, 1e-5) < 0.6 * record_epsilon(0.8, 0.01, 10, 1e-5)
    assert central_limit_epsilon(1.0, 0.1, 0, 1e-5) == 0
    assert central_limit_epsilon(0.0, 0.1, 1, 1e-5) == math.inf
    with pytest.raises(ValueError, match="the sample rate must be above 0"):
        central_limit_epsilon(1.0, 0.0, 1, 1e-5)


@pytest.mark.parametrize("pull", [0.0, 1.1])
def test_a_pull_is_a_share(pull: float) -> None:
    with pytest.raises(ConfigError, match=r"prifedsync\.pull must be (greater|less) than"):
        RunConfig.from_flat(small_settings(method="prifedsync", **{"prifedsync.pull": pull}))
