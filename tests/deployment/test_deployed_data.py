"""A deployment with the owners' own data and a network installed on all machines: neither of them is sent."""

import json
import re
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from programs import SMALL, LocalDeployment, Program, local_deployment, rows_of, sets
from waiting import PATIENCE

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_format import title_of
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.status import Status
from hyperfl_flwr.node.data_versions import versions_of
from hyperfl_flwr.runs.cross_site import CrossSite
from hyperfl_flwr.runs.run_directory import read_manifest
from hyperfl_flwr.server.in_process_grid import InProcessGrid

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CLASSES = "0,1,2,3,4,5,6,7,8,9"

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
    "cross-site": True,
}


def install(folder: Path) -> Path:
    """Create an environment with the packages of this one and the network; return the folder of its programs."""
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
    """Write scikit-learn's digits for three owners and return each one's `data` of node.toml.

    Node 0 has 40 images of four classes, of which 8 become test data; node 1 has 60 for training and 20 for testing;
    node 2 has a folder that is not a class of the federation.
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
    """A run of three owners with an installed network.

    Attributes:
        made: The deployment with SuperLink and nodes.
        data: The `data` setting in each owner's node.toml.
        output: The run's folder.
        said: Standard error of the command.
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
            decide(node, mine)
        made.start()
        words = ["--method", "hyperfl", *sets(OWN), "--output", str(folder / "run"), "--deployment", str(made.folder)]
        (folder / "elsewhere").mkdir()
        done = subprocess.run(
            [programs / "hyperfl", "run", *words], cwd=folder / "elsewhere", stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=3 * PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        yield Owners(made, data, folder / "run", done.stderr)


def decide(node: Program, data: str) -> None:
    """Name the owner's data in node.toml, and allow cross-site matrices."""
    settings = node.folder / "node.toml"
    text = settings.read_text()
    for before, after in (
        ('\ndata = ""\n', f'\ndata = "{data}"\n'),
        ("\ncross-site = false\n", "\ncross-site = true\n"),
    ):
        assert before in text
        text = text.replace(before, after)
    settings.write_text(text)


def test_folders_and_files_of_owners_train_as_in_one_process(
    owners: Owners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results equal those of the same run in this process; each machine builds its own installed network."""
    (tmp_path / f"{MODULE}.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    here = tmp_path / "here"
    settings = default_settings() | OWN | {"num-clients": 3, "threads": 1, "device": "cpu", "output": str(here)}
    grid = InProcessGrid(app, 3, settings)
    for number, (context, data) in enumerate(zip(grid._contexts.values(), owners.data, strict=True)):
        state = str(tmp_path / f"state-{number}")
        context.node_config |= {"data": data, "device": "cpu", "threads": 1, "state-dir": state, "cross-site": True}
    run(grid, RunConfig.from_flat(settings))
    (expected,), (found,) = rows_of(here, "train"), rows_of(owners.output, "train")
    assert found["personalized_accuracy"] == expected["personalized_accuracy"]
    counts = [(row["client"], row["num_examples"], row["test_examples"]) for row in rows_of(owners.output, "client")]
    assert counts == [(0, 32, 8), (1, 60, 20)]
    file = Path("checkpoints") / "round-000001.npz"
    np.testing.assert_equal(read_arrays(owners.output / file)[0], read_arrays(here / file)[0])
    matrix = CrossSite.read(owners.output)
    in_process = CrossSite.read(here)
    assert matrix is not None
    assert in_process is not None
    assert matrix.accuracy == in_process.accuracy
    assert (matrix.clients, matrix.samples) == ([0, 1], [8, 20])


def test_each_owner_has_the_version_of_its_data(owners: Owners) -> None:
    for node, data, numbers in zip(owners.made.nodes, owners.data, ((32, 8), (60, 20)), strict=False):
        (version,) = versions_of(node.folder / "state")
        assert (version.title, version.train, version.test) == (title_of(data), *numbers)
    assert read_manifest(owners.output)["data"]["sha256"] == ""


def test_a_folder_with_another_class_is_refused_and_the_others_go_on(owners: Owners) -> None:
    """The server learns neither the names nor the number of unknown class folders, which only the node's log has."""
    assert re.search(r"^node 2 .*: .*some of its class folders are not in data\.classes", owners.said, re.M), (
        owners.said
    )
    assert "\nnode 2 is missing (clients 2)\n" in owners.said
    assert "Secret" not in owners.said
    (row,) = rows_of(owners.output, "train")
    assert (row["clients"], row["away"], row["failed"]) == (2, [2], [])
    told = [(refusal["node"], refusal["reason"]) for refusal in read_manifest(owners.output)["refused"]]
    assert told == [(2, "some of its class folders are not in data.classes, see the node's log")]
    assert "Mrs. Secret" in owners.made.nodes[2].log
    servers = [path for folder in (owners.output, owners.made.server.folder) for path in folder.rglob("*")]
    assert not any(b"Mrs. Secret" in path.read_bytes() for path in servers if path.is_file())


def test_the_status_has_nodes_and_the_run(owners: Owners) -> None:
    found = Status.of(Deployment.read(owners.made.folder))
    assert found.superlink == "running"
    assert [(node.number, node.state) for node in found.nodes] == [(number, "connected") for number in range(3)]
    (run,) = found.runs
    assert (run.status, run.folder, run.round, run.num_rounds) == ("finished:completed", str(owners.output), 1, 1)
    assert run.away == (2,)
    assert "node 2 was refused: some of its class folders are not in data.classes, see the node's log" in run.problems


def test_the_data_set_of_the_settings_is_not_said_to_have_been_used(owners: Owners) -> None:
    assert read_manifest(owners.output)["settings"]["dataset"] == "digits"
    summary = json.loads((owners.output / "summary.json").read_text())
    assert summary["dataset"] == "the nodes' own data, 10 classes, 1x8x8"


def test_nothing_of_an_installed_network_travels(owners: Owners) -> None:
    told = read_manifest(owners.output)["model"]
    assert (told["factory"], told["installed"]) == (OWN["target"], True)
    assert not (owners.output / "model").exists()
    assert list(owners.made.folder.rglob("*.py"))  # the distributed app's files
    assert not list(owners.made.folder.rglob(f"{MODULE}*"))
    assert not list(owners.made.folder.rglob("model"))
    summary = json.loads((owners.output / "summary.json").read_text())
    assert len([value for value in summary["test_accuracy_per_client"] if value is not None]) == 2
