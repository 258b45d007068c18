"""The commands of the how-to pages are run as printed, those of hyperfl in this process.

The pages on deployments are tested in tests/deployment, and the pages on a user's network and method in
test_simulated_own_code.py.
"""

import csv
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from console import Follow, block_with, blocks, commands, copy_checkout, shell
from sklearn.datasets import load_digits

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.launch.processes import kill_all, process_table

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"
HOW_TO = DOCS / "how-to"


def test_every_page_with_commands_is_run() -> None:
    """A page with a console block needs a test here, in test_readme.py, test_tutorial.py or tests/deployment."""
    covered = {
        "index", "tutorial", "reference/data-sets", "how-to/own-data", "how-to/own-network", "how-to/engines",
        "how-to/own-method", "how-to/pretrained",
        "how-to/compare", "how-to/many-clients", "how-to/export", "how-to/join", "how-to/tensorboard",
        "how-to/deploy", "how-to/deploy-operate", "how-to/deploy-security",
    }  # fmt: skip
    pages = [*DOCS.glob("*.md"), *HOW_TO.glob("*.md"), *(DOCS / "reference").glob("*.md")]
    with_commands = {str(page.relative_to(DOCS).with_suffix("")) for page in pages if blocks(page)}
    assert with_commands == covered


@pytest.mark.extended
def test_own_data(follow: Follow) -> None:
    """The page's scripts write its files; the commands train on them and on class folders, with their own clients."""
    page, folder = HOW_TO / "own-data.md", Path.cwd()
    examples = re.findall(r"```python\n(import.*?)```", page.read_text(), re.DOTALL)
    for example in examples:
        subprocess.run([sys.executable, "-c", example], check=True)
    follow(commands(page))
    runs = [path.parent for path in folder.glob("**/manifest.json")]
    manifests = [json.loads((run / "manifest.json").read_text()) for run in runs]
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    by_task = {task: [each for each in summaries if each["task"] == task] for task in TASKS}
    assert [len(found) for found in by_task.values()] == [4, 1, 1]
    assert all(len(each["test_accuracy_per_client"]) == 5 for each in by_task["classification"])
    shapes = sorted((manifest["settings"] | manifest["resolved"])["data.input-shape"] for manifest in manifests)
    assert shapes == ["10", "1x28x28", "1x8x8", "1x8x8", "1x8x8", "64"]
    assert by_task["multi-label"][0]["test_accuracy"] > by_task["multi-label"][0]["test_majority_share"]
    with (folder / "predictions.csv").open(newline="") as file:
        predicted = [float(row["0"]) for row in csv.DictReader(file)]
    assert 120 < sum(predicted) / len(predicted) < 180  # near the mean of the targets, in their unit


@pytest.mark.extended
def test_pretrained(follow: Follow) -> None:
    """A ResNet-18 with random weights gets adapters; the exported model predicts the digits of a file."""
    folder, digits = Path.cwd(), load_digits()
    np.savez(folder / "samples.npz", images=(digits.images[:20, None] * 15).astype(np.uint8))
    follow(commands(HOW_TO / "pretrained.md"))
    assert len((folder / "predictions.csv").read_text().splitlines()) == 21
    facts = json.loads((folder / "model.json").read_text())
    assert (facts["target"], len(facts["body"])) == ("lpm-resnet18", 64)


@pytest.mark.extended
def test_engines(follow: Follow) -> None:
    """All commands but Flower's own (tested separately below) work, including an estimate and a resumed run.

    Runs on Ray are in test_run.py.
    """
    own = [command for command in commands(HOW_TO / "engines.md") if command.startswith("hyperfl")]
    assert "estimate" in follow(own)
    checkpoints = sorted((Path.cwd() / "runs" / "short" / "checkpoints").iterdir())
    assert len(checkpoints) == 2


def test_many_clients(follow: Follow) -> None:
    """The last round and the evaluation are of drawn clients, and the summary says of how many."""
    follow(commands(HOW_TO / "many-clients.md"))
    (run,) = [path.parent for path in Path.cwd().glob("runs/*/summary.json")]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["clients"] for row in trained] == [4, 4]
    (evaluated,) = [row for row in rows if row["kind"] == "aggregate" and row["round"] == 2]
    assert (evaluated["clients"], evaluated["drawn_from"]) == (10, 20)


