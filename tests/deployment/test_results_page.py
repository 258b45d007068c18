"""The commands of docs/results/deployments.md, on a smaller data set.

The folders and the deployment are made as printed, and `--dry-run` accepts each run with the data of a simulation. Runs
with nodes that are killed and come back are in test_survives.py and test_secure_deployment.py.
"""

import os
import subprocess
from pathlib import Path

import pytest
from programs import HYPERFL

from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.node_settings import read_settings
from hyperfl_flwr.deploy.provision import init

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "deployments.md"
CLASSES = "Ankle-boot,Bag,Coat,Dress,Pullover,Sandal,Shirt,Sneaker,T-shirt-top,Trouser"
REPLACED = {
    "fashion-mnist": "digits",
    "data.train-samples=2000": "data.train-samples=120",
    "data.test-samples=1000": "data.test-samples=30",
    CLASSES: "0,1,2,3,4,5,6,7,8,9",
}


def bash_block(title: str) -> str:
    """Return the first bash block of a section of the page."""
    section = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return section.partition("```bash\n")[2].partition("```")[0]


def smaller(commands: str) -> str:
    """Return commands with smaller settings, where they have the page's."""
    for word, other in REPLACED.items():
        commands = commands.replace(word, other)
    return commands


def run_line(block: str) -> str:
    """Return a block's `hyperfl run` command as a dry run of a simulation with three clients."""
    command = "hyperfl run" + block.partition("\nhyperfl run")[2].partition(" & run=$!")[0]
    assert "--deployment fl" in command
    assert CLASSES in command
    return smaller(command).replace("--deployment fl", "--dry-run --num-nodes 3 --num-clients 3")


def shell(commands: str, folder: Path) -> None:
    """Run commands with this installation's programs."""
    path = os.pathsep.join([str(HYPERFL.parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=folder, env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_lines_before_the_superlink_give_each_node_its_folder(tmp_path: Path) -> None:
    first = smaller(bash_block("A node that is killed").partition("\nsh fl/server/start.sh")[0])
    shell(first.replace("--nodes 3", f"--nodes 3 --port {free_port()}"), tmp_path)
    for number in range(3):
        images = tmp_path / "data" / f"client-{number}"
        files = {split: len(list((images / split).rglob("*.png"))) for split in ("train", "test")}
        assert files == {"train": 120, "test": 30}
        settings = read_settings(tmp_path / "fl" / "nodes" / f"node-{number}")
        assert (settings.data, settings.threads) == (f"folder:{images}", 1)


@pytest.mark.parametrize("title", ["A node that is killed", "The same with secure sums"])
def test_a_block_is_a_script_and_its_run_is_accepted(title: str, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", "-c", bash_block(title)], check=True)
    shell(run_line(bash_block(title)), tmp_path)


def test_the_owners_line_for_secure_sums_writes_their_setting(tmp_path: Path) -> None:
    owners = bash_block("The same with secure sums").partition("\n")[0]
    init(Deployment(folder=tmp_path / "fl", host="127.0.0.1", port=free_port(), num_nodes=3))
    shell(owners, tmp_path)
    folders = [tmp_path / "fl" / "nodes" / f"node-{number}" for number in range(3)]
    assert [read_settings(folder).min_cohort for folder in folders] == [2, 2, 2]
