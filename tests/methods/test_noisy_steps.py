"""Runs with differential privacy of single records: training, releases, and what is refused."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import small_settings

from clients.engine.context import client_setting
from clients.fedavg import FedAvgClient
from clients.fedrep import FedRepClient
from hyperfl_flwr.app.methods import check_run, client_of
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.server import run as run_server
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import last_checkpoint, metrics
from hyperfl_flwr.contract.grids import KilledError, KilledGrid, RepeatingGrid, Settings, plain_grid
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.privacy.accounting import record_epsilon, record_noise
from hyperfl_flwr.privacy.budget import FILE, PrivacyBudget, read_record
from hyperfl_flwr.privacy.release import Release
from hyperfl_flwr.privacy.spent import spent
from hyperfl_flwr.runs.privacy_statement import statement_text
from hyperfl_flwr.runs.run_directory import settings_of

NOISY: dict[str, Any] = {"dp.epsilon": 8.0, "target": "mlp"}

KINDS = [
    ("fedavg", "noised"), ("fedprox", "noised"), ("prifedsync", "noised"), ("fedakd", "noised"),
    *((method, heads) for method in ("fedrep", "hyperfl-frozen", "ppsgd") for heads in ("noised", "published")),
]  # fmt: skip
"""Methods with noisy steps, and ways to train their private classifiers."""


def member(config: RunConfig, folder: Path, client: int = 0, budget: PrivacyBudget | None = None) -> Any:
    """Return a client that has received the model and, in the first round, has no private state."""
    data = load_federated_data(config.data_settings())
    setting = client_setting(config, data, client, torch.device("cpu"), PrivateState(folder, "experiment", client))
    return client_of(config.method)(replace(setting, round=1, budget=budget))


def test_all_of_them_are_tested() -> None:
    noisy = {name for name in METHODS if client_of(name).has_noisy_steps}
    assert {method for method, _ in KINDS} == noisy
    assert {name: method.private_classifier for name, method in METHODS.items()} == {
        name: bool(client_of(name).heads) for name in METHODS
    }


@pytest.mark.parametrize(("method", "heads"), KINDS)
def test_a_run_takes_the_stated_steps(method: str, heads: str, federate: Federate) -> None:
    """Two noisy steps of each client in each round; all numbers are finite, and the noise has moved the model."""
    run = federate(method, **NOISY, **{"dp.heads": heads})
    rows = [row for row in metrics(run) if row["kind"] == "client"]
    assert len(rows) == 2 * NUM_CLIENTS
    # All steps so far; only those of the round if nothing bounds what they release.
    so_far = 2 if heads == "published" else 4
    assert {(row["round"], row["private_steps"]) for row in rows} == {(1, 2), (2, so_far)}
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    plain = federate(method, target="mlp")
    assert not any("private_steps" in row for row in metrics(plain))
    (noisy, _), (quiet, _) = last_checkpoint(run), last_checkpoint(plain)
    assert all((noisy[key] != quiet[key]).any() for key in quiet)


@pytest.mark.parametrize(("method", "heads"), KINDS)
def test_a_client_states_its_release_before_it_trains(method: str, heads: str, tmp_path: Path) -> None:
    """The noise is that of the whole run; with a published head nothing bounds the upload."""
    config = resolved(RunConfig.from_flat(small_settings(method=method, **NOISY, **{"dp.heads": heads})))
    spent: list[tuple[int, Release | None]] = []

    class Recorded(PrivacyBudget):
        def spend(self, server_round: int, release: Release | None) -> None:
            spent.append((server_round, release))
            raise RuntimeError("stop before training")

    one = member(config, tmp_path, budget=Recorded(path=tmp_path / "privacy.jsonl", experiment="e", client=0))
    start = [value.numpy() for value in _initial(one).values()]
    with pytest.raises(RuntimeError, match="stop before training"):
        one.fit(start, {"round": 3, "version": 0, "kept-version": 0})
    ((number, release),) = spent
    assert number == 3
    if heads == "published":
        assert release is None
        return
    assert release is not None
    assert (release.unit, release.mechanism, release.sample_rate, release.steps) == (
        "record",
        "sampled-gaussian",
        0.5,
        2,
    )
    # 40 samples, batches of 20, one epoch, two rounds
    assert release.noise_multiplier == record_noise(8.0, 1e-5, 0.5, 4)
    assert record_epsilon(release.noise_multiplier, 0.5, 4, 1e-5) <= 8.0


def _initial(one: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    module = one.groups[next(iter(one.shared))]
    return {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype) / 10
        for name, value in module.state_dict().items()
    }


def test_noise_follows_from_the_clients_number_of_samples(tmp_path: Path) -> None:
    """A client with fewer samples than a batch takes all of them in each step."""
    flat = small_settings(method="fedavg", **NOISY, **{"batch-size": 64, "local-epochs": 3})
    release = member(resolved(RunConfig.from_flat(flat)), tmp_path).release()
    assert (release.sample_rate, release.steps) == (1.0, 3)
    assert release.noise_multiplier == record_noise(8.0, 1e-5, 1.0, 6)


def test_without_noise_nothing_is_released_and_training_is_plain(tmp_path: Path) -> None:
    one = member(resolved(RunConfig.from_flat(small_settings(method="fedavg"))), tmp_path)
    assert one.release() is None
    assert one.step_noise() is None


@pytest.mark.parametrize("clip_norm", [1e-33, 9e-7, 1.1e6])
def test_a_clipping_norm_beyond_float32_is_refused(clip_norm: float) -> None:
    """The server chooses the norm; the noise, a multiple of it, must not vanish. Nodes validate the settings, too."""
    with pytest.raises(
        ConfigError, match=r"dp\.clip-norm must be (greater|less) than or equal to (0\.000001|1000000); got"
    ):
        RunConfig.from_flat(small_settings(method="fedavg", **NOISY, **{"dp.clip-norm": clip_norm}))


class Forgetful(FedAvgClient):
    """Replaces the training, without noisy steps."""

    def train(self, rng: Any) -> dict[str, float]:
        return {"train-loss": 1.0}


class Split(FedRepClient):
    """Counts a step less than it should."""

    def train(self, rng: Any) -> dict[str, float]:
        return super().train(rng) | {"private-steps": 1.0}


@pytest.mark.parametrize(("kind", "method", "steps"), [(Forgetful, "fedavg", "0"), (Split, "fedrep", "1.0")])
def test_training_that_takes_other_steps_is_no_release(kind: Any, method: str, steps: str, tmp_path: Path) -> None:
    """The client fails instead of uploading what the stated noise does not protect."""
    config = resolved(RunConfig.from_flat(small_settings(method=method, **NOISY)))
    one = kind(member(config, tmp_path).context)
    with pytest.raises(RuntimeError, match=rf"took {steps} noisy steps instead of 2; .* has_noisy_steps"):
        one.fit([value.numpy() for value in _initial(one).values()], {"round": 1, "version": 0, "kept-version": 0})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"method": "hyperfl"},
            r"dp\.epsilon must be 0 with hyperfl, got 8: .* take one of fedakd, fedavg, fedprox, ",
        ),
        ({"method": "local"}, r"must be 0 with local, got 8: its local training has no noisy steps"),
        ({"method": "priv-hfl"}, "must be 0 with priv-hfl"),
        ({"privacy.clip-norm": 2.0}, r"must be 0 with privacy\.clip-norm = 2, got 8: .* set privacy\.clip-norm to 0"),
        ({"target": "resnet18"}, "must be 0 with target = resnet18, got 8: its BatchNorm mixes the samples"),
        ({"target": "own_networks:with_batchnorm"}, "its BatchNorm mixes the samples .* GroupNorm"),
    ],
)
def test_what_has_no_guarantee_is_refused(changes: Settings, problem: str) -> None:
    flat = small_settings(method="fedavg", **NOISY) | changes
    with pytest.raises(ConfigError, match=problem):
        check_run(RunConfig.from_flat(flat), (1, 8, 8), 10)


def test_more_rounds_are_refused(federate: Federate) -> None:
    """The noise was computed for the first number of rounds; the same number resumes."""
    run = federate("fedavg", **NOISY, num_rounds=1)
    flat = settings_of(run) | {"resume": str(run), "num-rounds": 2}
    with pytest.raises(RunDirectoryError, match=r"num-rounds was 1, now 2; with dp\.epsilon it must stay"):
        run_server(plain_grid(2, flat), RunConfig.from_flat(flat))


def spent_of(run: Path) -> float:
    """Return the largest epsilon that the record of a simulation's clients has."""
    rows = spent(read_record(run / "clients" / FILE), 1e-5)
    return max(row.record_epsilon for row in rows if not row.experiment)


