"""`hyperfl export` from a run's folder and from a node's state folder; bad input gets one clear error."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Call, InProcessGrid, small_settings, trained
from safetensors import safe_open
from safetensors.torch import load_file

from hyperfl_flwr.app.client import app
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics, settings_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of HyperFL on scikit-learn's digits."""
    return trained(small_settings(output=str(tmp_path_factory.mktemp("runs") / "run")))


def owned(**node: Scalar) -> Callable[[int, Settings], InProcessGrid]:
    """Return a factory of grids whose nodes belong to data owners, as SuperNodes do, and have this node config."""
    return lambda num_nodes, settings: InProcessGrid(app, num_nodes, settings, node)


def test_what_is_printed_and_written(run: Path, call: Call) -> None:
    code, out, err = call("export", run, "--client", "3", "-o", "mine/model.safetensors")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    (row,) = [row for row in read_metrics(run) if (row["kind"], row["round"], row.get("client")) == ("client", 2, 3)]
    assert lines[0] == (
        f"client 3's model of hyperfl, after its local training in round 2; its test accuracy was "
        f"{100 * row['personalized_accuracy']:.2f} %"
    )
    names = ("model.safetensors", "model.json", "use_model.py")
    assert lines[1:] == [str(Path.cwd() / "mine" / name) for name in names]
    code, out, _ = call("export", run, "--client", "3", "--state", "aggregate", "-o", "mine/round-2.safetensors")
    assert code == 0
    assert out.startswith("client 3's model of hyperfl, as aggregated after round 2")
    assert (Path("mine") / "use_round_2.py").is_file()


def test_a_folder_that_is_no_run_and_of_no_node(tmp_path: Path, call: Call) -> None:
    code, _, err = call("export", tmp_path, "-o", "x.safetensors")
    assert code == 2
    assert f"{tmp_path} must be a run's folder, which has a manifest.json, or a node's state-dir" in err


def test_an_owner_predicts_with_what_the_node_keeps(federate: Federate, tmp_path: Path, call: Call) -> None:
    """`hyperfl predict` uses the model in a node's state folder without an export; its accuracy is the recorded one."""
    states = tmp_path / "states"
    run = federate("hyperfl", grid=owned(**{"state-dir": str(states)}))
    data = load_federated_data(RunConfig.from_flat(settings_of(run)).data_settings())
    chosen, test = data.test_indices(3), data.dataset.test
    np.savez(tmp_path / "test.npz", images=test.images[chosen], labels=test.labels[chosen])
    code, out, err = call("predict", states, "--client", "3", "--data", tmp_path / "test.npz")
    assert code == 0, err
    last = [row for row in read_metrics(run) if row["kind"] == "client" and row["client"] == 3][-1][
        "personalized_accuracy"
    ]
    assert f"{100 * last:.2f} %" in out
    assert len(Path("predictions.csv").read_text().splitlines()) == 1 + len(chosen)


@pytest.mark.parametrize("method", ["hyperfl", "fedrep", "pfedhn"])
def test_a_node_keeps_its_clients_models(method: str, federate: Federate, tmp_path: Path, call: Call) -> None:
    """Each model has the recorded accuracy, even if it is not part of the private state; only the owner can read it."""
    states = tmp_path / "states"
    run = federate(method, grid=owned(**{"state-dir": str(states)}))
    assert "label_counts" not in read_manifest(run)
    config = RunConfig.from_flat(settings_of(run))
    data = load_federated_data(config.data_settings())
    last = {row["client"]: row["personalized_accuracy"] for row in read_metrics(run) if row["kind"] == "client"}
    for client in range(NUM_CLIENTS):
        path = states / read_manifest(run)["experiment"] / f"client-{client:05d}" / "model.npz"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        node = tmp_path / "node"
        node.mkdir(exist_ok=True)
        (node / "node.toml").write_text(f'state-dir = "{states}"')
        code, out, err = call(
            "export", (states, node)[client % 2], "--client", client, "-o", f"{client}/model.safetensors"
        )
        assert code == 0, err
        assert f"client {client}'s model of {method}, after its local training in round 2" in out
        facts = json.loads(Path(f"{client}/model.json").read_text())
        target = build_target("cnn", (1, 8, 8), 10)
        target.load_state_dict(load_file(f"{client}/model.safetensors"), assign=True)
        mine = data.client(client)
        found = evaluate(target.eval(), mine.test_images, mine.test_labels).accuracy
        assert facts["accuracy"] == found == last[client]
        np.testing.assert_allclose(facts["mean"], data.dataset.mean)


