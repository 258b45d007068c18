"""Measure a client's round and a federated round, in the project and in plain loops."""

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Note, Worker
from benchmarks.memory import cpu_seconds, private_memory
from benchmarks.workload import NUM_NODES, Workload, initial_arrays, write_dataset
from hyperfl_flwr.launch.follow import RunCallbacks
from hyperfl_flwr.launch.planning import plan
from hyperfl_flwr.launch.plans import RAY
from hyperfl_flwr.launch.processes import descendants, process_table
from hyperfl_flwr.launch.simulation import launch
from hyperfl_flwr.runs.run_directory import read_metrics

SLOW_ROUNDS = 4
"""Largest number of federated rounds of a plain loop; one of HyperFL's takes two minutes."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A program that runs a workload.

    Attributes:
        name: Title in the page.
        method: Name of the project's method.
        program: `plain` (the loop of benchmarks/plain.py), `ours` (the project, without Ray), `ray` or
            `cohort-N` (N clients of a node together, of which one is reported).
        keeps_memory: Whether glibc is configured to keep freed memory, as by `hyperfl run`.
    """

    name: str
    method: str
    program: str
    keeps_memory: bool = True


ALONE_VARIANTS = (
    Variant(name="FedAvg, plain loop", method="fedavg", program="plain"),
    Variant(name="FedAvg, ours", method="fedavg", program="ours"),
    Variant(name="HyperFL, plain loop, default malloc", method="hyperfl", program="plain", keeps_memory=False),
    Variant(name="HyperFL, plain loop", method="hyperfl", program="plain"),
    Variant(name="HyperFL, ours", method="hyperfl", program="ours"),
)
CLIENT_VARIANTS = (
    *ALONE_VARIANTS,
    Variant(name="HyperFL, ours, one of 10, one by one", method="hyperfl", program="one-by-one-10"),
    Variant(name="HyperFL, ours, one of 10 in a cohort", method="hyperfl", program="cohort-10"),
    Variant(name="HyperFL, ours, one of 20 in a cohort", method="hyperfl", program="cohort-20"),
)
FEDERATED_VARIANTS = (
    *ALONE_VARIANTS,
    Variant(name="FedAvg, ours on Ray", method="fedavg", program="ray"),
    Variant(name="HyperFL, ours on Ray", method="hyperfl", program="ray"),
)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Medians over some rounds of a variant.

    Attributes:
        variant: The measured variant.
        cpu: CPU seconds per round; on Ray the mean over rounds, for all processes.
        wall: Wall seconds per round.
        cpu_ratio: CPU seconds relative to the first variant: the median over pairs of consecutive rounds (client
            rounds), or the ratio of the medians (federated rounds).
        loss: Training loss of the last round that all variants have run; equal if a method's variants do equal work.
        private: Private memory of a process at the end, in bytes; without Ray, above that of a process with torch only.
        server_private: Private memory of the server on Ray, in bytes.
        bytes: Bytes on the wire in a round on Ray; otherwise 0.
        overhead: On Ray, wall seconds over the clients' summed seconds / number of processes, minus 1; else None.
    """

    variant: Variant
    cpu: float
    wall: float
    cpu_ratio: float
    loss: float
    private: float
    server_private: float = 0.0
    bytes: float = 0.0
    overhead: float | None = None


@dataclass(frozen=True, kw_only=True)
class ClientRounds:
    """Timings of one client's round.

    Attributes:
        work: The workload.
        timings: Timings by variant.
    """

    work: Workload
    timings: Sequence[Timing]


@dataclass(frozen=True, kw_only=True)
class FederatedRounds:
    """Timings of a federated round.

    Attributes:
        work: The workload.
        size: Bytes of HyperFL's hypernetwork.
        timings: Timings by variant.
    """

    work: Workload
    size: int
    timings: Sequence[Timing]


def measure_clients(work: Workload, repetitions: int, note: Note = print) -> ClientRounds:
    """Measure one client's round in all variants, in turns so that noise of the machine affects all variants."""
    with ExitStack() as stack:
        workers = []
        for variant in CLIENT_VARIANTS:
            note(f"one client's round: {variant.name}")
            specification = {"kind": "client", "program": variant.program, "work": _work(work, variant)}
            workers.append(stack.enter_context(Worker(specification, keeps_memory=variant.keeps_memory)))
        turns = [[worker.measure() for worker in workers] for _ in range(repetitions)]
    return ClientRounds(work=work, timings=[_client_timing(row, turns) for row in range(len(CLIENT_VARIANTS))])


