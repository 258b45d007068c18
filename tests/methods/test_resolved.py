"""Resolution of `auto` settings: for training, in the manifest and the log, and when a run is resumed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from federations import Call, small_settings
from html_pages import Page

from clients.engine.context import client_setting
from hyperfl_flwr.app import server as server_app
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.app.resolved import resolution, resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import training_autos
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import outcome
from hyperfl_flwr.contract.grids import Settings, plain_grid
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.launch.settings import requested
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.run_directory import read_manifest, settings_of
from hyperfl_flwr.server.federation import Federation
from hyperfl_flwr.server.handshake import Node

MakeSettings = Callable[..., Settings]


def config_of(method: str, **changes: object) -> RunConfig:
    return RunConfig.from_flat(small_settings(method=method, **changes))  # type: ignore[arg-type]


def edit_manifest(run: Path, change: Callable[[dict[str, object]], None]) -> None:
    manifest = read_manifest(run)
    change(manifest)
    (run / "manifest.json").write_text(json.dumps(manifest))


def resume(run: Path, num_rounds: int) -> Path:
    """Resume a run as `hyperfl run --resume` does."""
    config = requested({"resume": str(run), "num-rounds": num_rounds})
    return server_app.run(plain_grid(2, config.flat()), config)


def test_every_auto_of_a_method_becomes_a_number() -> None:
    """`training_autos()`, the settings that a resumed run takes from its manifest, lists exactly these."""
    found = {
        key
        for name in METHODS
        for key, value in config_of(name).flat().items()
        if value == "auto" and resolved(config_of(name)).flat()[key] != "auto"
    }
    assert found == training_autos()


@pytest.mark.parametrize("method", METHODS)
def test_a_number_that_is_set_stays(method: str) -> None:
    """Other `auto` values follow from it: the embedding's rate with pFedHN and HyperFL becomes the given rate."""
    keys = {"learning-rate", "pfedhn.server-learning-rate", "priv-hfl.dual-step"}
    flat = resolved(config_of(method, **dict.fromkeys(keys, 0.375))).flat()
    assert {flat[key] for key in keys} == {0.375}
    assert resolved(resolved(config_of(method))) == resolved(config_of(method))
    if method.startswith("hyperfl"):
        assert flat["hyperfl.embedding-learning-rate"] == 0.375
    if method.startswith("pfedhn"):
        assert flat["pfedhn.embedding-learning-rate"] == 0.375


@pytest.mark.parametrize("method", ["hyperfl", "fedavg", "pfedhn", "priv-hfl"])
def test_a_run_trains_with_the_methods_rate(method: str, federate: Federate) -> None:
    """The run is bit-equal to one with that rate as a number, and differs from one with twice that rate."""
    rate = METHODS[method].learning_rate
    run = federate(method)
    assert outcome(run) == outcome(federate(method, learning_rate=rate))
    assert outcome(run) != outcome(federate(method, learning_rate=2 * rate))


def test_nothing_trains_with_an_auto(tmp_path: Path) -> None:
    config = config_of("hyperfl")
    data, state = load_federated_data(config.data_settings()), PrivateState(tmp_path, "", 0)
    client = client_of("hyperfl")(client_setting(config, data, 0, resolve_device("cpu"), state))
    with pytest.raises(ValueError, match="still auto"):
        client.train(np.random.default_rng(0))


def test_the_manifest_the_log_and_the_report_tell(federate: Federate) -> None:
    """The training size is that of the label counts, and the embedding's length is 1 + 5 // 4."""
    run = federate("pfedhn", **{"data.train-samples": "auto"})
    manifest = read_manifest(run)
    sizes = {sum(row) for row in manifest["label_counts"]["train"]}
    assert len(sizes) == 1
    assert manifest["settings"]["learning-rate"] == "auto"
    assert manifest["resolved"] == {
        "num-nodes": 2, "threads": 1, "min-nodes": 2, "learning-rate": METHODS["pfedhn"].learning_rate,
        "data.train-samples": sizes.pop(), "data.augmentation": "none", "data.classes": "0,1,2,3,4,5,6,7,8,9",
        "data.input-shape": "1x8x8", "data.normalisation": "0.305013/0.37561",
        "pfedhn.embedding-dim": 2, "pfedhn.server-learning-rate": 0.01, "pfedhn.embedding-learning-rate": 0.01,
        "pfedhn.embedding-weight-decay": 0.001, "pfedhn.embedding-std": 1.0,
    }  # fmt: skip
    (line,) = [text for text in (run / "server.log").read_text().splitlines() if "resolved settings: " in text]
    assert "num-nodes 2; threads 1; learning-rate 0.03; min-nodes 2; " in line
    rows = Page(write_report(run).read_text()).rows
    assert rows["learning-rate"] == "auto (0.03)"
    assert rows["hyperfl.embedding-learning-rate"] == "auto"  # another method's


