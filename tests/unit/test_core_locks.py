"""The locks that keep several runs from counting the same cores of the machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from flwr.proto.federation_config_pb2 import SimulationConfig
from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.core_locks import CoreSlots, slots_folder, usable_cores
from hyperfl_flwr.launch.flower.env import federation_config

HOLDER = """
import subprocess, sys
from pathlib import Path
from hyperfl_flwr.launch.core_locks import CoreSlots
slots = CoreSlots(Path(sys.argv[1]), [0, 1, 2])
slots.acquire(int(sys.argv[2]))
child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print(child.pid, *slots.held, flush=True)
sys.stdin.read()
"""


def start_holder(folder: Path, wanted: int) -> "tuple[subprocess.Popen[str], int, list[int]]":
    command = [sys.executable, "-c", HOLDER, str(folder), str(wanted)]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    child, *held = map(int, process.stdout.readline().split())
    return process, child, held


def test_no_core_is_held_twice_and_kill_gives_back(tmp_path: Path) -> None:
    holder, orphan, held = start_holder(tmp_path, 2)
    try:
        assert held == [0, 1]
        with CoreSlots(tmp_path, [0, 1, 2]) as rest:
            assert rest.acquire(3) == 1
            assert rest.held == [2]
            holder.kill()
            holder.communicate()
            with CoreSlots(tmp_path, [0, 1, 2]) as freed:  # although a child of the killed process still runs
                assert freed.acquire(8) == 2
                assert freed.held == [0, 1]
    finally:
        holder.kill()
        os.kill(orphan, signal.SIGKILL)


def test_waits_and_tells_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperfl_flwr.launch.core_locks.POLL_SECONDS", 0.01)
    told: list[int] = []
    with CoreSlots(tmp_path, [4, 7]) as first:
        assert first.acquire(2) == 2
        second = CoreSlots(tmp_path, [4, 7])

        def release() -> None:
            told.append(1)
            first.release()

        assert second.acquire(1, on_wait=release) == 1
        assert (second.held, told) == ([4], [1])
        with pytest.raises(ValueError, match="no core may be held"):
            second.acquire(1)
        second.release()
        second.release()
    with pytest.raises(ValueError, match="1 or more"):
        CoreSlots(tmp_path, [0]).acquire(0)


def test_locks_are_not_inherited(tmp_path: Path) -> None:
    with CoreSlots(tmp_path, [0]) as slots:
        slots.acquire(1)
        assert not any(os.get_inheritable(descriptor) for descriptor in slots._held.values())


def test_the_number_of_cores_can_be_set() -> None:
    cores = usable_cores({})
    assert cores
    assert usable_cores({"HYPERFL_CORES": "1"}) == cores[:1]
    many = usable_cores({"HYPERFL_CORES": str(len(cores) + 3)})
    assert many[: len(cores)] == cores
    assert len(set(many)) == len(cores) + 3
    for wrong in ("0", "-1", "two", "1.5"):
        with pytest.raises(ConfigError, match="HYPERFL_CORES"):
            usable_cores({"HYPERFL_CORES": wrong})


def test_the_folder_is_private_and_the_same_for_all_runs(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    environment = {"XDG_RUNTIME_DIR": str(runtime), "HOME": str(tmp_path)}
    folder = slots_folder(environment)
    assert folder == slots_folder(environment) == runtime / "hyperfl" / "cores"
    assert folder.stat().st_mode & 0o077 == 0
    fallback = slots_folder({"XDG_RUNTIME_DIR": str(tmp_path / "absent"), "HOME": str(tmp_path)})
    assert fallback.parent == tmp_path / ".cache" / "hyperfl" / "cores"


def test_federation_config_mentions_gpus_only_when_there_are_some() -> None:
    assert "gpu" not in federation_config(4, 2)
    assert federation_config(4, 2).startswith("num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2 ")
    assert federation_config(4, 3, 1).endswith(
        " init-args-num-cpus=3 init-args-log-to-driver=false "
        "init-args-logging-level='ERROR' init-args-num-gpus=1 client-resources-num-gpus=0.3333"
    )
    with pytest.raises(ValueError, match="num_nodes=0"):
        federation_config(0, 1)


@pytest.mark.parametrize("num_gpus", range(1, 9))
@pytest.mark.parametrize("processes", range(1, 17))
def test_flower_starts_all_processes_of_all_gpus(
    processes: int, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower sends the share as float32 and computes the number of processes from it; Ray rounds it to 1e-4."""
    count = processes * num_gpus
    words = dict(word.split("=") for word in federation_config(count, count, num_gpus).split())
    share = SimulationConfig(
        client_resources_num_gpus=float(words["client-resources-num-gpus"])
    ).client_resources_num_gpus
    resources = {"CPU": float(words["init-args-num-cpus"]), "GPU": float(words["init-args-num-gpus"])}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Resources": resources}])
    assert pool_size_from_resources({"num_cpus": 1, "num_gpus": share}) == count
    assert 10_000 // round(share * 10_000) == processes


def test_an_exact_third_of_a_gpu_would_start_two_processes() -> None:
    share = SimulationConfig(client_resources_num_gpus=1 / 3).client_resources_num_gpus
    assert int(1 / share) == 2
