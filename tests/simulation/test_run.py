"""`hyperfl run` on Flower's simulation engine, with real processes and real kills."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import ray
from resident import assert_small
from waiting import PATIENCE, eventually

from hyperfl_flwr import ROOT
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.processes import descendants, process_table
from hyperfl_flwr.server.in_process_grid import InProcessGrid

pytestmark = pytest.mark.slow

HYPERFL = Path(sys.executable).with_name("hyperfl")

NUM_ROUNDS = 8
SETTINGS: dict[str, Scalar] = {
    "num-clients": 4,
    "num-rounds": NUM_ROUNDS,
    "fraction-train": 0.75,
    "checkpoint-every": 2,
    "node-timeout": 600.0,
    "local-epochs": 30,
    "hyperfl.hidden-width": 16,
    "hyperfl.embedding-dim": 8,
}
"""A federation whose rounds last long enough to be interrupted. Three of four clients keep both nodes busy in each."""


def arguments(output: Path) -> list[str]:
    sets = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return [str(HYPERFL), "run", "--engine", "ray", "--output", str(output), *sets]


@contextlib.contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a command in its own session; whatever it leaves is ended."""
    process = subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def below(root: int, name: str) -> list[int]:
    """Return the processes below a process whose command line contains a name."""
    return [process.pid for process in descendants([root], process_table()).values() if name in process.command]


def wait_for_round(output: Path, number: int, process: subprocess.Popen[str], kind: str = "train") -> None:
    def is_there() -> bool:
        there = any(record["round"] >= number for record in metrics(output, kind))
        assert there or process.poll() is None, process.communicate()
        return there

    eventually(is_there, f"round {number}", every=0.02)


def metrics(output: Path, kind: str) -> list[dict[str, object]]:
    """Return the lines of a kind without times and memory, which differ between runs."""
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    timed = ("seconds", "memory_mb", "bytes_on_wire")
    return [
        {key: value for key, value in record.items() if not key.endswith(timed)}
        for record in records
        if record["kind"] == kind
    ]


def results(output: Path) -> Mapping[str, object]:
    """Return everything that must be equal, bit for bit, in two equal runs."""
    arrays, _ = read_arrays(output / "checkpoints" / f"round-{NUM_ROUNDS:06d}.npz")
    kinds = ("train", "aggregate", "client", "client-aggregate")
    return {"arrays": arrays, **{kind: metrics(output, kind) for kind in kinds}}


def assert_equal(one: Mapping[str, object], other: Mapping[str, object]) -> None:
    np.testing.assert_equal(dict(one), dict(other))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, object]:
    """Return the results of the same run in this process: neither Ray nor kills may change a bit of it."""
    output = tmp_path_factory.mktemp("straight") / "run"
    settings = default_settings() | SETTINGS | {"output": str(output)}
    run(InProcessGrid(app, 2, settings, {"simulated": True}), RunConfig.from_flat(settings))
    return results(output)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def assert_failed_and_told_the_way_on(
    process: subprocess.Popen[str], output: Path, rounds: int, exit_status: int = 1
) -> str:
    """Check that a run ends with a hint on how to resume it; return its standard error."""
    _, complained = process.communicate(timeout=PATIENCE)
    assert process.returncode == exit_status
    assert f"hyperfl run --resume {output}" in complained
    assert rounds <= len(metrics(output, "train")) < NUM_ROUNDS
    return complained


@pytest.mark.timeout(1800)  # starts Ray three times
@pytest.mark.extended
def test_a_run_that_is_interrupted_and_killed_ends_as_if_nothing_had_happened(
    tmp_path: Path, undisturbed: Mapping[str, object]
) -> None:
    """An actor is killed with -9 and replaced, Ctrl-C stops all, and all actors are killed repeatedly.

    The run is resumed twice. Its results equal those of the in-process run bit for bit, and its folder is complete.
    Tests of the SuperLink kill the other processes (test_superlink.py).
    """
    output = tmp_path / "run"
    resume = [str(HYPERFL), "run", "--engine", "ray", "--resume", str(output)]
    with started(arguments(output), tmp_path) as process:
        wait_for_round(output, 1, process)
        assert len(below(process.pid, "raylet/raylet")) == 1
        assert below(process.pid, "monitor.py") == below(process.pid, "dashboard.py") == []  # of no use here
        kill(below(process.pid, "ray::ClientAppActor")[:1])  # it is replaced, and its message sent again
        wait_for_round(output, 3, process)  # between two checkpoints
        assert_small(process.pid)
        family = below(process.pid, "")
        process.send_signal(signal.SIGINT)
        assert_failed_and_told_the_way_on(process, output, 3, exit_status=130)
    assert not set(family) & set(process_table())
    assert "a new process replaces it" in (output / "server.log").read_text()
    with started(resume, tmp_path) as process:
        wait_for_round(output, 4, process)

        def has_ended() -> bool:
            kill(below(process.pid, "ray::ClientAppActor"))
            return process.poll() is not None

        eventually(has_ended, "the end of the run", every=0.05)
        assert "died twice" in assert_failed_and_told_the_way_on(process, output, 4)
    ended = subprocess.run(resume, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == str(output)
    assert_equal(results(output), undisturbed)
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["rounds"], summary["num_nodes"]) == (NUM_ROUNDS, 2)
    manifest = json.loads((output / "manifest.json").read_text())
    assert (manifest["status"], len(manifest["resumed"])) == ("completed", 2)
    assert np.array(manifest["label_counts"]["train"]).shape == (4, 10)
    assert (output / "plots" / "run.png").read_bytes().startswith(b"\x89PNG")