def test_an_operator_without_data_exports_what_is_shared(federate: Federate, tmp_path: Path, call: Call) -> None:
    """Without the nodes' data, the shared model is exported with the agreed classes, shape and normalisation.

    A client's model is not available here; the error names the command for the node's owner.
    """
    rng, classes = np.random.default_rng(0), ",".join("abcdefghij")
    np.savez(tmp_path / "d.npz", images=rng.integers(0, 256, (400, 8, 8), dtype=np.uint8), labels=np.arange(400) % 10)
    agreed = {"data.classes": classes, "data.input-shape": "1x8x8", "data.normalisation": "0.25/0.125"}
    grid = owned(**{"state-dir": str(tmp_path / "states"), "data": f"npz:{tmp_path / 'd.npz'}"})
    samples = {"data.train-samples": "auto", "data.test-samples": "auto"}
    run = federate("hyperfl", 5, num_rounds=1, grid=grid, node_timeout=5.0, **agreed, **samples)
    (tmp_path / "d.npz").unlink()
    code, out, err = call("export", run, "--shared", "-o", "shared.safetensors")
    assert (code, err) == (0, "")
    with safe_open("shared.safetensors", framework="np") as file:
        told = {name: json.loads(text) for name, text in file.metadata().items() if name != "format"}
    assert told["classes"] == list("abcdefghij")
    assert (told["input_shape"], told["mean"], told["std"]) == ([1, 8, 8], [0.25], [0.125])
    code, out, err = call("export", run, "--client", "0", "-o", "model.safetensors")
    assert (code, out) == (2, "")
    assert "the node's owner can export the model there: hyperfl export STATE_DIR --client 0 --run" in err


def test_the_owner_may_keep_none(federate: Federate, tmp_path: Path, call: Call) -> None:
    states = tmp_path / "states"
    federate("hyperfl", grid=owned(**{"state-dir": str(states), "keep-model": False}))
    assert list(states.glob("*/client-00003/round-*.npz"))
    assert not list(states.glob("**/model.npz"))
    code, _, err = call("export", states, "--client", "3", "-o", "model.safetensors")
    assert code == 2
    assert "holds no model of client 3; give a run's folder, or a node's state-dir with keep-model on" in err


def test_keep_model_is_a_truth_value(federate: Federate, tmp_path: Path) -> None:
    grid = owned(**{"state-dir": str(tmp_path / "states"), "keep-model": "no"})
    with pytest.raises(Exception, match="node 0 is refused: its owner must repair keep-model in the node config"):
        federate("hyperfl", grid=grid, node_timeout=0.5)


def test_one_of_several_runs_is_named(federate: Federate, tmp_path: Path, call: Call) -> None:
    """A node that took part in two runs has two models of a client, and --run chooses one; a simulation keeps none."""
    states = tmp_path / "states"
    runs = [federate("hyperfl", seed=seed, grid=owned(**{"state-dir": str(states)})) for seed in (0, 1)]
    names = sorted(read_manifest(run)["experiment"] for run in runs)
    code, _, err = call("export", states, "--client", "0", "-o", "model.safetensors")
    assert code == 2
    listed = ", ".join(f"{read_manifest(run)['experiment']}: hyperfl, 20" for run in reversed(runs))  # the newest first
    shown = re.sub(r"20\d\d-\d\d-\d\d \d\d:\d\d", "20", " ".join(err.split()))
    assert f"has models of client 0 of several runs ({listed}); choose one with --run" in shown
    files = []
    for words in (("--run", names[0][:12]), ()):  # the first digits of its name suffice
        source = states if words else states / names[0]
        code, _, err = call("export", source, "--client", "0", *words, "-o", f"{len(files)}.safetensors")
        assert code == 0, err
        files.append(load_file(f"{len(files)}.safetensors"))
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())
    code, _, err = call("export", states, "--client", "0", "--run", "another", "-o", "model.safetensors")
    assert code == 2
    assert f"no model of client 0 of the run another; there are {names[0]}/client-00000" in err
    assert not list(federate("hyperfl").glob("**/model.npz"))