@pytest.mark.extended
def test_compare(follow: Follow) -> None:
    """The sweep has a row for each method and rate, the page compares two of them, and the study of the page runs.

    With one seed instead of two, and fewer clients and rounds.
    """
    page, folder = HOW_TO / "compare.md", Path.cwd()
    (study,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    for old, new in (
        ("num-clients = 10", "num-clients = 3"),
        ("num-rounds = 5", "num-rounds = 1"),
        ("seeds = 2", "seeds = 1"),
    ):
        assert old in study
        study = study.replace(old, new)
    (folder / "mine.toml").write_text(study)
    printed = follow([command.replace("--seeds 2", "--seeds 1") for command in commands(page)])
    for method in ("local", "fedavg"):
        for rate in (0.05, 0.1):
            assert f"| {method}, learning-rate {rate} |" in printed
    assert "Did federation help?\n  fedavg: " in printed
    assert (folder / "comparison.html").is_file()
    assert "3 cells in mine.jsonl" in printed
    tables = re.findall(r"^\| FedProx, strong \|.*$", printed, re.MULTILINE)
    assert len(tables) == 3
    assert tables[0] == tables[2]
    assert tables[1].endswith(" of 3 |")


@pytest.mark.extended
def test_flowers_own_commands(tmp_path: Path) -> None:
    """The lines work with a new home and port; the SuperLink that keeps running is found by its port and killed."""
    checkout = copy_checkout(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address = f"127.0.0.1:{port}"
    try:
        done = shell(
            block_with(HOW_TO / "engines.md", "flwr run . --stream"),
            checkout,
            FLWR_HOME=str(checkout.parent / "flwr"),
            FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=port,
            FLWR_TELEMETRY_ENABLED="0",
            FLWR_DISABLE_UPDATE_CHECK="1",
            OMP_NUM_THREADS="1",
            PYTHONPATH=str(Path(__file__).with_name("patient_flower")),
        )
    finally:
        kill_all(lambda: [p for p in process_table().values() if f"--port {port}" in p.command or address in p.command])
    assert done.returncode == 0, done.stderr
    folders = sorted((checkout.parent / "home" / "hyperfl-runs").iterdir())
    assert [("hyperfl" in folder.name, "fedavg" in folder.name) for folder in folders] == [(True, False), (False, True)]
    for folder in folders:
        assert (folder / "summary.json").is_file()
        assert str(folder) in done.stdout


@pytest.mark.extended
def test_export_and_join(follow: Follow) -> None:
    """A model is exported, used without this project and predicts a folder; then a new client joins the run."""
    folder = Path.cwd()
    assert "accuracy" in follow(commands(HOW_TO / "export.md"))
    digits = load_digits()
    images = (digits.images * 255 / 16).astype(np.uint8)
    np.save(folder / "samples.npy", (images[:5, np.newaxis] / 255).astype(np.float32))
    (alone,) = re.findall(r"^    (python -I .*)$", (HOW_TO / "export.md").read_text(), re.MULTILINE)
    follow([alone])
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(list((folder / "images" / "client-0" / "test").rglob("*.png"))) > 0

    np.savez(folder / "mine.npz", images=images[:300], labels=digits.target[:300])
    follow(commands(HOW_TO / "join.md"))
    assert (folder / "joined" / "use_model.py").is_file()


def test_tensorboard(follow: Follow) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard, see the page")
    printed = follow(commands(HOW_TO / "tensorboard.md"))
    folder = Path.cwd() / "runs" / "followed" / "tensorboard"
    assert printed.splitlines()[-1] == str(folder)
    assert list(folder.rglob("events.out.tfevents.*"))


@pytest.mark.skipif("HYPERFL_TEST_DATA" not in os.environ, reason="HYPERFL_TEST_DATA names no torchvision root")
def test_fashion_mnist(follow: Follow) -> None:
    cache = Path.home() / ".cache" / "hyperfl"
    cache.mkdir(parents=True)
    (cache / "data").symlink_to(os.environ["HYPERFL_TEST_DATA"])
    printed = follow([line for line in commands(DOCS / "reference" / "data-sets.md") if "fashion-mnist" in line])
    assert "59.77 MB down" in printed


def test_personalize_shows_the_commands_of_its_method() -> None:
    """The page's commands are on the method's page, where tests/unit/test_it_pfl_page.py tests them."""
    shown = re.findall(r"^    (hyperfl .*)$", (HOW_TO / "personalize.md").read_text(), re.MULTILINE)
    of_method = (DOCS / "methods" / "it-pfl.md").read_text().splitlines()
    assert len(shown) == 3
    assert not set(shown) - {line.strip().removeprefix("$ ") for line in of_method}
