"""Exported models have the accuracy that the run recorded."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import small_settings, trained
from safetensors import safe_open
from safetensors.torch import load_file

from hyperfl_flwr import ROOT
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint
from hyperfl_flwr.core.errors import RunDirectoryError, StateError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.results.export import Exported, model_of_run, write_exported
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics, settings_of

KINDS: dict[str, dict[str, Scalar]] = {
    **{name: {"method": name} for name in METHODS if client_of(name).is_network},
    "chain": {"method": "priv-hfl", "priv-hfl.realisation": "chain"},
    "mixing": {"method": "priv-hfl", "priv-hfl.mixing": True},
    "networks": {"method": "pfedhn", "pfedhn.targets": "cnn,mlp"},
    "frozen": {"method": "hyperfl", "hyperfl.embedding": "common-frozen"},
    "sampled": {"method": "hyperfl", "fraction-train": 0.4, "num-rounds": 3},
    "statistics": {
        "method": "fedavg",
        "target": "resnet18",
        "num-rounds": 1,
        "num-clients": 2,
        "data.train-samples": 20,
    },
}
"""Settings of every method, and of variants of some methods."""

STORED = (
    "hyperfl", "frozen", "sampled", "local", "priv-hfl", "chain", "mixing",
    "ditto", "fedakd", "fedala", "moon", "prifedsync",
)  # fmt: skip
"""Kinds for which the private state determines the model after local training."""

WITHOUT_GLOBAL_MODEL = (
    "fedakd", "fedbn", "fedper", "fedrep", "hyperfl", "hyperfl-frozen", "it-pfl", "lg-fedavg", "local",
    "pfedhn", "pfedhn-pc",
    "priv-hfl",
)  # fmt: skip
"""Methods whose clients do not all receive the same whole model."""

USED = ("hyperfl", "fedavg", "pfedhn", "statistics")
"""Kinds of which the exported program is run."""


@pytest.fixture(
    scope="module",
    params=[*(name for name in KINDS if name != "statistics"), pytest.param("statistics", marks=pytest.mark.slow)],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run on scikit-learn's digits."""
    output = tmp_path_factory.mktemp("export") / kind
    return trained(small_settings(output=str(output), **KINDS[kind]))


def accuracy(run: Path, client: int, found: Exported) -> float:
    """Return the accuracy on the client's test data of the target network that the recipe builds."""
    data = load_federated_data(RunConfig.from_flat(settings_of(run)).data_settings()).client(client)
    target = found.recipe.new_target()
    target.load_state_dict(dict(found.tensors), assign=True)
    return evaluate(target.eval(), data.test_images, data.test_labels).accuracy


def recorded(run: Path, kind: str, client: int) -> dict[str, Any]:
    """Return the last line in metrics.jsonl of the given kind and client."""
    return [row for row in read_metrics(run) if (row["kind"], row.get("client")) == (kind, client)][-1]


def test_the_aggregate_has_the_recorded_accuracy(run: Path) -> None:
    """For every client the exported aggregate's accuracy equals the recorded `aggregate_accuracy` exactly."""
    for client in range(RunConfig.from_flat(settings_of(run)).num_clients):
        found = model_of_run(run, client, "aggregate")
        expected = recorded(run, "client-aggregate", client)["aggregate_accuracy"]
        assert (found.score, accuracy(run, client, found)) == (expected, expected)


def test_the_own_model_has_the_recorded_accuracy(kind: str, run: Path) -> None:
    """The exported model equals `personalized_accuracy` where private state determines it; elsewhere it is refused."""
    if kind not in STORED:
        with pytest.raises(RunDirectoryError, match=r"only a SuperNode keeps it; .* run it again with keep=best"):
            model_of_run(run, 0, "personalized")
        assert model_of_run(run, 0).state == "aggregate"
        return
    for client in range(NUM_CLIENTS):
        found = model_of_run(run, client)
        row = recorded(run, "client", client)
        assert (found.state, found.round) == ("personalized", row["round"])
        assert (found.score, accuracy(run, client, found)) == (
            row["personalized_accuracy"],
            row["personalized_accuracy"],
        )


