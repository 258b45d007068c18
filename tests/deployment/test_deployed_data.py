"""Owners' own images in a deployment, and a network that is installed on all machines: nothing of either travels.

The commands of docs/results.md, section "A deployment", are run as they stand there, on a smaller data set.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from programs import HYPERFL, PATIENCE, LocalDeployment, Program, eventually, free_port, local_deployment, processes_of

from experiments.flower import training_environment
from hyperfl_flwr.client_app import app
from hyperfl_flwr.config import RunConfig, default_settings
from hyperfl_flwr.data.datasets import load_dataset
from hyperfl_flwr.in_process import InProcessGrid
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.recording import read_manifest, read_metrics
from hyperfl_flwr.scalars import Scalar
from hyperfl_flwr.server_app import run
from hyperfl_flwr.storage import read_arrays

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results.md"
CLASSES = "0,1,2,3,4,5,6,7,8,9"
SMALL: dict[str, Scalar] = {"local-epochs": 1, "hyperfl.hidden-width": 8, "hyperfl.embedding-dim": 4}


def sets(settings: dict[str, Scalar]) -> list[str]:
    """Return settings as words of a command."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def rows_of(output: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(output) if row["kind"] == kind]


# The page's commands

ROUNDS = 5
WAITS: dict[str, Scalar] = {"min-nodes": 3, "node-timeout": PATIENCE}
"""After a round without node 1 the next one waits for it, so that it is back before the run ends."""

REPLACED = {
    "fashion-mnist": "digits",
    "data.train-samples=2000": "data.train-samples=120",
    "data.test-samples=1000": "data.test-samples=30",
    "--num-rounds 10": f"--num-rounds {ROUNDS} {' '.join(sets(SMALL | WAITS))}",
    "Ankle-boot,Bag,Coat,Dress,Pullover,Sandal,Shirt,Sneaker,T-shirt-top,Trouser": CLASSES,
}


def page_commands() -> str:
    """Return the bash block of the page's section, smaller."""
    section = PAGE.read_text().partition("\n## A deployment\n")[2].partition("\n## ")[0]
    commands = section.partition("```bash\n")[2].partition("```")[0]
    for word, other in (REPLACED | {"--nodes 3": f"--nodes 3 --port {free_port()}"}).items():
        assert word in commands, word
        commands = commands.replace(word, other)
    return commands


