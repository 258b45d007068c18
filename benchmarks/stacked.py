"""Measure rounds of several clients on one device, stacked and one by one: `python -m benchmarks.stacked`.

It shows which form of convolutions is faster on a type of device, see `hyperfl_flwr.models.stacked`, and how large a
cohort should be. Each line is the median of some rounds of a node: load, evaluate, train, evaluate, sum.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.cohort import ONE_BY_ONE, TOGETHER, cohort_round, size_of
from benchmarks.workload import Workload
from clients.engine.base import BaseClient
from clients.engine.stacked_cohort import StackedCohort
from hyperfl_flwr.core.arithmetic import set_arithmetic
from hyperfl_flwr.models.stacked import CONVOLUTIONS
from hyperfl_flwr.training import hyperfl_cohort, stacked_sgd

METHODS = ("fedavg", "fedrep", "hyperfl")
SHAPES = ((1, 28, 28), (3, 32, 32))
SIZES = (5, 10, 20, 50)


@contextlib.contextmanager
def stacked_with(form: str) -> Iterator[None]:
    """Compute convolutions in one form, and stack training on the CPU, too, in a `with` block."""

    def convolution(_: torch.device) -> Any:  # noqa: ANN401 - a function of the table
        return CONVOLUTIONS[form]

    def together(*_: object) -> StackedCohort:
        return StackedCohort()

    with contextlib.ExitStack() as stack:
        for module in (stacked_sgd, hyperfl_cohort):
            stack.enter_context(mock.patch.object(module, "convolution_for", convolution))
        stack.enter_context(mock.patch.object(BaseClient, "together", together))
        yield


def measured(work: Workload, program: str, repetitions: int) -> dict[str, float]:
    """Return milliseconds of a client's round, and the most memory of a GPU in 10^6 bytes."""
    is_gpu = work.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        one = cohort_round(work, program, Path(folder))
        one()
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repetitions):
            began = time.perf_counter()
            one()
            times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 1e6 if is_gpu else 0.0
    return {"ms_per_client": round(1e3 * statistics.median(times) / size_of(program), 2), "megabytes": round(peak)}


def programs(sizes: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the programs with the form of their convolutions, first five clients one by one."""
    yield f"{ONE_BY_ONE}{min(sizes)}", "grouped"
    for form in CONVOLUTIONS:
        for size in sizes:
            yield f"{TOGETHER}{size}", form


def main() -> int:
    """Measure everything, print one line of JSON for each measurement, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stacked", description="Measure stacked rounds.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="methods (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="cohorts (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=600, help="training images of a client (default: 600)")
    parser.add_argument("--repetitions", type=int, default=3, help="measured rounds (default: 3)")
    options = parser.parse_args()
    device = torch.device(options.device)
    set_arithmetic("fp32", deterministic=False, device=device)
    for method in options.methods:
        for shape in SHAPES:
            clients = max(20, *options.sizes)
            work = Workload(method=method, shape=shape, train=options.samples, clients=clients, device=options.device)
            for program, form in programs(options.sizes):
                with stacked_with(form) if program.startswith(TOGETHER) else contextlib.nullcontext():
                    found = measured(work, program, options.repetitions)
                line = {"method": method, "shape": shape, "program": program, "form": form, **found}
                print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