def _client_timing(row: int, turns: Sequence[Sequence[Any]]) -> Timing:
    variant, results = CLIENT_VARIANTS[row], [turn[row] for turn in turns]
    return Timing(
        variant=variant,
        cpu=statistics.median(one["cpu"] for one in results),
        wall=statistics.median(one["wall"] for one in results),
        cpu_ratio=statistics.median(one["cpu"] / turn[0]["cpu"] for one, turn in zip(results, turns, strict=True)),
        loss=results[-1]["loss"],
        private=results[-1]["private"],
    )


def measure_federations(work: Workload, num_rounds: int, note: Note = print) -> FederatedRounds:
    """Measure federated rounds in all variants, one after the other.

    Args:
        work: The workload; its method is replaced by each variant's.
        num_rounds: Number of rounds of each variant; the first, in which processes start and read data, is not counted.
        note: Receives one line for each variant.
    """
    size = sum(value.nbytes for value in initial_arrays(work).values())
    return FederatedRounds(work=work, size=size, timings=list(_federations(work, num_rounds, note)))


def _federations(work: Workload, num_rounds: int, note: Note) -> Iterator[Timing]:
    base: float | None = None
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "images.npz"
        write_dataset(work, dataset)
        for variant in FEDERATED_VARIANTS:
            note(f"a federated round: {variant.name}")
            if variant.program == "ray":
                found = _on_ray(work, variant, num_rounds, dataset, Path(folder) / variant.method, note)
            else:
                specification = {
                    "kind": "federation",
                    "program": variant.program,
                    "work": _work(work, variant),
                    "rounds": min(num_rounds, SLOW_ROUNDS) if variant.program == "plain" else num_rounds,
                    "dataset": str(dataset),
                }
                with Worker(specification, keeps_memory=variant.keeps_memory) as worker:
                    found = worker.measure()
                found["loss"] = found["losses"][min(num_rounds, SLOW_ROUNDS) - 1]
            cpu = statistics.median(found["cpu"])
            base = base or cpu
            yield Timing(
                variant=variant,
                cpu=cpu,
                wall=statistics.median(found["wall"]),
                cpu_ratio=cpu / base,
                loss=found["loss"],
                private=found["private"],
                server_private=found.get("server_private", 0.0),
                bytes=found.get("bytes", 0.0),
                overhead=found.get("overhead"),
            )


def _on_ray(work: Workload, variant: Variant, rounds: int, dataset: Path, folder: Path, note: Note) -> dict[str, Any]:
    """Run a federation as `hyperfl run` does, with two nodes, and return its measurements."""
    settings = Workload.from_json(_work(work, variant)).settings()
    settings |= {"num-rounds": rounds, "checkpoint-every": rounds}
    settings |= {"dataset": f"npz:{dataset}", "output": str(folder)}
    seen: dict[int, dict[str, float]] = {}

    def on_round(number: int, total: int, accuracy: float | None) -> None:
        seen[number] = _resource_usage()

    launch(plan(settings, NUM_NODES, RAY), RunCallbacks(on_round=on_round, on_note=note))
    rows = [row for row in read_metrics(folder) if row["kind"] == "train"]
    later = rows[1:]
    alive = [number for number in seen if number and seen[number]["server"]]
    first, last = min(alive, default=0), max(alive, default=0)
    return {
        "wall": [row["seconds"] for row in later],
        "cpu": [(seen[last]["cpu"] - seen[first]["cpu"]) / (last - first)] if last > first else [float("nan")],
        "loss": rows[min(rounds, SLOW_ROUNDS) - 1]["train_loss"],
        "private": seen[last]["node"] if alive else float("nan"),
        "server_private": seen[last]["server"] if alive else float("nan"),
        "bytes": statistics.median(row["bytes_on_wire"] for row in later),
        "overhead": statistics.median(row["seconds"] * NUM_NODES / row["client_seconds"] - 1 for row in later),
    }


def _resource_usage() -> dict[str, float]:
    """Return CPU seconds of all descendants of this process, and the private memory of the server and a node."""
    found = descendants([os.getpid()], process_table())
    nodes = [private_memory(pid) for pid, process in found.items() if process.command.startswith("ray::ClientApp")]
    servers = [private_memory(pid) for pid, process in found.items() if "flwr-simulation" in process.command]
    return {"cpu": cpu_seconds(found), "node": max(nodes, default=0), "server": max(servers, default=0)}


def _work(work: Workload, variant: Variant) -> dict[str, object]:
    return work.as_json() | {"method": variant.method}
