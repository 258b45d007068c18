"""Prove a machine's GPU, and write what was found to one JSON file: `make gpu`, or `python -m benchmarks.gpu`.

It runs `hyperfl doctor`, the tests that need CUDA, the golden sequences on the GPU against those of the CPU, and a run
with three nodes on one GPU; then it measures client rounds. Without a GPU it fails.
"""

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cohort import TOGETHER, cohort_round
from benchmarks.workload import Workload, client_round
from hyperfl_flwr import ROOT
from hyperfl_flwr.core.arithmetic import BFLOAT16_CAPABILITY, set_arithmetic
from hyperfl_flwr.core.packages.versions import versions
from hyperfl_flwr.core.setting_types import Precision
from hyperfl_flwr.launch.app_bundle import commit
from hyperfl_flwr.launch.machine_checks import driver_version

OUTPUT = ROOT / "build" / "gpu.json"

WORK = (
    Workload(method="fedavg", shape=(1, 28, 28)),
    Workload(method="hyperfl", shape=(1, 28, 28)),
    Workload(method="hyperfl", shape=(3, 32, 32)),
)
COHORT = 10
"""Number of clients that are also measured together."""

PRECISIONS: Sequence[Precision] = ("fp32", "tf32", "bf16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A command that was run.

    Attributes:
        name: Its purpose.
        command: Its words.
        seconds: Wall seconds.
        passed: Whether its exit code was 0.
    """

    name: str
    command: Sequence[str]
    seconds: float
    passed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRound:
    """A client's round, as a node does it: load, evaluate, train, evaluate; in a cohort, also the sum.

    Attributes:
        method: The method.
        shape: Shape of an image, (channels, height, width).
        precision: The setting `precision`.
        clients: Number of clients that were trained together.
        seconds: Median of the wall seconds, divided by the number of clients.
        megabytes: Most memory that torch held on the GPU, in 10^6 bytes; 0 on a CPU.
    """

    method: str
    shape: Sequence[int]
    precision: Precision
    clients: int
    seconds: float
    megabytes: float


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the commands of the steps by their purpose; the run's folder is made in `folder`."""
    python = [sys.executable, "-m"]
    tests = [*python, "pytest", "-q", "-n", "0", "-m", "cuda"]
    return {
        "doctor": [*python, "hyperfl_flwr", "doctor"],
        "tests": [*tests, "tests", "--ignore", "tests/golden"],
        "goldens": [*tests, "tests/golden"],
        "three nodes on one GPU": [
            *python, "hyperfl_flwr", "run", "--engine", "ray", "--num-nodes", "3", "--num-clients", "6",
            "--num-rounds", "2", "--set", "device=cuda", "--output", str(folder / "run"),
        ],
    }  # fmt: skip


def run_steps(words: Mapping[str, Sequence[str]]) -> list[Step]:
    """Run commands one after the other, with their output on standard error; a failure does not stop the others."""
    found = []
    for name, command in words.items():
        print(f"\n== {name}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        ended = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        seconds = round(time.perf_counter() - began, 1)
        found.append(Step(name=name, command=command, seconds=seconds, passed=ended.returncode == 0))
    return found


def measured_round(work: Workload, precision: Precision, repetitions: int, clients: int = 1) -> MeasuredRound:
    """Measure a client's round on the workload's device, after one round that is not counted.

    Args:
        work: The workload.
        precision: The setting `precision`; `fp32` with several clients.
        repetitions: Number of measurements.
        clients: Number of clients that are trained together.
    """
    device = torch.device(work.device)
    set_arithmetic(precision, deterministic=False, device=device)
    with tempfile.TemporaryDirectory() as folder:
        if clients == 1:
            one = client_round(work, "ours", Path(folder), precision)
        else:
            one = cohort_round(work, f"{TOGETHER}{clients}", Path(folder))
        one()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times = []
        for _ in range(repetitions):
            began = time.perf_counter()
            one()  # returns a number that the CPU has waited for
            times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return MeasuredRound(
        method=work.method, shape=work.shape, precision=precision, clients=clients,
        seconds=round(statistics.median(times) / clients, 4), megabytes=round(peak / 1e6, 1),
    )  # fmt: skip


def report(device: Mapping[str, Any], steps: Sequence[Step], rounds: Sequence[MeasuredRound]) -> dict[str, Any]:
    """Return what was found as one document."""
    return {
        "passed": all(step.passed for step in steps),
        "device": dict(device),
        "commit": commit() or "unknown",
        "python": platform.python_version(),
        "versions": versions(),
        "steps": [dataclasses.asdict(step) for step in steps],
        "client_rounds": [dataclasses.asdict(one) for one in rounds],
    }


def found_device() -> dict[str, Any]:
    """Return name, memory (10^6 bytes), driver and CUDA version of the first GPU; empty without one."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "megabytes": round(properties.total_memory / 1e6),
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version() or "unknown",
        "cuda": torch.version.cuda,
        "number": torch.cuda.device_count(),
    }


def main() -> int:
    """Run everything, write the document, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Prove this machine's GPU.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file to write (default: build/gpu.json)")
    parser.add_argument("--repetitions", type=int, default=7, help="measurements of each client round (default: 7)")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, got {options.repetitions}")
    device = found_device()
    if not device:
        print(f"error: torch {torch.__version__} finds no GPU; `hyperfl doctor` says why", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        steps = run_steps(commands(Path(folder)))
    on_gpu = [dataclasses.replace(work, device="cuda") for work in WORK]
    able = [each for each in PRECISIONS if each != "bf16" or torch.cuda.get_device_capability(0) >= BFLOAT16_CAPABILITY]
    rounds = [measured_round(work, precision, options.repetitions) for work in on_gpu for precision in able]
    rounds += [measured_round(work, "fp32", options.repetitions, COHORT) for work in on_gpu]
    found = report(device, steps, rounds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    print(options.output)
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
