"""The engine that `auto` chooses: one process for short runs, Ray for long ones."""

import math
from pathlib import Path

import pytest
from federations import small_settings

from hyperfl_flwr import ROOT
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.launch.engine_choice import RAY_SECONDS, chosen_engine, sample_operations, work_seconds
from hyperfl_flwr.launch.planning import plan
from hyperfl_flwr.launch.sizing import Machine


def test_that_the_engines_agree_is_said_of_equal_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `threads = auto` they are not equal where cores are left over, and the last bits differ."""
    monkeypatch.setenv("HYPERFL_CORES", "8")
    plans = [plan({"output": str(tmp_path / "run"), "device": "cpu"}, 2, engine) for engine in ("in-process", "ray")]
    assert [planned.threads for planned in plans] == [1, 4]
    page, commands = ((ROOT / "docs" / name).read_text() for name in ("how-to/engines.md", "reference/commands.md"))
    assert "With equal `threads` the numbers are the same" in page
    assert commands.count("All give the same numbers with equal `threads`.") == 2


def planned_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cores: int, **changes: Scalar) -> str:
    monkeypatch.setenv("HYPERFL_CORES", str(cores))
    keys = {key.replace("_", "-"): value for key, value in changes.items()}
    return plan({"output": str(tmp_path / "run"), "device": "cpu", **keys}).engine


def test_the_default_run_needs_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times as many rounds do, unless there is only one core, on which Ray shares nothing."""
    assert planned_engine(tmp_path, monkeypatch, cores=2) == "in-process"
    assert planned_engine(tmp_path, monkeypatch, cores=2, num_rounds=1000) == "ray"
    assert planned_engine(tmp_path, monkeypatch, cores=1, num_rounds=1000) == "in-process"
    with pytest.raises(ConfigError, match="the engine must be auto, ray or in-process, got mars"):
        plan({"output": str(tmp_path / "run")}, engine="mars")


def test_ray_pays_once_it_saves_more_than_it_takes() -> None:
    """With n processes it saves 1 - 1/n of the work."""
    config = RunConfig.from_flat(small_settings(method="fedavg", output=""))
    data = load_federated_data(config.data_settings())
    of_round = work_seconds(config.model_copy(update={"num_rounds": 1}), data, 0)
    for cores in (2, 4, 16):
        limit = RAY_SECONDS / (1 - 1 / cores) / of_round
        for rounds, engine in ((math.floor(limit), "in-process"), (math.ceil(limit), "ray")):
            longer = config.model_copy(update={"num_rounds": rounds})
            assert chosen_engine(longer, data, 0, Machine(cores=cores, memory=8e9)) == engine


def test_the_work_grows_with_clients_epochs_and_rounds() -> None:
    """It is proportional to each of them, and larger for a shared hypernetwork."""
    config = RunConfig.from_flat(default_settings() | {"method": "fedavg", "learning-rate": 0.1})
    data = load_federated_data(config.data_settings())
    once = work_seconds(config, data, 0)
    assert work_seconds(config.model_copy(update={"num_rounds": 20}), data, 0) == pytest.approx(2 * once)
    assert work_seconds(config.model_copy(update={"fraction_train": 0.5}), data, 0) == pytest.approx(once / 2)
    assert once < work_seconds(config.model_copy(update={"local_epochs": 10}), data, 0) < 2 * once
    assert work_seconds(config, data, 60_000_000) > 2 * once


def test_operations_of_known_networks() -> None:
    """Two per weight and output position; ResNet-18 has 1.1e9 on images of 32 pixels (He et al., 0.56e9 products)."""
    assert sample_operations("mlp", (10,), 4) == 2 * (10 * 200 + 200 * 200 + 200 * 4)
    assert sample_operations("resnet18", (3, 32, 32), 10) == pytest.approx(1.1e9, rel=0.05)
