"""The commands in the section "A deployment" of docs/results/index.md are run as printed, on a smaller data set.

Of the section on secure sums, the lines that replace others are checked without a run;
`tests/deployment/test_secure_deployment.py` has one.
"""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import HYPERFL, PATIENCE, SMALL, eventually, free_port, processes_of, rows_of, sets

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.node_settings import read_settings
from hyperfl_flwr.deploy.provision import init
from hyperfl_flwr.launch.flower_env import training_environment
from hyperfl_flwr.runs.run_directory import read_manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "index.md"
ROUNDS = 4
WAITS: dict[str, Scalar] = {"min-nodes": 3, "node-timeout": PATIENCE}
"""After a round without node 1 the next round waits for it, so that it is back before the run ends."""

CLASSES = "Ankle-boot,Bag,Coat,Dress,Pullover,Sandal,Shirt,Sneaker,T-shirt-top,Trouser"
REPLACED = {
    "fashion-mnist": "digits",
    "data.train-samples=2000": "data.train-samples=120",
    "data.test-samples=1000": "data.test-samples=30",
    "--num-rounds 10": f"--num-rounds {ROUNDS} {' '.join(sets(SMALL | WAITS))}",
    CLASSES: "0,1,2,3,4,5,6,7,8,9",
}


def bash_block(title: str) -> str:
    """Return the first bash block of a section of the page."""
    section = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return section.partition("```bash\n")[2].partition("```")[0]


def page_commands() -> str:
    """Return the commands of a deployment, with smaller settings."""
    commands = bash_block("A deployment")
    for word, other in (REPLACED | {"--nodes 3": f"--nodes 3 --port {free_port()}"}).items():
        assert word in commands, word
        commands = commands.replace(word, other)
    return commands


def left_of(folder: Path, session: int) -> set[int]:
    """Return the running processes of a session, and of a deployment's programs in a folder."""
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
    """Results of the page's commands.

    Attributes:
        folder: Folder in which they were run.
        code: Their exit code.
        said: Their output.
        left: Processes that still run afterwards.
    """

    folder: Path
    code: int
    said: str
    left: set[int]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replayed]:
    """Run the page's commands in an empty folder; kill processes that they leave."""
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
    """Each node has as many samples as there are files; the run's settings give no number."""
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


def test_the_lines_for_secure_sums_are_right(tmp_path: Path) -> None:
    """The owners' setting is written, and the run is accepted with settings and data of a simulation."""
    owners, _, rest = bash_block("A deployment with secure sums").partition("\n")
    init(Deployment(folder=tmp_path / "fl", host="127.0.0.1", port=free_port(), num_nodes=3))
    subprocess.run(["bash", "-c", owners], cwd=tmp_path, check=True)
    folders = [tmp_path / "fl" / "nodes" / f"node-{number}" for number in range(3)]
    assert [read_settings(folder).min_cohort for folder in folders] == [2, 2, 2]
    command = rest.partition(" & run=$!")[0].replace("--deployment fl", "--dry-run --num-nodes 3 --num-clients 3")
    for word in ("fashion-mnist", CLASSES):
        assert word in command
        command = command.replace(word, REPLACED[word])
    environment = os.environ | {"PATH": os.pathsep.join([str(HYPERFL.parent), os.environ.get("PATH", os.defpath)])}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "secagg.enabled" in command
