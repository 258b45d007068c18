"""A process that runs rounds when it is told to: `python -m benchmarks.worker SPECIFICATION`.

It reads one line for each measurement from standard input and writes one JSON object for it to standard output.
Processes are needed because the C library reads its allocator's settings once, at the start.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch

from benchmarks.memory import private_memory
from benchmarks.transport import measure_transport
from benchmarks.workload import Workload, client_round, in_process_rounds, plain_rounds
from hyperfl_flwr.metrics.memory import peak_memory


def main() -> None:
    """Do what the specification (JSON, first argument) says."""
    specification = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever else is printed
    work = Workload.from_json(specification["work"])
    start = {"private": private_memory(os.getpid()), "peak": peak_memory()}
    if specification["kind"] == "transport":
        for _ in _asked(answers):
            steps = [dataclasses.asdict(step) for step in measure_transport(work)]
            print(json.dumps({"steps": steps}), file=answers, flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        if specification["kind"] == "client":
            one = client_round(work, specification["program"], Path(folder))
            one()  # warms up
            for _ in _asked(answers):
                cpu, wall = time.process_time(), time.perf_counter()
                loss = one()
                result = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "loss": loss}
                print(json.dumps(result | _memory(start)), file=answers, flush=True)
            return
        for _ in _asked(answers):
            dataset = Path(specification["dataset"])
            if specification["program"] == "plain":
                rounds = plain_rounds(work, specification["rounds"], dataset)
            else:
                rounds = in_process_rounds(work, specification["rounds"], dataset, Path(folder) / "run")
            print(json.dumps(dataclasses.asdict(rounds) | _memory(start)), file=answers, flush=True)


def _asked(answers: TextIO) -> Iterator[str]:
    """Say that all is ready, and yield for each measurement that is asked for."""
    print("ready", file=answers, flush=True)
    yield from sys.stdin


def _memory(start: dict[str, int]) -> dict[str, int]:
    """Return the memory in bytes above that of a process that has imported torch and the project."""
    return {
        "private": private_memory(os.getpid()) - start["private"],
        "peak": peak_memory() - start["peak"],
    }


if __name__ == "__main__":
    main()