def test_the_files_are_used_without_this_package(kind: str, run: Path, tmp_path: Path) -> None:
    """`python -I use_model.py`, without any module of this project, predicts what the model predicts.

    The program is the same for all methods, and run for `USED` only.
    """
    output = tmp_path / "mine" / "model.safetensors"
    found = model_of_run(run, 1)
    paths = write_exported(found, output)
    assert [path.name for path in paths] == ["model.safetensors", "model.json", "use_model.py"]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert output.parent.stat().st_mode & 0o777 == 0o700
    facts = json.loads(paths[1].read_text())
    expected = {"client": 1, "state": found.state, "accuracy": found.score, "input_shape": [1, 8, 8]}
    assert {name: facts[name] for name in expected} == expected
    assert set(facts) == {
        *("parameters", "script", "samples", "target", "input_shape", "mean", "std", "classes"),
        *("client", "state", "round", "method", "dataset", "experiment", "accuracy"),
    }
    assert facts["experiment"] == read_manifest(run)["experiment"]
    with safe_open(output, framework="pt") as file:
        assert json.loads(file.metadata()["classes"]) == facts["classes"] == [str(digit) for digit in range(10)]
    if kind not in USED:
        return
    images = load_federated_data(RunConfig.from_flat(settings_of(run)).data_settings()).dataset.test
    samples = images.scaled(np.arange(40))
    np.save(tmp_path / "samples.npy", samples)
    command = [sys.executable, "-I", "-W", "error", str(paths[2])]
    done = subprocess.run([*command, str(tmp_path / "samples.npy")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    target = found.recipe.new_target()
    target.load_state_dict(load_file(output), assign=True)
    mean, std = (torch.tensor(part).reshape(-1, 1, 1) for part in (found.recipe.mean, found.recipe.std))
    with torch.no_grad():
        labels = target.eval()((torch.tensor(samples) - mean) / std).argmax(dim=1).tolist()
    assert [line.split()[0] for line in done.stdout.splitlines()] == [found.recipe.classes[label] for label in labels]


def test_only_methods_that_average_the_whole_model_have_a_global_one(kind: str, run: Path) -> None:
    """They export the checkpoint's model without a client; other methods refuse and ask for a client."""
    if RunConfig.from_flat(settings_of(run)).method in WITHOUT_GLOBAL_MODEL:
        with pytest.raises(RunDirectoryError, match="has no model that is the same for all clients; name one"):
            model_of_run(run, None)
        return
    found, checkpoint = model_of_run(run, None), last_checkpoint(run)[0]
    assert (found.client, found.score) == (None, None)
    of_model = {key: value for key, value in checkpoint.items() if key.startswith("model/")}
    assert exact({f"model/{name}": value.numpy() for name, value in found.tensors.items()}) == exact(of_model)


def test_what_is_not_there_is_said(kind: str, run: Path, tmp_path: Path) -> None:
    """Errors name an unknown client, a missing checkpoint, and private state that is deleted or only on its node."""
    with pytest.raises(RunDirectoryError, match=r"--client must be 0 to \d for .*, got 7"):
        model_of_run(run, 7)
    manifest = read_manifest(run)
    (copy := tmp_path / "copy").mkdir()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunDirectoryError, match="has no checkpoint yet"):
        model_of_run(copy, 0)
    (copy / "checkpoints").symlink_to(run / "checkpoints")
    if client_of(manifest["settings"]["method"]).private:
        with pytest.raises(StateError, match="is missing; it was deleted, or belongs to another machine"):
            model_of_run(copy, 0)
        del manifest["label_counts"]
        (copy / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(RunDirectoryError, match="are on its node; the node's owner can export the model there: "):
            model_of_run(copy, 0)
    else:
        assert model_of_run(copy, 0).score is None


def test_the_page_names_the_methods_that_store_the_own_model() -> None:
    page = (ROOT / "docs" / "how-to" / "export.md").read_text()
    (listed,) = re.findall(r"in a simulation's run folder with (`.*?), and with `keep = best`", page, re.DOTALL)
    assert re.findall("`(.*?)`", listed) == sorted({str(KINDS[kind]["method"]) for kind in STORED})


def test_a_model_of_a_run_in_bfloat16_has_a_note(federate: Federate) -> None:
    """Its accuracy was measured in another precision than that of the exported model."""
    notes = {
        name: model_of_run(federate("hyperfl", 1, num_rounds=1, num_clients=2, precision=name), 0).notes
        for name in ("fp32", "tf32", "bf16")
    }
    assert notes["fp32"] == notes["tf32"] == ()
    (note,) = notes["bf16"]
    assert "computed in bfloat16 (precision = bf16), the exported model computes in float32" in note
