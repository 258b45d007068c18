"""Numbers of nodes and threads for various machines; expected values are computed by hand from the docstrings."""

from pathlib import Path

import pytest
import torch

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.planning import plan
from hyperfl_flwr.launch.plans import RAY
from hyperfl_flwr.launch.sizing import Machine, suitable_jobs, suitable_nodes, suitable_threads

HYPERNETWORK, CNN = 60_000_000, 470_000
"""Bytes that a node of HyperFL and of FedAvg receives."""


@pytest.mark.parametrize(
    ("cores", "memory", "gpus", "clients", "shared_bytes", "nodes", "threads"),
    [
        (2, 24e9, 0, 20, HYPERNETWORK, 2, 1),  # as many as cores
        (1, 24e9, 0, 20, HYPERNETWORK, 1, 1),
        (16, 64e9, 0, 20, CNN, 10, 1),  # 10 nodes have at most 2 clients each, as 16 nodes would
        (16, 64e9, 0, 20, HYPERNETWORK, 7, 2),  # sqrt(20 * 0.5 / 0.19) = 7.3
        (64, 256e9, 0, 1000, CNN, 63, 1),  # 63 nodes have at most 16 clients each, as 64 would
        (16, 64e9, 0, 1, HYPERNETWORK, 1, 4),  # 16 cores for one process: 4 threads at most
        (16, 64e9, 0, 3, CNN, 3, 4),
        (16, 64e9, 2, 100, CNN, 8, 1),  # 4 processes per GPU
        (2, 64e9, 1, 100, CNN, 2, 1),  # more processes than cores would wait for each other
        (16, 5e9, 0, 20, CNN, 2, 4),  # 2.5 GB for processes of 1 GB
        (16, 1e9, 0, 20, CNN, 1, 4),
    ],
)
def test_nodes_and_threads_fit_the_machine(
    cores: int, memory: float, gpus: int, clients: int, shared_bytes: int, nodes: int, threads: int
) -> None:
    machine = Machine(cores=cores, memory=memory, gpus=gpus)
    assert suitable_nodes(machine, clients, shared_bytes) == nodes
    assert suitable_threads(machine, nodes) == threads


@pytest.mark.parametrize(("gpu_memory", "nodes"), [(80e9, 8), (3.1e9, 4), (0.5e9, 2)])
def test_processes_fit_into_the_memory_of_the_gpus(gpu_memory: float, nodes: int) -> None:
    """Two GPUs, processes of 1.48 GB: four, two or at least one on each."""
    machine = Machine(cores=16, memory=256e9, gpus=2, gpu_memory=gpu_memory)
    assert machine.parallel(1, HYPERNETWORK) == nodes
    assert suitable_jobs(machine, 100) == min(8, 2 * max(1, int(gpu_memory / 1e9)))


def test_wanted_threads_leave_room_for_fewer_nodes() -> None:
    """On 8 cores, 4 threads per node leave room for 2 nodes; with 16 threads there is still one node."""
    machine = Machine(cores=8, memory=64e9)
    assert suitable_nodes(machine, 20, CNN, threads=4) == 2
    assert suitable_nodes(machine, 20, CNN, threads=16) == 1


def test_the_environment_sets_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """HYPERFL_CORES sets the number of cores; with the device cpu, no GPU counts."""
    monkeypatch.setenv("HYPERFL_CORES", "3")
    machine = Machine.detect(torch.device("cpu"))
    assert (machine.cores, machine.gpus, str(machine)) == (3, 0, "3 cores")
    assert machine.memory > 1e8


@pytest.mark.parametrize(
    ("num_nodes", "threads", "expected"),
    [
        (None, "auto", (5, 1, "6 cores")),
        (None, 3, (2, 3, "6 cores")),
        (2, "auto", (2, 3, "6 cores")),
        (4, 2, (4, 2, "")),
    ],
)
def test_a_plan_has_what_was_asked_for_and_chooses_the_rest(
    num_nodes: int | None,
    threads: Scalar,
    expected: tuple[int, int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six cores, five clients of FedAvg; the threads are written into the settings, where a resumed run finds them."""
    monkeypatch.setenv("HYPERFL_CORES", "6")
    changes: dict[str, Scalar] = {"method": "fedavg", "num-clients": 5, "threads": threads, "device": "cpu"}
    planned = plan(changes | {"output": str(tmp_path / "run")}, num_nodes, RAY)
    assert (planned.num_nodes, planned.threads, planned.chosen_for) == expected
    assert planned.settings["threads"] == planned.threads