def left_of(folder: Path, session: int) -> set[int]:
    """Return the processes of a session, and those of a deployment's programs in a folder, that have not ended."""
    found = set(processes_of(folder))
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, _, its_session = (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
                if int(its_session) == session and state != "Z":
                    found.add(int(entry.name))
    return found


@dataclass(frozen=True)
class Replayed:
    """What came of the page's commands.

    Attributes:
        folder: Where they were run.
        code: Their exit code.
        said: What they have printed.
        left: The processes that they have left.
    """

    folder: Path
    code: int
    said: str
    left: set[int]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replayed]:
    """Run the page's commands in an empty folder; what they leave is killed."""
    folder = tmp_path_factory.mktemp("page").resolve()
    script = folder.with_suffix(".sh")
    script.write_text(page_commands())
    environment = training_environment(keeps_memory=False)
    environment["PATH"] = os.pathsep.join([str(HYPERFL.parent), environment.get("PATH", os.defpath)])
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", str(script)], cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3 * PATIENCE)
        with contextlib.suppress(AssertionError):
            eventually(lambda: not left_of(folder, process.pid), "the end of all processes")
        left = left_of(folder, process.pid)
        yield Replayed(folder, -1 if process.poll() is None else process.returncode, log.read_text(), left)
    finally:
        for pid in left_of(folder, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def test_the_commands_of_the_page_come_to_their_end_and_leave_no_process(replayed: Replayed) -> None:
    assert (replayed.code, replayed.left) == (0, set()), replayed.said
    output = replayed.folder / "run"
    assert read_manifest(output)["status"] == "completed"
    assert [row["round"] for row in rows_of(output, "train")] == list(range(1, ROUNDS + 1))


def test_each_node_of_the_page_trains_its_own_folder(replayed: Replayed) -> None:
    """Expected: as many samples as there are files; the run itself names no number."""
    rows = rows_of(replayed.folder / "run", "client")
    for number in range(3):
        images = replayed.folder / "data" / f"client-{number}"
        files = {split: len(list((images / split).rglob("*.png"))) for split in ("train", "test")}
        assert files == {"train": 120, "test": 30}
        assert f"node {number} takes part: clients {number}, 120 training samples (33% of all)" in replayed.said
        mine = [row for row in rows if row["client"] == number]
        assert {(row["num_examples"], row["test_examples"]) for row in mine} == {(120, 30)}
        assert len(list((replayed.folder / "fl" / "nodes" / f"node-{number}" / "state").glob("decoded/folder-*"))) == 1


def test_the_node_that_the_page_kills_is_away_and_comes_back(replayed: Replayed) -> None:
    rows = rows_of(replayed.folder / "run", "train")
    there = {row["round"] for row in rows if 1 not in row["away"]}
    away = {row["round"] for row in rows} - there
    assert {1, 2} <= there
    assert away
    assert max(there) > min(away)
    log = (replayed.folder / "run" / "server.log").read_text()
    assert re.search(r"round 2/.*node 1 is away \(clients 1\).*node 1 is back \(clients 1\)", log, flags=re.S), log


# Three owners and an installed network

NETWORK = """
from torch import nn


def build(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, num_classes))
"""
MODULE = "network_of_theirs"
OWN: dict[str, Scalar] = SMALL | {
    "data.classes": CLASSES,
    "data.input-shape": "1x8x8",
    "min-nodes": 2,
    "node-timeout": PATIENCE,
    "checkpoint-every": 1,
    "num-rounds": 1,
    "target": f"{MODULE}:build",
}


def install(folder: Path) -> Path:
    """Make an installation of its own, with this one's packages and the network; returns its programs' folder."""
    venv.create(folder, symlinks=True)
    paths = {key: str(folder) for key in ("base", "platbase")}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    here = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (packages / "these.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in sorted(here)))
    (packages / f"{MODULE}.py").write_text(NETWORK)
    programs = folder / "bin"
    for entry in entry_points(group="console_scripts"):
        if entry.dist is not None and entry.dist.name in ("flwr", "hyperfl-flwr"):
            start = f"import sys; from {entry.module} import {entry.attr} as program; sys.exit(program())"
            (programs / entry.name).write_text(f"#!{programs / 'python'}\n{start}\n")
            (programs / entry.name).chmod(0o755)
    return programs


def owners_data(folder: Path) -> list[str]:
    """Write scikit-learn's digits as three owners hold them; returns each one's `data` of node.toml.

    Node 0 has 40 images of four classes, a quarter of each class for the test; node 1 60 for training and 20 for the
    test; node 2 a folder that is no class of the federation's.
    """
    digits = load_dataset("digits").train
    for owner, labels in ((0, "0123"), (2, "789")):
        for label in labels:
            (folder / f"owner-{owner}" / label).mkdir(parents=True)
            for row in np.flatnonzero(digits.labels == int(label))[:10]:
                Image.fromarray(digits.images[row, 0]).save(folder / f"owner-{owner}" / label / f"{row}.png")
    (folder / "owner-2" / "9").rename(folder / "owner-2" / "Mrs. Secret")
    np.savez(
        folder / "owner-1.npz",
        images=digits.images[-80:-20, 0], labels=digits.labels[-80:-20],
        test_images=digits.images[-20:, 0], test_labels=digits.labels[-20:],
    )  # fmt: skip
    return [f"folder:{folder / 'owner-0'}", f"npz:{folder / 'owner-1.npz'}", f"folder:{folder / 'owner-2'}"]


@dataclass(frozen=True)
class Owners:
    """One run of three owners with an installed network.

    Attributes:
        made: SuperLink and nodes.
        data: Each owner's `data` of node.toml.
        output: The run's folder.
        said: What the command has printed besides.
    """

    made: LocalDeployment
    data: list[str]
    output: Path
    said: str


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owners]:
    folder = tmp_path_factory.mktemp("owners")
    data = owners_data(folder)
    programs = install(folder / "installation")
    with local_deployment(folder / "fl", 3) as made:
        for program in (made.server, *made.nodes):
            (program.folder / "environment").write_text(f"HYPERFL_BIN='{programs}'\n")
        for node, mine in zip(made.nodes, data, strict=True):
            name_data(node, mine)
        made.start()
        words = ["--method", "hyperfl", *sets(OWN), "--output", str(folder / "run"), "--deployment", str(made.folder)]
        (folder / "elsewhere").mkdir()
        done = subprocess.run(
            [programs / "hyperfl", "run", *words], cwd=folder / "elsewhere", stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=3 * PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        yield Owners(made, data, folder / "run", done.stderr)


def name_data(node: Program, data: str) -> None:
    settings = node.folder / "node.toml"
    text = settings.read_text()
    assert '\ndata = ""\n' in text
    settings.write_text(text.replace('\ndata = ""\n', f'\ndata = "{data}"\n'))


def test_folders_and_files_of_owners_train_as_in_one_process(
    owners: Owners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network is built by each machine's own installation; the same run in this process finds it elsewhere."""
    (tmp_path / f"{MODULE}.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    here = tmp_path / "here"
    settings = default_settings() | OWN | {"num-clients": 3, "threads": 1, "device": "cpu", "output": str(here)}
    grid = InProcessGrid(app, 3, settings)
    for number, (context, data) in enumerate(zip(grid._contexts.values(), owners.data, strict=True)):
        state = str(tmp_path / f"state-{number}")
        context.node_config |= {"data": data, "device": "cpu", "threads": 1, "state-dir": state}
    run(grid, RunConfig.from_flat(settings, methods=METHODS))
    (expected,), (found,) = rows_of(here, "train"), rows_of(owners.output, "train")
    assert found["own_accuracy"] == expected["own_accuracy"]
    counts = [(row["client"], row["num_examples"], row["test_examples"]) for row in rows_of(owners.output, "client")]
    assert counts == [(0, 32, 8), (1, 60, 20)]
    file = Path("checkpoints") / "round-000001.npz"
    np.testing.assert_equal(read_arrays(owners.output / file)[0], read_arrays(here / file)[0])


def test_a_folder_with_another_class_is_refused_by_number_and_the_others_go_on(owners: Owners) -> None:
    """The server learns how many folders are no classes, and not how they are called; the node's own log tells it."""
    assert re.search(r"^node 2 .*: .*1 of its folders of classes are not in data\.classes", owners.said, re.M), (
        owners.said
    )
    assert "\nnode 2 is missing (clients 2)\n" in owners.said
    assert "Secret" not in owners.said
    (row,) = rows_of(owners.output, "train")
    assert (row["clients"], row["away"], row["failed"]) == (2, [2], [])
    told = [(refusal["node"], refusal["reason"]) for refusal in read_manifest(owners.output)["refused"]]
    assert told == [(2, "1 of its folders of classes are not in data.classes, see the node's log")]
    assert "Mrs. Secret" in owners.made.nodes[2].log
    servers = [path for folder in (owners.output, owners.made.server.folder) for path in folder.rglob("*")]
    assert not any(b"Secret" in path.read_bytes() for path in servers if path.is_file())


def test_nothing_of_an_installed_network_travels(owners: Owners) -> None:
    told = read_manifest(owners.output)["model"]
    assert (told["factory"], told["installed"]) == (OWN["target"], True)
    assert not (owners.output / "model").exists()
    assert list(owners.made.folder.rglob("*.py"))  # the apps that were handed out
    assert not list(owners.made.folder.rglob(f"{MODULE}*"))
    assert not list(owners.made.folder.rglob("model"))
    summary = json.loads((owners.output / "summary.json").read_text())
    assert len([value for value in summary["test_accuracy_per_client"] if value is not None]) == 2
