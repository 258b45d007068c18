"""Names of a run's numbers for tools that draw curves: TensorBoard, MLflow, Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from hyperfl_flwr.core.tasks import MAIN_SCORES
from hyperfl_flwr.runs.run_directory import Record

NO_SCALARS = ("kind", "round", "client", "clients", "drawn_from", "failed")

SECTIONS = (*MAIN_SCORES, "loss", "bytes", "seconds")
"""Sections of the names, chosen by a word of the metric's name; other metrics are in `other`."""


def tag(name: str) -> str:
    """Return the name of a metric in its section, for example `accuracy/personalized` for `personalized_accuracy`."""
    words = name.split("_")
    section = next((word for word in SECTIONS if word in words), "other")
    rest = "_".join(word for word in words if word != section) or "all"
    return f"{section}/{rest}"


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl about all clients, by their names in sections."""
    found = {tag(name): float(value) for name, value in numbers_of(record).items()}
    if record["kind"] == "train":
        found |= {"clients/trained": float(record["clients"]), "clients/failed": float(len(record["failed"]))}
    return found


def numbers_of(record: Record) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl by their names there."""
    return {name: value for name, value in record.items() if name not in NO_SCALARS and isinstance(value, (int, float))}


def results(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a run's summary.json, as `result/NAME`."""
    return {f"result/{name}": float(value) for name, value in summary.items() if type(value) in (int, float)}
