"""All methods train adapters in a pre-trained body as they train other networks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from federations import Call
from safetensors.torch import save_file
from sklearn.datasets import load_digits

import hyperfl_flwr as hyperfl
from clients.novel.node import check_body
from hyperfl_flwr.app.client import app
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint, outcome
from hyperfl_flwr.core.errors import ConfigError, RefusalError, RunDirectoryError, RunFailedError
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.metrics.predictions import predict
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.provenance import body_hash, use_weights
from hyperfl_flwr.models.standalone import read_model
from hyperfl_flwr.results.export import model_of_run, write_exported
from hyperfl_flwr.runs.run_directory import read_manifest
from hyperfl_flwr.server.in_process_grid import InProcessGrid

TARGET = "lpm:timm/test_resnet@32"

NOISY = ("srr-fl", "prifedsync", "fedakd")
"""Methods whose clients draw noise from the operating system."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "body.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), path)
    return path


@pytest.fixture(autouse=True)
def downloads_again() -> Iterator[None]:
    yield
    use_weights("auto")


def settings(weights: Path, **changes: Any) -> dict[str, Any]:
    return {"target": TARGET, "lpm.weights": str(weights), **changes}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_them_alone_and_together(method: str, federate: Federate, weights: Path) -> None:
    """It trains them, alone and together with equal results up to rounding; FedBN needs normalisation to train."""
    if method == "fedbn":
        with pytest.raises(ConfigError, match="no normalisation"):
            federate(method, **settings(weights))
        return
    few = {"num-rounds": 1, "num-clients": 3}
    together, _ = last_checkpoint(federate(method, 1, **settings(weights, **few)))
    alone, _ = last_checkpoint(federate(method, 1, **settings(weights, **few, cohort="one-by-one")))
    assert together.keys() == alone.keys()
    assert not any("layer1" in key for key in together)
    if method not in NOISY:
        for key, values in together.items():
            np.testing.assert_allclose(values, alone[key], rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.extended
def test_what_is_exported(federate: Federate, weights: Path, tmp_path: Path) -> None:
    """Adapters, classifier and the body's hash; the script without this package predicts as the run's model does."""
    run = federate("hyperfl", **settings(weights))
    model = model_of_run(run, 1)
    facts = read_manifest(run)["model"]
    assert facts == {"body": "timm/test_resnet@32", "sha256": model.recipe.body}
    assert {name.split(".")[1] for name in model.tensors if name.startswith("extractor")} == {"adapters"}
    write_exported(model, tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "model.json").read_text())["body"] == facts["sha256"]

    samples = np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32)
    np.save(tmp_path / "samples.npy", samples)
    command = [sys.executable, str(tmp_path / "use_model.py"), str(tmp_path / "samples.npy"), str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": ""})
    recipe, tensors = read_model(tmp_path / "model.safetensors")
    np.savez(tmp_path / "samples.npz", images=(255 * samples).astype(np.uint8))
    use_weights(str(weights))
    target = recipe.new_target()
    target.load_state_dict(tensors, assign=True)
    normalised = (torch.tensor(samples) - torch.tensor(recipe.mean)) / torch.tensor(recipe.std)
    confidences = target.eval()(normalised).softmax(1).detach().max(1).values
    printed = [float(line.split()[1]) for line in done.stdout.splitlines()]
    np.testing.assert_allclose(printed, confidences, atol=2e-6)

    other = tmp_path / "other.safetensors"
    torch.manual_seed(1)
    save_file(timm.create_model("test_resnet").state_dict(), other)
    done = subprocess.run([*command[:-1], str(other)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not those of the training" in done.stderr
    use_weights(str(other))
    with pytest.raises(ConfigError, match="was trained with the weights"):
        predict(tensors, recipe, tmp_path / "samples.npz", torch.device("cpu"))


def test_a_run_is_resumed_with_its_weights(federate: Federate, weights: Path, tmp_path: Path) -> None:
    whole = federate("fedrep", **settings(weights))
    run = federate("fedrep", **settings(weights, **{"num-rounds": 1}))
    elsewhere = tmp_path / "elsewhere.safetensors"
    elsewhere.write_bytes(weights.read_bytes())
    changes = settings(elsewhere, resume=str(run), output="")
    assert outcome(federate("fedrep", **changes))["arrays"] == outcome(whole)["arrays"]
    torch.manual_seed(1)
    save_file(timm.create_model("test_resnet").state_dict(), elsewhere)
    with pytest.raises(RunDirectoryError, match="with the weights that it started with"):
        federate("fedrep", **changes, **{"num-rounds": 3})


def test_clients_that_have_not_been_trained_before_train_with_others(federate: Federate, weights: Path) -> None:
    """With MOON, a client's first round has other passes than its later ones; no client fails."""
    plan = {"fraction-train": 0.6, "num-rounds": 4}
    together, _ = last_checkpoint(federate("moon", 1, **settings(weights, **plan)))
    alone, _ = last_checkpoint(federate("moon", 1, **settings(weights, **plan, cohort="one-by-one")))
    for key, values in together.items():
        np.testing.assert_allclose(values, alone[key], rtol=1e-3, atol=1e-4, err_msg=key)


def test_nodes_and_server_compare_weights(federate: Federate, weights: Path, tmp_path: Path) -> None:
    """A node's owner gives the file; a node with others is refused, and the run's file is read by no owner's node."""
    other = tmp_path / "other.safetensors"
    torch.manual_seed(1)
    save_file(timm.create_model("test_resnet").state_dict(), other)
    owner = {"lpm-weights": str(other)}
    with pytest.raises(RunFailedError, match=r"nodes \[0, 1\] have other weights of lpm:timm/test_resnet@32"):
        federate("fedavg", grid=lambda number, flat: InProcessGrid(app, number, flat, owner), **settings(weights))
    flat = default_settings() | settings(weights)
    with pytest.raises(RefusalError, match="must give lpm-weights in the node config"):
        NodeConfig.of({}).applied_to(flat)
    assert NodeConfig.of({"lpm-weights": "auto"}).applied_to(flat).lpm.weights == "auto"
    assert NodeConfig.of({}).applied_to(default_settings()).lpm.weights == "auto"
    assert NodeConfig.of(owner).applied_to(flat).lpm.weights == str(other)
    assert NodeConfig.of({"simulated": True}).applied_to(flat).lpm.weights == str(weights)


def own_digits(path: Path) -> Path:
    digits = load_digits()
    images = (digits.images[:, None] * 15).astype(np.uint8)
    parts = {"images": images[:40], "labels": digits.target[:40]}
    np.savez(path, **parts, test_images=images[40:60], test_labels=digits.target[40:60])
    return path


def test_python_predicts_with_weights_from_elsewhere(federate: Federate, weights: Path, tmp_path: Path) -> None:
    """`Run.predict` takes their file, when that which the run names has been moved."""
    named = tmp_path / "named.safetensors"
    named.write_bytes(weights.read_bytes())
    run, samples = hyperfl.Run(federate("fedavg", **settings(named))), own_digits(tmp_path / "mine.npz")
    before = run.predict(samples, 1, device="cpu")
    named.rename(tmp_path / "moved.safetensors")
    after = run.predict(samples, 1, device="cpu", weights=tmp_path / "moved.safetensors")
    assert after.outputs.tolist() == before.outputs.tolist()
    with pytest.raises(ConfigError, match=r"named\.safetensors"):
        run.predict(samples, 1, device="cpu")


@pytest.mark.parametrize("method", ["hyperfl", "pfedhn"])
def test_a_client_joins(method: str, federate: Federate, weights: Path, tmp_path: Path, call: Call) -> None:
    """From the run's folder and, without a server, from the file of what is shared, with the body's weights."""
    run, mine = federate(method, **settings(weights)), f"npz:{own_digits(tmp_path / 'mine.npz')}"
    sources = [run]
    if method == "hyperfl":
        sources.append(tmp_path / "shared.safetensors")
        assert call("export", run, "--shared", "-o", sources[1])[0] == 0
    for number, source in enumerate(sources):
        words = ("join", source, "--data", mine, "--rounds", "1", "--device", "cpu", "-o", f"joined-{number}")
        assert call(*words, "--weights", weights)[::2] == (0, "")
        facts = json.loads(Path(f"joined-{number}/model.json").read_text())
        assert facts["body"] == body_hash(TARGET, str(weights))
    other = tmp_path / "other.safetensors"
    torch.manual_seed(1)
    save_file(timm.create_model("test_resnet").state_dict(), other)
    if method == "hyperfl":
        code, _, problem = call(*words[:-1], "joined-other", "--weights", other)
        assert code == 2
        assert "was trained with the weights" in problem


def test_adapters_in_secure_sums(federate: Federate, weights: Path) -> None:
    """The sum of nodes that add masks is that of plain nodes, up to the rounding of fixed-point numbers."""
    plan = {"num-clients": 3, "num-rounds": 1}
    plain, _ = last_checkpoint(federate("hyperfl-frozen", 3, **settings(weights, **plan)))
    masked, _ = last_checkpoint(federate("hyperfl-frozen", 3, **settings(weights, **plan, **{"secagg.enabled": True})))
    for key, values in plain.items():
        np.testing.assert_allclose(masked[key], values, atol=1e-5, err_msg=key)


def test_nodes_that_join_compare_weights(weights: Path) -> None:
    """A node that joins a finished run, or gets a model on demand, uses its owner's weights: those of the run."""
    node = NodeConfig.of({"lpm-weights": str(weights)})
    facts = {"input_shape": (1, 8, 8), "mean": (0.5,), "std": (0.5,), "classes": ("0", "1")}
    recipe = TargetRecipe(target=TARGET, body=body_hash(TARGET, str(weights)), **facts)
    check_body(node, recipe)
    with pytest.raises(ConfigError, match="was trained with the weights"):
        check_body(node, replace(recipe, body="0" * 64))
    with pytest.raises(RefusalError, match="must give lpm-weights"):
        check_body(NodeConfig.of({}), recipe)


def test_what_a_method_cannot_train(federate: Federate, weights: Path) -> None:
    """Without adapters there is nothing to generate; FedAvg and local training train the classifier."""
    fixed = {"target": "lpm-fixed:timm/test_resnet@32", "lpm.weights": str(weights)}
    for method in ("hyperfl", "hyperfl-frozen", "fedrep", "pfedhn-pc", "lg-fedavg"):
        with pytest.raises(ConfigError, match="has no parameters but those of its classifier"):
            federate(method, **fixed)
    arrays, _ = last_checkpoint(federate("fedavg", **fixed))
    assert set(arrays) == {"model/classifier.weight", "model/classifier.bias"}


def test_missing_weights_stop_the_command(tmp_path: Path, call: Call) -> None:
    """It says so in one line before anything is written."""
    words = ("--set", f"target={TARGET}", "--set", f"lpm.weights={tmp_path / 'none.pth'}", "--output", tmp_path / "run")
    code, _, problem = call("run", *words)
    assert code == 2
    assert "none.pth cannot be read: No such file or directory; give the path of an existing file" in problem
    assert not (tmp_path / "run").exists()
