"""A process that measures on request: `python -m benchmarks.worker SPECIFICATION`.

For each line on standard input it runs one measurement and writes one JSON object to standard output. Separate
processes are needed because the C library reads its allocator's settings only once, at the start.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.cohort import cohort_round, size_of
from benchmarks.memory import private_memory
from benchmarks.private_steps import measure_private_steps
from benchmarks.secure_rounds import measure_rounds
from benchmarks.secure_sums import measure_secure_sums
from benchmarks.transport import measure_transport
from benchmarks.workload import Workload, client_round, in_process_rounds, plain_rounds
from hyperfl_flwr.core.process_memory import peak_memory

Measurement = Callable[[], dict[str, Any]]
"""Measures once, and returns the numbers by name."""


def main() -> None:
    """Run the measurements of the specification (JSON, first argument)."""
    specification = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    answers = sys.stdout
    sys.stdout = sys.stderr  # other output must not mix with the results
    with tempfile.TemporaryDirectory() as folder:
        measure = _measurement(specification, Path(folder))
        print("ready", file=answers, flush=True)
        for _ in sys.stdin:
            print(json.dumps(measure()), file=answers, flush=True)


def _measurement(specification: Mapping[str, Any], folder: Path) -> Measurement:
    """Prepare the measurement of a specification; a run writes its files to the folder."""
    work, kind = Workload.from_json(specification["work"]), specification["kind"]
    if kind == "transport":
        return lambda: {"steps": [dataclasses.asdict(step) for step in measure_transport(work)]}
    if kind == "private":
        target, repetitions = specification["target"], specification["repetitions"]
        return lambda: dataclasses.asdict(measure_private_steps(work, target, repetitions))
    if kind == "secure":
        return lambda: dataclasses.asdict(measure_secure_sums(work, specification["nodes"]))
    if kind == "secure-rounds":
        return lambda: dataclasses.asdict(measure_rounds(work, specification["rounds"]))
    start = {"private": private_memory(os.getpid()), "peak": peak_memory()}
    if kind == "client":
        return _of_client(work, specification["program"], folder, start)
    return _of_federation(work, specification, folder, start)


def _of_client(work: Workload, program: str, folder: Path, start: Mapping[str, int]) -> Measurement:
    """Return the measurement of a client's round: seconds for each client, loss and memory; the first is a warm-up."""
    size = size_of(program)
    one = (cohort_round if size > 1 else client_round)(work, program, folder)
    one()

    def measure() -> dict[str, Any]:
        cpu, wall = time.process_time(), time.perf_counter()
        loss = one()
        spent = {"cpu": (time.process_time() - cpu) / size, "wall": (time.perf_counter() - wall) / size}
        return {**spent, "loss": loss, **_memory(start)}

    return measure


def _of_federation(
    work: Workload, specification: Mapping[str, Any], folder: Path, start: Mapping[str, int]
) -> Measurement:
    """Return the measurement of a federation's rounds and memory, in plain PyTorch or by this project."""
    num_rounds, dataset = specification["rounds"], Path(specification["dataset"])

    def measure() -> dict[str, Any]:
        if specification["program"] == "plain":
            timed = plain_rounds(work, num_rounds, dataset)
        else:
            timed = in_process_rounds(work, num_rounds, dataset, folder / "run")
        return dataclasses.asdict(timed) | _memory(start)

    return measure


def _memory(start: Mapping[str, int]) -> dict[str, int]:
    """Return the memory in bytes, relative to the start, when torch and the project had been imported."""
    return {
        "private": private_memory(os.getpid()) - start["private"],
        "peak": peak_memory() - start["peak"],
    }


if __name__ == "__main__":
    main()