def listening(pids: list[int]) -> list[str]:
    """Return the local addresses on which processes accept TCP connections."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    accepting = {f"socket:[{row[9]}]": row[1] for row in rows if row[3] == "0A"}
    held = set()
    for file in (file for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            held.add(str(file.readlink()))
    return [address for name, address in accepting.items() if name in held]


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="ports are read from Linux's /proc")
@pytest.mark.extended
def test_the_in_process_engine_opens_no_port_and_gives_the_same_numbers(
    tmp_path: Path, undisturbed: Mapping[str, object]
) -> None:
    """It is killed and resumed; packages with our names in the working directory are not imported."""
    output, foreign = tmp_path / "run", tmp_path / "experiments"
    foreign.mkdir()
    (foreign / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    words = ["--engine", "in-process", "--num-nodes", "2"]
    with started([*arguments(output), *words], tmp_path) as process:
        wait_for_round(output, 3, process)
        family = [process.pid, *below(process.pid, "")]
        assert len(family) >= 3
        with socket.create_server(("127.0.0.1", 0)):
            assert listening([os.getpid()])
        assert listening(family) == []
        kill(below(process.pid, "hyperfl_flwr.launch.in_process_app"))
        assert "exit code" in assert_failed_and_told_the_way_on(process, output, 3)
    assert not set(family) & set(process_table())
    resume = [str(HYPERFL), "run", "--resume", str(output), "--engine", "in-process"]
    ended = subprocess.run(resume, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert_equal(results(output), undisturbed)
    assert json.loads((output / "manifest.json").read_text())["code"]["app"] == str(ROOT)
    assert not (tmp_path / "imported").exists()


def test_a_client_that_learns_nothing_but_nan_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.random((60, 8, 8), dtype=np.float32)
    clients = np.repeat(np.arange(3), 20)
    images[clients == 1] = np.nan
    np.savez(tmp_path / "own.npz", images=images, labels=rng.integers(0, 3, 60), clients=clients)
    sets = ["--set", "failure-budget=0.5", "--set", "hyperfl.hidden-width=8", "--set", "hyperfl.embedding-dim=4"]
    sizes = ["--num-clients", "3", "--num-rounds", "2", "--engine", "in-process"]
    command = [HYPERFL, "run", "--dataset", "npz:own.npz", *sizes, *sets]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "client 1 is left out" in done.stderr
    output = Path(done.stdout.splitlines()[-1])
    assert output.is_relative_to(tmp_path / "runs")
    summary = json.loads((output / "summary.json").read_text())
    assert summary["test_accuracy_per_client"][1] is None
    assert summary["test_accuracy_num_clients"] == 2
    assert sorted(path.name for path in (output / "failures").iterdir()) == [
        "round-000001-client-00001.txt",
        "round-000002-client-00001.txt",
    ]


def ray_without_a_server(folder: Path) -> Path:
    """Return a folder for PYTHONPATH with the installed Ray, one of whose programs cannot be executed."""
    installed, program = Path(ray.__file__).parent, Path("core/src/ray/gcs/gcs_server")
    for parent in reversed(program.parents):
        (folder / "ray" / parent).mkdir(parents=True)
        for entry in (installed / parent).iterdir():
            if entry.relative_to(installed) not in (program, *program.parents):
                (folder / "ray" / parent / entry.name).symlink_to(entry)
    (folder / "ray" / program).write_text("")
    return folder


@pytest.mark.extended
def test_a_simulation_engine_that_does_not_start_is_named_with_the_reason(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ray_without_a_server(tmp_path / "packages"))}
    ended = subprocess.run(
        arguments(tmp_path / "run"), cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=PATIENCE
    )
    assert ended.returncode == 1
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: Flower's simulation engine failed: [Errno 13] Permission denied: ")
    assert error.endswith("gcs_server'; --verbose shows its log, --engine in-process needs no Ray")
