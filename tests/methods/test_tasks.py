"""Several labels and numbers in the place of classes: methods that need only a loss, and what is made of a run."""

import csv
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import OF_METHOD, Call
from html_pages import Page
from safetensors.torch import load_file

from experiments.study import load_study
from experiments.sweep import sweep_text
from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import metrics
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.deploy.owner_page import write_owner_page
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.standalone import read_model
from hyperfl_flwr.node.evaluations import Evaluations
from hyperfl_flwr.node.private_state import client_folders
from hyperfl_flwr.results.export import model_of_node
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.run_directory import read_manifest
from hyperfl_flwr.server.in_process_grid import InProcessGrid

ALL = [name for name, method in METHODS.items() if "regression" in method.tasks and name not in ("fedbn", "srr-fl")]
"""Methods of all tasks but for FedBN, which needs a network with batch normalisation, and SRR-FL, which adds noise."""

USUAL: Settings = {
    "target": "mlp", "learning-rate": 0.05, "batch-size": 10, "local-epochs": 3,
    "data.train-samples": "auto", "data.test-samples": "auto",
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with samples of five clients whose labels and numbers are linear in eight features."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("files")
    features = rng.normal(size=(500, 8)).astype(np.float32)
    values = features @ rng.normal(size=(8, 3)) + 0.1 * rng.normal(size=(500, 3))
    content = {"features": features, "clients": np.arange(500) % 5}
    np.savez(folder / "multi-label.npz", labels=values > np.array([0.0, 1.0, -1.0]), **content)
    np.savez(folder / "regression.npz", labels=500 + 40 * values[:, :2], **content)
    return folder


def settings_of(files: Path, task: str, **changes: Any) -> Settings:
    return USUAL | {"task": task, "dataset": f"npz:{files / f'{task}.npz'}"} | changes


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


@pytest.mark.parametrize("method", ALL)
def test_every_method_that_says_so_learns_numbers(method: str, federate: Federate, files: Path) -> None:
    """Predictions explain most of the variance; no key of a record says accuracy."""
    rate = {"hyperfl": 0.01, "hyperfl-frozen": 0.01}.get(method, 0.05)
    run = federate(method, **settings_of(files, "regression", **{"learning-rate": rate}), num_rounds=3)
    summary = summary_of(run)
    assert summary["test_r2"] > 0.5
    assert len([value for value in summary["test_r2_per_client"] if value is not None]) == 5
    assert not [name for name in (*summary, *(key for row in metrics(run) for key in row)) if "accuracy" in name]
    assert 0 < summary["test_mae"] < summary["test_rmse"] < 1


def test_secure_sums_leave_out_what_follows_from_the_loss(federate: Federate, files: Path) -> None:
    """The root mean square error, in each kind of model; its sum and that of the loss would tell single clients."""
    changes = {"secagg.enabled": True, "data.validation-fraction": 0.2, "keep": "best", "num_rounds": 2}
    secure, plain = (
        federate("fedavg", 3, **settings_of(files, "regression", **changes | {"secagg.enabled": enabled}))
        for enabled in (True, False)
    )
    names = {name for row in metrics(secure) for name in row}
    assert {"aggregate_loss", "aggregate_mae", "personalized_mae", "kept_mae"} <= names
    assert not [name for name in names if "rmse" in name]
    assert summary_of(secure)["test_rmse"] is None
    assert summary_of(plain)["test_rmse"] > summary_of(plain)["test_mae"]
    assert summary_of(secure)["test_mae"] == pytest.approx(summary_of(plain)["test_mae"], abs=0.01)


@pytest.mark.parametrize("method", ["local", "fedavg", "hyperfl", "pfedhn", "fedrep"])
def test_methods_learn_several_labels(method: str, federate: Federate, files: Path) -> None:
    rate = {"hyperfl": 0.02, "pfedhn": 0.1}.get(method, 0.2)
    summary = summary_of(federate(method, **settings_of(files, "multi-label", **{"learning-rate": rate}), num_rounds=5))
    assert summary["test_accuracy"] > max(0.8, summary["test_majority_share"])
    assert summary["test_auc"] > 0.9
    assert summary["test_balanced_accuracy"] > 0.75


@pytest.mark.parametrize(("method", "target"), [("fedavg", "cnn"), ("fedbn", OF_METHOD["fedbn"]["target"])])
def test_convolutions_and_batch_normalisation_learn_numbers(
    method: str, target: str, federate: Federate, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    images = (rng.integers(0, 256, (300, 8, 8)) * rng.random((300, 1, 1))).astype(np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=images.mean(axis=(1, 2)) / 255.0)
    dataset = f"npz:{tmp_path / 'images.npz'}"
    run = federate(method, **settings_of(tmp_path, "regression", dataset=dataset, target=target), num_rounds=3)
    assert summary_of(run)["test_r2"] > 0.3


def test_a_method_that_adds_noise_to_weights_trains(federate: Federate, files: Path) -> None:
    assert (
        -1 <= summary_of(federate("srr-fl", **settings_of(files, "regression"), num_rounds=1))["test_r2_aggregate"] < 1
    )


@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_a_run_is_shown_exported_and_used(task: str, federate: Federate, files: Path, call: Call) -> None:
    """The report, `compare`, `export`, the exported script and `predict` agree on the client's score."""
    runs = [
        federate(method, **settings_of(files, task, **{"learning-rate": 0.02}), num_rounds=3)
        for method in ("local", "hyperfl")
    ]
    summary, score = summary_of(runs[1]), "R²" if task == "regression" else "accuracy"
    key = "test_r2" if task == "regression" else "test_accuracy"
    shown = f"{summary[key]:.4f}" if task == "regression" else f"{100 * summary[key]:.2f} %"
    text = write_report(runs[1]).read_text()
    page = Page(text)
    assert f"Personalized {score}" in text
    assert shown in text
    assert ("ccuracy" in text.replace("target-accuracy", "")) == (task != "regression")
    assert any(score in row for row in page.table_rows)
    code, out, err = call("compare", *runs, "--output", "compared.html")
    assert (code, err) == (0, "")
    assert "training alone" in out
    assert ("points" in out) == (task != "regression")
    assert score in Path("compared.html").read_text()
    Page(Path("compared.html").read_text())

    code, out, err = call("export", runs[1], "--client", "2", "-o", "model.safetensors")
    assert code == 0, err
    facts = json.loads(Path("model.json").read_text())
    mine = summary[f"{key}_per_client"][2]
    assert facts["task"] == task
    assert facts[key.removeprefix("test_")] == pytest.approx(mine)
    with np.load(files / f"{task}.npz") as content:
        of_client = content["clients"] == 2
        np.savez("mine.npz", features=content["features"][of_client], labels=content["labels"][of_client])
        np.save("samples.npy", content["features"][of_client])
    code, out, err = call("predict", runs[1], "--client", "2", "--data", "npz:mine.npz", "-o", "one.csv")
    assert code == 0, err
    assert f"{score} {mine:.4f} of 25 samples" in out or f"{score} {100 * mine:.2f} % of 25 samples" in out
    assert call("predict", "model.safetensors", "--data", "npz:mine.npz", "-o", "two.csv")[0] == 0
    done = subprocess.run(
        [sys.executable, "use_model.py", "samples.npy"], capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with Path("two.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ["0", "1"] if task == "regression" else ["p(0)", "p(1)", "p(2)"]
    ours = np.array([[float(row[name]) for name in columns] for row in rows])
    scripts = np.array([[float(part) for part in line.split()[-len(columns) :]] for line in done.stdout.splitlines()])
    np.testing.assert_allclose(scripts, ours, rtol=1e-4, atol=1e-5)
    with np.load("mine.npz") as content:
        truth = np.array([[float(row[f"label:{name.strip('p()')}"]) for name in columns] for row in rows])
        np.testing.assert_allclose(truth, content["labels"], rtol=1e-5)
        if task == "regression":
            assert 420 < ours.mean() < 580  # in the units of the targets
    assert read_model(Path("model.safetensors"))[0].task == task


def test_runs_of_different_tasks_are_not_compared(federate: Federate, files: Path, call: Call) -> None:
    runs = [federate("fedavg", **settings_of(files, task), num_rounds=1) for task in ("multi-label", "regression")]
    code, _, err = call("compare", *runs)
    assert code == 2
    assert "runs of different tasks cannot be compared; got multi-label, regression" in " ".join(err.split())


def test_secure_sums_open_the_means_of_a_plain_run(federate: Federate, files: Path) -> None:
    changes = settings_of(files, "regression", **{"learning-rate": 0.02}) | {"num_rounds": 2}
    plain, secure = (federate("fedavg", 5, **changes, **{"secagg.enabled": on}) for on in (False, True))
    rows = [[row for row in metrics(run) if row["kind"] == "train"] for run in (plain, secure)]
    for one, two in zip(*rows, strict=True):
        for name in ("personalized_r2", "aggregate_rmse", "personalized_mae", "train_loss"):
            if name in one:
                assert two[name] == pytest.approx(one[name], abs=2e-3)
    assert summary_of(secure)["test_r2_per_client"] is None
    assert "not known" in write_report(secure).read_text()


def test_secure_sums_open_without_labels_of_a_client(federate: Federate, tmp_path: Path) -> None:
    """F1 is not defined where no sample has a label and none is predicted."""
    rng = np.random.default_rng(0)
    labels = rng.random((60, 2)) < np.where(np.arange(60) < 40, 0.5, 0.0)[:, None]
    features = rng.normal(size=(60, 4)).astype(np.float32)
    np.savez(tmp_path / "rare.npz", features=features, labels=labels, clients=np.arange(60) // 20)
    changes = settings_of(tmp_path, "multi-label", dataset=f"npz:{tmp_path / 'rare.npz'}") | {"num-clients": 3}
    summary = summary_of(federate("fedavg", 3, **changes, **{"secagg.enabled": True}))
    assert summary["rounds"] == 2
    assert summary["test_macro_f1"] is None
    assert 0 < summary["test_balanced_accuracy"] <= 1


@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_noisy_steps_and_noise_for_clients_train_other_tasks(task: str, federate: Federate, files: Path) -> None:
    """With little noise they learn; epsilon is stated."""
    noisy = federate("fedavg", **settings_of(files, task, **{"dp.epsilon": 500.0, "dp.clip-norm": 1.0}), num_rounds=3)
    summary = summary_of(noisy)
    assert summary["test_r2" if task == "regression" else "test_accuracy"] > 0.6
    assert summary["privacy"] is not None


def test_the_best_round_has_the_least_squared_error(federate: Federate, files: Path, tmp_path: Path) -> None:
    """The validation data of a client may be one sample, of which R² would be 0 for every model."""
    with np.load(files / "regression.npz") as content:
        part = {name: array[:40] for name, array in content.items()}
    np.savez(tmp_path / "small.npz", **{**part, "clients": np.arange(40) // 4})
    changes = settings_of(files, "regression", dataset=f"npz:{tmp_path / 'small.npz'}") | {
        "num-clients": 10, "data.validation-fraction": 0.3, "keep": "best", "early-stopping": 2, "num_rounds": 4,
    }  # fmt: skip
    run = federate("fedavg", **changes)
    summary, rows = summary_of(run), metrics(run)
    known = {row["round"]: row["aggregate_validation_mse"] for row in rows if row["kind"] == "aggregate"}
    assert len({*known.values()}) == len(known)
    best = min(known, key=lambda number: (known[number], -number))
    assert summary["best_validation_round_aggregate"] == best > 0
    assert summary["validation_mse_aggregate"] == known[best]
    assert summary["keep"] == "best"


def test_a_target_is_reached_and_the_whole_test_data_are_measured(federate: Federate, files: Path, call: Call) -> None:
    run = federate(
        "fedavg", **settings_of(files, "regression"), num_rounds=3, **{"target-accuracy": 0.5, "data.global-test": True}
    )
    summary = summary_of(run)
    assert summary["rounds_to_target"] in (1, 2, 3)
    assert summary["global_test_r2"] > 0.5
    assert "personalized R² reached 0.5 in round" in (run / "server.log").read_text()
    code, _, err = call("audit", "--checkpoint", run)
    assert code == 2
    assert "classification" in err


class Owners(InProcessGrid):
    """Nodes with a file each."""

    def __init__(self, settings: Settings, data: Sequence[Path], states: Path) -> None:
        super().__init__(app, len(data), settings)
        for number, (context, path) in enumerate(zip(self._contexts.values(), data, strict=True)):
            context.node_config |= {
                "data": f"npz:{path}", "device": "cpu", "threads": 1, "state-dir": str(states / str(number)),
            }  # fmt: skip


@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_owners_train_see_and_use_their_models(
    task: str, federate: Federate, files: Path, tmp_path: Path, call: Call
) -> None:
    """Nodes with their own data agree on `data.target-scale`; the owner's page has a row for each label or target."""
    paths = []
    with np.load(files / f"{task}.npz") as content:
        for number in range(2):
            paths.append(tmp_path / f"{number}.npz")
            chosen = content["clients"] == number
            np.savez(paths[-1], features=content["features"][chosen], labels=content["labels"][chosen])
    names = "first,second" if task == "regression" else "one,two,three"
    changes = settings_of(files, task, dataset="digits") | {
        "num-clients": 2, "data.classes": names, "node-timeout": 1.0, "num_rounds": 3, "data.normalisation": "0/1",
    }  # fmt: skip

    def grid(_: int, settings: Settings) -> Owners:
        return Owners(settings, paths, tmp_path / "states")

    if task == "regression":
        with pytest.raises(RunFailedError, match=r"data\.target-scale must be MEAN/STD"):
            federate("fedavg", 2, grid=grid, **changes)
        changes["data.target-scale"] = "500/80"
    run = federate("fedavg", 2, grid=grid, **changes)
    assert read_manifest(run)["data"]["title"].endswith(
        "2 targets, 8 features" if task == "regression" else "3 labels, 8 features"
    )
    state = tmp_path / "states" / "0"
    page = Page(write_owner_page(state).read_text())
    assert [row[0] for row in page.table_rows if row[0] in names.split(",")] == names.split(",")
    (folder,) = client_folders(next(path for path in state.iterdir() if path.is_dir()))
    found = Evaluations.read(folder)
    assert found is not None
    newest = found.newest("personalized")
    assert newest is not None
    row = [line for line in metrics(run) if line["kind"] == "client" and line["client"] == 0][-1]
    score = "r2" if task == "regression" else "accuracy"
    assert newest.score == row[f"personalized_{score}"]
    assert all(math.isfinite(value) for value in newest.scores.values())
    kept = model_of_node(state, 0)
    assert kept.score == newest.score
    assert kept.recipe.classes == tuple(names.split(","))
    exported = call("export", run, "-o", "shared.safetensors")  # fedavg's global model, known to the server
    assert exported[0] == 0, exported[2]
    facts = json.loads(Path("shared.json").read_text())
    assert facts.get("target_std") == ([80.0, 80.0] if task == "regression" else None)
    assert load_file("shared.safetensors")
    assert call("predict", state, "--client", "0", "--data", f"npz:{paths[0]}")[0] == 0


@pytest.mark.parametrize("method", ["fedrep", "pfedhn"])  # on the client alone, and with the server's hypernetwork
def test_a_client_joins_a_run_of_regression(method: str, federate: Federate, files: Path, call: Call) -> None:
    run = federate(method, **settings_of(files, "regression"), num_rounds=3)
    with np.load(files / "regression.npz") as content:
        np.savez("new.npz", features=content["features"][:60], labels=content["labels"][:60])
    code, out, err = call("join", run, "--data", "npz:new.npz", "-o", "joined", "--device", "cpu")
    assert code == 0, err
    facts = json.loads(Path("joined/model.json").read_text())
    assert facts["task"] == "regression"
    assert facts["r2"] > max(0.3, facts["r2_before"])
    assert out.startswith(f"R² {facts['r2_before']:.4f}")


def test_a_study_of_a_regression_is_about_r2(tmp_path: Path) -> None:
    text = sweep_text(["fedavg"], {"mine": "npz:/mine.npz"}, 1, {"task": "regression", "target": "mlp"}, {})
    (tmp_path / "swept.toml").write_text(text)
    study = load_study(str(tmp_path / "swept.toml"))
    assert [column.metric for column in study.columns] == ["test_r2", "test_r2_aggregate"]
    assert (study.figures, study.unit) == (("personalized_r2",), "")