def test_a_dry_run_tells(call: Call) -> None:
    code, out, _ = call("run", "--method", "fedrep", "--num-clients", "4", "--num-nodes", "3", "--dry-run")
    assert code == 0
    assert f"resolved settings: num-nodes 3; threads 1; learning-rate {METHODS['fedrep'].learning_rate}; " in out


def test_a_deployments_server_tells_what_it_knows() -> None:
    """With two of three nodes and no label counts, test sizes, normalisation and threads are left out."""
    common = {"input-shape": [3, 8, 8], "num-classes": 2, "classes": ["cat", "dog"], "partitioned-by": "own"}
    nodes = [
        Node(id=7, partition=0, clients=[0], properties={**common, "num-examples": [40], "device": "cpu"}),
        Node(id=5, partition=2, clients=[2], properties={**common, "num-examples": [70], "device": "cuda:1"}),
    ]
    config = config_of("fedavg", num_clients=3, device="auto", **{"data.train-samples": "auto"})
    assert resolution(config, Federation(nodes), num_nodes=3, min_nodes=2) == {
        "num-nodes": 3, "min-nodes": 2, "learning-rate": METHODS["fedavg"].learning_rate, "device": "cpu, cuda:1",
        "data.train-samples": "40 to 70", "data.classes": "cat,dog", "data.input-shape": "3x8x8",
    }  # fmt: skip


def test_a_resumed_run_keeps_its_autos(federate: Federate) -> None:
    run = federate("hyperfl", num_rounds=1, checkpoint_every=1)
    before = read_manifest(run)
    resume(run, 2)
    assert outcome(run) == outcome(federate("hyperfl", num_rounds=2, checkpoint_every=1))
    assert read_manifest(run)["settings"]["learning-rate"] == "auto"
    assert read_manifest(run)["resolved"] == before["resolved"]


@pytest.mark.parametrize("legacy", [True, False])
def test_a_run_goes_on_at_its_own_rate_when_auto_means_another(
    legacy: bool, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run resumes at its own rate; one of a version without `resolved` used the rate of HyperFL's paper, 0.01."""
    rate = 0.01 if legacy else METHODS["hyperfl"].learning_rate
    expected = outcome(federate("hyperfl", num_rounds=2, checkpoint_every=1, learning_rate=rate))
    run = federate("hyperfl", num_rounds=1, checkpoint_every=1, learning_rate=rate if legacy else "auto")
    if legacy:
        edit_manifest(run, lambda manifest: manifest.pop("resolved"))
        edit_manifest(run, lambda manifest: manifest["settings"].update({"learning-rate": "auto"}))  # type: ignore[attr-defined]
    else:
        monkeypatch.setitem(METHODS.built_in, "hyperfl", replace(METHODS["hyperfl"], learning_rate=0.5))
    assert settings_of(run)["learning-rate"] == rate
    # `flwr run` with the app's defaults (auto) is refused: it would train at another rate.
    plain = RunConfig.from_flat(read_manifest(run)["settings"] | {"resume": str(run), "num-rounds": 2})
    with pytest.raises(RunDirectoryError, match=f"learning-rate was {rate}, now {METHODS['hyperfl'].learning_rate}"):
        server_app.run(plain_grid(2, plain.flat()), plain)
    resume(run, 2)
    assert outcome(run) == expected
    assert read_manifest(run)["settings"]["learning-rate"] == rate


def test_novel_clients_are_not_among_the_sizes() -> None:
    """The size is that of the five training clients, although the novel sixth has another one."""
    sizes = {"num-examples": [40] * NUM_CLIENTS + [9], "input-shape": [1, 8, 8], "num-classes": 10, "device": "cpu"}
    node = Node(id=1, partition=0, clients=list(range(NUM_CLIENTS + 1)), properties=sizes)
    config = config_of("fedavg", **{"data.train-samples": "auto", "novel.clients": 1})
    assert resolution(config, Federation([node]), num_nodes=1, min_nodes=1)["data.train-samples"] == 40