def stated(run: Path) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((run / "summary.json").read_text())["privacy"]
    return entry


@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_repeated_rounds_are_stated(method: str, federate: Federate) -> None:
    """Rounds 2 to 4 of 4 run twice: the epsilon is that of all noisy steps, as in the clients' record."""
    plan: dict[str, Any] = {**NOISY, "num_rounds": 4, "checkpoint-every": 4, "num_clients": 2}
    straight = federate(method, **plan)
    assert stated(straight)["epsilon"] == 8.0 >= spent_of(straight)
    killed = straight.parent / "killed"
    with pytest.raises(KilledError):
        federate(method, grid=partial(KilledGrid, in_round=4), **plan, output=str(killed))
    resumed = federate(method, **plan, output=str(killed), resume=str(killed))
    entry = stated(resumed)
    assert entry["horizon"] == 8
    assert entry["epsilon"] == pytest.approx(spent_of(resumed), rel=1e-6)
    assert entry["epsilon"] > 8.5
    assert "epsilon 8.00" not in statement_text(entry)


def test_messages_that_are_delivered_twice_are_stated(federate: Federate) -> None:
    run = federate("fedavg", grid=RepeatingGrid, **NOISY)
    assert stated(run)["epsilon"] == pytest.approx(spent_of(run), rel=1e-6)
    assert stated(run)["epsilon"] > 8.5


