"""A server's observations: stored for their owner only, and checked when they are loaded."""

import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.audit.knowledge import public_knowledge
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.storage import read_arrays, write_arrays
from hyperfl_flwr.runs.observation import (
    Observation,
    load_observation,
    load_opening,
    observation_path,
    opening_path,
    save_observation,
    save_opening,
)
from hyperfl_flwr.training.public_training import LocalSteps, PublicTraining
from strategies.engine.observations import forget_observations

SHAPE = {"input_shape": (3, 32, 32), "num_classes": 10, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.2)}


def observation() -> Observation:
    rng = np.random.default_rng(0)
    received = {"model/a.weight": rng.random((3, 2), dtype=np.float32), "model/a.bias": np.ones(3, dtype=np.float32)}
    reply = {key: value + 1 for key, value in received.items()}
    return Observation(received=received, reply=reply, num_examples=7, round=4, metrics={"train-loss": 0.25})


def knowledge(**changes: object) -> PublicKnowledge:
    config = resolved(RunConfig.from_flat(default_settings() | {"learning-rate": 0.02} | changes))
    return public_knowledge(config, **SHAPE)  # type: ignore[arg-type]


def test_an_observation_is_the_same_after_saving(tmp_path: Path) -> None:
    path = tmp_path / "observation.npz"
    save_observation(path, observation())
    found = load_observation(path)
    assert (found.num_examples, found.round, found.metrics) == (7, 4, {"train-loss": 0.25})
    for kept, original in ((found.received, observation().received), (found.reply, observation().reply)):
        assert list(kept) == list(original)
        for key, value in original.items():
            np.testing.assert_array_equal(kept[key], value)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_no_observation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "observation.npz"
    with pytest.raises(StateError, match="missing"):
        load_observation(path)
    path.write_bytes(b"nothing")
    with pytest.raises(StateError, match="damaged"):
        load_observation(path)
    save_observation(path, observation())
    arrays, meta = read_arrays(path)
    for changed in (
        (arrays, {**meta, "metrics": {"train-loss": None}}),
        (arrays, {**meta, "num-examples": 0}),
        ({key: value for key, value in arrays.items() if not key.startswith("reply")}, meta),
        ({key: value.astype(str) for key, value in arrays.items()}, meta),
        (arrays, {}),
    ):
        write_arrays(path, *changed)
        with pytest.raises(StateError, match="is not an observation"):
            load_observation(path)


def test_an_opening_is_the_same_after_saving(tmp_path: Path) -> None:
    save_opening(tmp_path, observation(), [4, 0, 2])
    path = opening_path(tmp_path, 4)
    found, clients = load_opening(path)
    assert (path.name, found.num_examples, found.round, found.metrics) == (
        "round-000004.npz",
        7,
        4,
        {"train-loss": 0.25},
    )
    assert clients == [0, 2, 4]
    for kept, original in ((found.received, observation().received), (found.reply, observation().reply)):
        assert list(kept) == list(original)
        for key, value in original.items():
            np.testing.assert_array_equal(kept[key], value)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    with pytest.raises(StateError, match="is not an observation"):
        load_observation(path)
    save_observation(path, observation())
    with pytest.raises(StateError, match="is not an opening"):
        load_opening(path)


@pytest.mark.parametrize("clients", [[], [1, 1]])
def test_an_opening_names_each_client_of_the_sum_once(clients: list[int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be distinct, and at least one"):
        save_opening(tmp_path, observation(), clients)
    assert not list(tmp_path.iterdir())


def test_resume_deletes_the_observations_and_openings_of_later_rounds(tmp_path: Path) -> None:
    """Rounds 1 to 4 are recorded; after round 2 is restored, rounds 3 and 4 are repeated."""
    for number in range(1, 5):
        seen = replace(observation(), round=number)
        save_opening(tmp_path, seen, [0, 1])
        (tmp_path / "observations").mkdir(exist_ok=True)
        save_observation(observation_path(tmp_path, number, 0), seen)
    forget_observations(tmp_path, 2)
    kept = [opening_path(tmp_path, number) for number in (1, 2)]
    kept += [observation_path(tmp_path, number, 0) for number in (1, 2)]
    assert sorted(tmp_path.glob("*/*")) == sorted(kept)


def test_settings_that_matter_come_from_the_configuration() -> None:
    """Clipping and steps are the method's; 5 epochs over 120 samples in batches of 50 are 15 steps."""
    assert knowledge().steps.clip_norm == 50.0
    assert knowledge().training.hypernetwork.embedding_dim == 64
    assert knowledge(method="fedavg").steps.clip_norm == 0.0
    assert knowledge(method="fedavg").training.hypernetwork is None
    assert knowledge(**{"fedprox.mu": 0.3}).steps.pull == 0.0
    assert knowledge(**{"method": "fedprox", "fedprox.mu": 0.3}).steps.pull == 0.3
    assert knowledge().num_steps(120) == 15
    assert knowledge(**{"method": "pfedhn", "pfedhn.local-steps": 3}).num_steps(120) == 3
    assert knowledge(**{"method": "it-pfl", "pfedhn.local-steps": 3}).num_steps(120) == 3
    assert knowledge(**{"method": "it-pfl", "pfedhn.clip-norm": 7.0}).steps.clip_norm == 7.0
    assert knowledge(**{"pfedhn.local-steps": 3}).num_steps(120) == 15
    assert knowledge(**{"hyperfl.embedding": "common-frozen"}).training.hypernetwork.embedding_frozen
    assert knowledge().steps.learning_rate == 0.02
    assert knowledge(method="priv-hfl").num_steps(120) == 20
    assert knowledge(method="priv-hfl").training.generator is None
    assert knowledge(**{"method": "priv-hfl", "priv-hfl.distill": True}).training.generator.pseudo_samples == 100
    assert [knowledge(method=name).form for name in ("hyperfl", "it-pfl", "priv-hfl")] == [
        "values", "decrease", "increase",
    ]  # fmt: skip


def test_the_encoder_has_steps_of_its_own() -> None:
    """The encoder takes one step on up to 500 samples, or, if encoder-steps is 0, as many steps as the model."""
    encoder = knowledge(method="it-pfl").training.encoder
    assert (encoder.steps.num_steps(2000), encoder.steps.batch_size, encoder.steps.learning_rate) == (1, 500, 0.02)
    steps = {"it-pfl.encoder-steps": 0, "pfedhn.local-steps": 7}
    assert knowledge(**{"method": "it-pfl", **steps}).training.encoder.steps.num_steps(2000) == 7
    steps = {"it-pfl.encoder-steps": 0, "local-epochs": 2}
    assert knowledge(**{"method": "it-pfl", **steps}).training.encoder.steps.num_steps(2000) == 8


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="keys and shapes"):
        Observation(received={"a/b": np.ones(2)}, reply={"a/b": np.ones(3)}, num_examples=1)
    with pytest.raises(ValueError, match="num_examples"):
        Observation(received={"a/b": np.ones(2)}, reply={"a/b": np.ones(2)}, num_examples=0)
    with pytest.raises(ValueError, match="need 3 numbers"):
        PublicKnowledge(
            target="cnn", input_shape=(3, 8, 8), num_classes=2, mean=(0.0,), std=(1.0,),
            training=PublicTraining(steps=LocalSteps(epochs=1, batch_size=1, learning_rate=0.1)),
        )  # fmt: skip
    with pytest.raises(ValueError, match="must be positive"):
        LocalSteps(epochs=0, batch_size=1, learning_rate=0.1)
