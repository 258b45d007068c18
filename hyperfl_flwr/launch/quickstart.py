"""The first thing that a newcomer runs: HyperFL beside FedAvg and local-only, on data that need no download.

Each method trains at its own learning rate, and with two seeds: of the second one the clients' data are another split,
too, so that the spread covers both. Settings are in `quickstart.toml`.
"""

import json
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.toml_files import flatten
from hyperfl_flwr.launch import subprocess_call
from hyperfl_flwr.launch.follow import Display
from hyperfl_flwr.launch.plans import SimulationPlan
from hyperfl_flwr.launch.simulation import launch

METHODS = ("hyperfl", "fedavg", "local")
SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A number over the seeds."""

    mean: float
    least: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return that of some values."""
        return cls(mean=statistics.fmean(values), least=min(values), largest=max(values))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a method reached.

    Attributes:
        method: Its name.
        learning_rate: What `learning-rate = auto` became.
        test_samples: Number of test images of all clients, of each seed.
        summaries: The summaries of its runs, see `hyperfl_flwr.runs.summary`, in the order of the seeds.
    """

    method: str
    learning_rate: float
    test_samples: Sequence[int]
    summaries: Sequence[dict[str, Any]]

    def spread(self, number: str) -> Spread:
        """Return a number of the summaries over the seeds."""
        return Spread.of([summary[number] for summary in self.summaries])


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """What came of it.

    Attributes:
        folder: Holds a folder for each method, and in it a run folder for each seed.
        picture: Accuracy over the rounds.
        results: Of each method.
    """

    folder: Path
    picture: Path
    results: Sequence[Result]


def quickstart_settings(method: str, seed: int) -> dict[str, Scalar]:
    """Return what a run of the quickstart changes of the defaults, but for its rounds and its folder."""
    changes = flatten(tomllib.loads(Path(__file__).with_name("quickstart.toml").read_text()))
    return changes | {"method": method, "seed": seed, "data.seed": seed}


def quickstart(output: Path | None, num_rounds: int, display: Display) -> Quickstart:
    """Run the three methods with each seed, one after the other, and compare them.

    Args:
        output: Folder of the runs; None makes a new one below `runs` in the working directory.
        num_rounds: Number of federated rounds.
        display: Shows each run.

    Raises:
        HyperFLError: If a run cannot start, or fails.
    """
    plans: list[SimulationPlan] = subprocess_call.call_in_subprocess(
        "hyperfl_flwr.launch.quickstart:plan_methods", output, num_rounds
    )
    for planned in plans:
        with display(f"{planned.method}, seed {planned.settings['seed']}") as observer:
            launch(planned, observer)
    runs = {method: [planned.directory for planned in plans if planned.method == method] for method in METHODS}
    folder = plans[0].directory.parent.parent
    picture = folder / "comparison.png"
    subprocess_call.call_in_subprocess("hyperfl_flwr.runs.plots:plot_comparison", runs, picture)
    results = [_result(method, paths) for method, paths in runs.items()]
    return Quickstart(folder=folder, picture=picture, results=results)


def plan_methods(output: Path | None, num_rounds: int) -> list[SimulationPlan]:
    """Plan the runs of the three methods with each seed, see `quickstart`."""
    from hyperfl_flwr.launch.planning import plan  # with torch, which the process that follows the runs does without
    from hyperfl_flwr.runs.run_directory import new_run_name, refuse_used_directory

    folder = output or Path.cwd() / "runs" / new_run_name("quickstart", "digits", seed=0)
    refuse_used_directory(folder)
    return [
        plan(
            quickstart_settings(method, seed)
            | {"num-rounds": num_rounds, "output": str(folder / method / f"seed-{seed}")}
        )
        for method in METHODS
        for seed in SEEDS
    ]


def _result(method: str, runs: Sequence[Path]) -> Result:
    manifests, summaries = (
        [json.loads((run / name).read_text()) for run in runs] for name in ("manifest.json", "summary.json")
    )
    return Result(
        method=method,
        learning_rate=manifests[0]["resolved"]["learning-rate"],
        test_samples=[sum(map(sum, manifest["label_counts"]["test"])) for manifest in manifests],
        summaries=summaries,
    )