def test_noisy_steps_in_secure_sums(federate: Federate) -> None:
    """A secure run has no metric of steps, which is a number of a single client."""
    run = federate("fedrep", 4, **NOISY, **{"secagg.enabled": True, "num_clients": 4})
    assert not any("private_steps" in row for row in metrics(run))
    assert all(math.isfinite(row["train_loss"]) for row in metrics(run) if row["kind"] == "train")


@pytest.mark.parametrize("trains", ["model", "classifier"])
def test_local_training_of_the_classifier_alone(trains: str, federate: Federate) -> None:
    """The extractors of all clients stay the initial one, and the classifiers differ and learn."""
    run = federate("local", **{"local.trains": trains, "local-epochs": 5, "num_rounds": 3})
    config = resolved(RunConfig.from_flat(settings_of(run)))
    states = [PrivateState(run / "clients", _experiment(run), client).load(3) for client in range(NUM_CLIENTS)]
    start = member(config, run).initial_private()["model"]
    same = [all((state[f"model/{name}"] == value.numpy()).all() for state in states) for name, value in start.items()]
    names = list(start)
    is_body = [name.startswith("extractor.") for name in names]
    assert same == (is_body if trains == "classifier" else [False] * len(names))
    rows = [row for row in metrics(run) if row["kind"] == "train"]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def _experiment(run: Path) -> str:
    from hyperfl_flwr.runs.run_directory import read_manifest

    return str(read_manifest(run)["experiment"])