BAD = {
    "no client": ((), "has no model that is the same for all clients; name one with --client, 0 to 4"),
    "unknown client": (("--client", "5"), "--client must be 0 to 4 for"),
    "unknown state": (("--client", "1", "--state", "best"), "--state must be personalized or aggregate, got 'best'"),
}


@pytest.mark.parametrize(("words", "expected"), BAD.values(), ids=BAD)
def test_export_refuses_bad_input(run: Path, call: Call, words: tuple[str, ...], expected: str) -> None:
    code, out, err = call("export", run, *words, "-o", "new/model.safetensors")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert expected in err
    assert not Path("new").exists()


def test_a_run_s_folder_has_one_run_and_a_source_folder_is_not_replaced(run: Path, call: Call) -> None:
    code, out, err = call("export", run, "--client", "1", "--run", "x", "-o", "model.safetensors")
    assert (code, out) == (2, "")
    assert f"--run is for the folder of a node, but {run} is that of a run; leave it out" in err
    Path("model_network").mkdir()
    code, out, err = call("export", run, "--client", "1", "-o", "model.safetensors")
    assert (code, out) == (2, "")
    assert "already holds model_network; choose another output" in err
    assert [path.name for path in Path.cwd().iterdir()] == ["model_network"]


def test_export_refuses_bad_places(run: Path, call: Call) -> None:
    code, out, err = call("export", run, "--client", "1", "-o", "model.pt")
    assert (code, out, "must end with .safetensors, got model.pt" in err) == (2, "", True)
    for name in ('a"b', "a\\b", "a'b"):  # the script for such a name would not be valid Python
        code, _, err = call("export", run, "--client", "1", "-o", f"{name}.safetensors")
        assert (code, f"the output's name must not contain {name[1]}, got" in err) == (2, True)
    Path("model.json").write_text("{}")
    code, _, err = call("export", run, "--client", "1", "-o", "model.safetensors")
    assert (code, "already holds model.json; choose another output" in err) == (2, True)
    code, _, err = call("export", "gone", "--client", "1", "-o", "b.safetensors")
    assert (code, "gone does not exist; give the folder of a run" in err) == (2, True)
    if os.geteuid():
        Path("closed").mkdir(mode=0o500)
        code, _, err = call("export", run, "--client", "1", "-o", "closed/b.safetensors")
        assert (code, "cannot be written" in err) == (2, True)


def test_a_nodes_folder_has_own_models_only(call: Call, tmp_path: Path) -> None:
    (states := tmp_path / "states").mkdir()
    code, _, err = call("export", states, "--client", "1", "--state", "aggregate", "-o", "a.safetensors")
    assert (code, "--state must be personalized on a node" in err) == (2, True)
    (folder := states / "e" / "client-00001").mkdir(parents=True)
    (folder / "model.npz").write_bytes(b"torn")
    code, _, err = call("export", states, "-o", "a.safetensors")
    assert (code, "--client is required with a node's state-dir" in err) == (2, True)
    code, _, err = call("export", states, "--client", "1", "-o", "a.safetensors")
    assert (code, "model.npz is damaged" in err) == (2, True)


def test_an_unfinished_run_is_noted(run: Path, tmp_path: Path, call: Call) -> None:
    """A run that has reached round 2 of 3 is exported with a note."""
    (copy := tmp_path / "copy").mkdir()
    manifest = read_manifest(run)
    manifest["settings"]["num-rounds"] = 3
    (copy / "manifest.json").write_text(json.dumps(manifest))
    for name in ("checkpoints", "clients", "metrics.jsonl"):
        (copy / name).symlink_to(run / name)
    code, _, err = call("export", copy, "--client", "1", "-o", "a.safetensors")
    assert code == 0
    assert f"note: {copy} has only reached round 2 of 3" in err
