"""Measure the quickstart's accuracies, with the processor's own instructions and with older ones.

Processors round differently, and training amplifies it: the difference between the runs is what the documented
accuracies mean on another machine.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.markdown import table
from hyperfl_flwr.launch.quickstart import METHODS, SEEDS, Spread

INSTRUCTIONS: Mapping[str, Mapping[str, str]] = {
    "": {},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "none of AVX": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
}
"""Environments that restrict torch to older vector instructions, by name; an empty name for all that there are."""

NUMBERS = ("personalized", "aggregate")
"""Accuracies of a run."""


@dataclass(frozen=True, kw_only=True)
class QuickstartRun:
    """Accuracies of one of the quickstart's runs.

    Attributes:
        instructions: Vector instructions that torch used.
        method: Name of the method.
        learning_rate: What `learning-rate = auto` became.
        seed: Seed of the run and of the data's division.
        personalized: Mean accuracy of the clients' own models, from 0 to 1.
        aggregate: Mean accuracy of the model as received.
    """

    instructions: str
    method: str
    learning_rate: float
    seed: int
    personalized: float
    aggregate: float


def measure_quickstart(note: Callable[[str], None]) -> list[QuickstartRun]:
    """Run `hyperfl quickstart` with each of `INSTRUCTIONS`."""
    found = []
    for name, environment in INSTRUCTIONS.items():
        instructions = name or torch.backends.cpu.get_cpu_capability()
        note(f"quickstart: {instructions}")
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "quickstart"
            words = [sys.executable, "-m", "hyperfl_flwr", "quickstart", "--output", str(folder)]
            subprocess.run(words, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, check=True)
            found += [_read(folder / method / f"seed-{seed}", instructions) for method in METHODS for seed in SEEDS]
    return found


def _read(run: Path, instructions: str) -> QuickstartRun:
    summary, manifest = (json.loads((run / f"{name}.json").read_text()) for name in ("summary", "manifest"))
    settings = manifest["settings"]
    rate = manifest["resolved"]["learning-rate"]
    return QuickstartRun(
        instructions=instructions, method=settings["method"], learning_rate=rate,
        seed=settings["seed"], personalized=summary["test_accuracy"], aggregate=summary["test_accuracy_aggregate"],
    )  # fmt: skip


def quickstart_tables(runs: Sequence[QuickstartRun]) -> list[str]:
    """Return tables of the accuracies in %: each run, the means that the command prints, and older instructions."""
    names = list(dict.fromkeys(run.instructions for run in runs))
    own = [run for run in runs if run.instructions == names[0]]
    rows = [
        (run.method, run.learning_rate, run.seed, _percent(run.personalized), _percent(run.aggregate)) for run in own
    ]
    means = [
        (method, *(_spread([getattr(run, number) for run in own if run.method == method]) for number in NUMBERS))
        for method in METHODS
    ]
    others = [
        (
            name,
            *(f"{_percent(run.personalized)} ({_percent(run.aggregate)})" for run in runs if run.instructions == name),
        )
        for name in names
    ]
    heads = [f"{run.method}, seed {run.seed}" for run in own]
    return [
        table(["method", "rate", "seed", *NUMBERS], rows, "lrrrr"),
        "Mean (least to largest) over the seeds, as the command prints it:",
        table(["method", *NUMBERS], means),
        "The same runs with other vector instructions, personalized (aggregate):",
        table(["instructions", *heads], others),
        f"The largest difference from the first row is {100 * largest_difference(runs):.1f} points.",
    ]


def largest_difference(runs: Sequence[QuickstartRun]) -> float:
    """Return the largest difference of an accuracy from that with the processor's own instructions."""
    own = {(run.method, run.seed): run for run in runs if run.instructions == runs[0].instructions}
    pairs = [(run, own[run.method, run.seed]) for run in runs]
    personalized = [abs(run.personalized - first.personalized) for run, first in pairs]
    return max(personalized + [abs(run.aggregate - first.aggregate) for run, first in pairs])


def _spread(values: Sequence[float]) -> str:
    spread = Spread.of(values)
    return f"{_percent(spread.mean)} ({_percent(spread.least)} to {_percent(spread.largest)})"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
