"""Measure a federated round of every method, in turns with one of FedAvg."""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.measure import Note, Worker
from benchmarks.workload import Workload, write_dataset

REFERENCE = "fedavg"

ROUNDS = 6
"""Number of rounds of a federation, of which the first, with its preparations, is not counted."""


@dataclass(frozen=True, kw_only=True)
class MethodRound:
    """What a method's round costs, divided by its clients: their training and evaluation, and the server's part.

    Attributes:
        method: Name of the method.
        cpu: CPU seconds, the median over the rounds.
        ratio: CPU seconds relative to those of a federation of FedAvg that ran just before.
        private: Private memory of the process that was all clients and the server, in bytes, above that of a process
            with torch only.
    """

    method: str
    cpu: float
    ratio: float
    private: float


@dataclass(frozen=True, kw_only=True)
class MethodRounds:
    """Rounds of methods on one workload.

    Attributes:
        work: The workload; its method is the reference.
        rounds: The methods in the order of their table.
    """

    work: Workload
    rounds: Sequence[MethodRound]


def measure_methods(work: Workload, methods: Sequence[str], note: Note = print) -> MethodRounds:
    """Measure federated rounds of methods with their default settings, each in a process of its own.

    Args:
        work: The workload; its method is replaced by each of the methods.
        methods: Names of the methods.
        note: Receives one line for each method.
    """
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "images.npz"
        write_dataset(work, dataset)
        rounds = []
        for method in methods:
            note(f"a round of each method: {method}")
            reference, own = (_measure(replace(work, method=name), dataset) for name in (REFERENCE, method))
            cpu, base = (statistics.median(found["cpu"]) / work.clients for found in (own, reference))
            rounds.append(MethodRound(method=method, cpu=cpu, ratio=cpu / base, private=own["private"]))
    return MethodRounds(work=replace(work, method=REFERENCE), rounds=rounds)


def _measure(work: Workload, dataset: Path) -> dict[str, Any]:
    specification = {"kind": "federation", "program": "ours", "rounds": ROUNDS, "dataset": str(dataset)}
    with Worker({**specification, "work": work.as_json()}, keeps_memory=True) as worker:
        return worker.measure()


def method_tables(found: MethodRounds) -> list[str]:
    """Return the table of the methods' rounds."""
    rows = [
        (f"`{one.method}`", f"{one.cpu:.2f}", f"{one.ratio:.2f}", f"{one.private / 1e6:.0f}") for one in found.rounds
    ]
    return [table(["method", "CPU s for a client", "to FedAvg's", "memory MB"], rows, "lrrr")]
