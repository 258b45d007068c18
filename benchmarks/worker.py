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
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch

from benchmarks.cohort import cohort_round, size_of
from benchmarks.memory import private_memory
from benchmarks.private_steps import measure_private_steps
from benchmarks.secure_rounds import measure_rounds
from benchmarks.secure_sums import measure_secure_sums
from benchmarks.transport import measure_transport
from benchmarks.workload import Workload, client_round, in_process_rounds, plain_rounds
from hyperfl_flwr.core.process_memory import peak_memory


def main() -> None:
    """Run the measurements of the specification (JSON, first argument)."""
    specification = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    answers = sys.stdout
    sys.stdout = sys.stderr  # other output must not mix with the results
    work = Workload.from_json(specification["work"])
    start = {"private": private_memory(os.getpid()), "peak": peak_memory()}
    if specification["kind"] == "transport":
        for _ in _requests(answers):
            steps = [dataclasses.asdict(step) for step in measure_transport(work)]
            print(json.dumps({"steps": steps}), file=answers, flush=True)
        return
    if specification["kind"] == "private":
        for _ in _requests(answers):
            found = measure_private_steps(work, specification["target"], specification["repetitions"])
            print(json.dumps(dataclasses.asdict(found)), file=answers, flush=True)
        return
    if specification["kind"] == "secure":
        for _ in _requests(answers):
            cost = measure_secure_sums(work, specification["nodes"])
            print(json.dumps(dataclasses.asdict(cost)), file=answers, flush=True)
        return
    if specification["kind"] == "secure-rounds":
        for _ in _requests(answers):
            rounds = measure_rounds(work, specification["rounds"])
            print(json.dumps(dataclasses.asdict(rounds)), file=answers, flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        if specification["kind"] == "client":
            size = size_of(specification["program"])
            one = (cohort_round if size > 1 else client_round)(work, specification["program"], Path(folder))
            one()  # warm-up
            for _ in _requests(answers):
                cpu, wall = time.process_time(), time.perf_counter()
                loss = one()
                spent = {"cpu": (time.process_time() - cpu) / size, "wall": (time.perf_counter() - wall) / size}
                result = {**spent, "loss": loss}
                print(json.dumps(result | _memory(start)), file=answers, flush=True)
            return
        for _ in _requests(answers):
            dataset = Path(specification["dataset"])
            if specification["program"] == "plain":
                timed = plain_rounds(work, specification["rounds"], dataset)
            else:
                timed = in_process_rounds(work, specification["rounds"], dataset, Path(folder) / "run")
            print(json.dumps(dataclasses.asdict(timed) | _memory(start)), file=answers, flush=True)


def _requests(answers: TextIO) -> Iterator[str]:
    """Report that the process is ready, and yield once per requested measurement."""
    print("ready", file=answers, flush=True)
    yield from sys.stdin


def _memory(start: dict[str, int]) -> dict[str, int]:
    """Return the memory in bytes, relative to the start, when torch and the project had been imported."""
    return {
        "private": private_memory(os.getpid()) - start["private"],
        "peak": peak_memory() - start["peak"],
    }


if __name__ == "__main__":
    main()
