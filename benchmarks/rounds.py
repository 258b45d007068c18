"""A federated round on Flower's engine against the training that it consists of."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.cores import CoreSlots
from experiments.run import Observer, launch, plan
from hyperfl_flwr.config import Scalar
from hyperfl_flwr.recording import read_metrics


@dataclass(frozen=True, kw_only=True)
class RoundTiming:
    """Where a run's rounds spend their time, in wall seconds.

    Attributes:
        method: Of the project.
        actors: Processes that train at the same time.
        first_seconds: The first round, in which processes start and read their data.
        seconds: Median of the rounds after it.
        client_seconds: Median of those rounds' sums of their clients' times.
        overhead: Median of seconds / (client_seconds / actors) - 1; 0 if the actors did nothing but train.
    """

    method: str
    actors: int
    first_seconds: float
    seconds: float
    client_seconds: float
    overhead: float


def measure_rounds(method: str, changes: dict[str, Scalar], folder: Path, note: Callable[[str], None]) -> RoundTiming:
    """Run a federation as `hyperfl run` does.

    Args:
        method: Of the project.
        changes: Settings of the run; two rounds or more.
        folder: A new folder for the run.
        note: Receives one line for people.

    Raises:
        HyperFLError: If the run cannot start, or fails.
    """
    planned = plan(changes | {"method": method, "output": str(folder), "device": "cpu"})
    with CoreSlots() as slots:
        # A run takes what is free of these in the same way, right after they are given back.
        actors = slots.acquire(planned.num_nodes, lambda: note("all cores are taken by other runs; waiting for one"))
    if actors < planned.num_nodes:
        note(f"only {actors} of {planned.num_nodes} cores is free; the overhead is computed for {actors}")
    launch(planned, Observer(on_note=note))
    rounds = [record for record in read_metrics(folder) if record["kind"] == "train"]
    later = rounds[1:]
    return RoundTiming(
        method=method,
        actors=actors,
        first_seconds=rounds[0]["seconds"],
        seconds=statistics.median(record["seconds"] for record in later),
        client_seconds=statistics.median(record["client_seconds"] for record in later),
        overhead=statistics.median(record["seconds"] * actors / record["client_seconds"] - 1 for record in later),
    )
