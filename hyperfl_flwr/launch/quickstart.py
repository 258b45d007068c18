"""The quickstart: compare HyperFL with FedAvg and local-only training, on data that need no download.

Each method trains at its own learning rate and with two seeds. The seed also sets the split of the data among clients,
so that the spread over seeds covers both. The settings are in `quickstart.toml`.
"""

import json
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.files.toml_files import flatten
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch import subprocess_call
from hyperfl_flwr.launch.flower.early_superlink import EarlySuperLink
from hyperfl_flwr.launch.follow import Display
from hyperfl_flwr.launch.in_process_engine import InProcessEngine
from hyperfl_flwr.launch.plans import IN_PROCESS, RAY, SimulationPlan
from hyperfl_flwr.launch.simulation import launch, launch_in_process

METHODS = ("hyperfl", "fedavg", "local")
SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and range of a number over the seeds."""

    mean: float
    least: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Compute the spread of some values."""
        return cls(mean=statistics.fmean(values), least=min(values), largest=max(values))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results of one method.

    Attributes:
        method: Name of the method.
        learning_rate: Value to which `learning-rate = auto` was resolved.
        test_samples: Number of test images of all clients, for each seed.
        summaries: Summaries of its runs, see `hyperfl_flwr.runs.summary`, in the order of the seeds.
    """

    method: str
    learning_rate: float
    test_samples: Sequence[int]
    summaries: Sequence[dict[str, Any]]

    def spread(self, number: str) -> Spread:
        """Return the spread over the seeds of a number in the summaries."""
        return Spread.of([summary[number] for summary in self.summaries])


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Outcome of the quickstart.

    Attributes:
        folder: Folder with one folder for each method, which holds a run folder for each seed.
        picture: File of the plot of accuracy over the rounds.
        results: Results of each method.
    """

    folder: Path
    picture: Path
    results: Sequence[Result]


def quickstart_settings(method: str, seed: int) -> dict[str, Scalar]:
    """Return the settings of a quickstart run that differ from the defaults, except its rounds and its folder."""
    changes = flatten(tomllib.loads(Path(__file__).with_name("quickstart.toml").read_text()))
    return changes | {"method": method, "seed": seed, "data.seed": seed}


def quickstart(output: Path | None, num_rounds: int, display: Display, engine: str) -> Quickstart:
    """Run the three methods with each seed, one after the other, and compare them.

    Args:
        output: Folder of the runs; None for a new folder below `runs` in the working directory.
        num_rounds: Number of federated rounds.
        display: Shows each run.
        engine: Engine of the runs; Ray's if it is `ray`, otherwise one process, which suits runs of this size.

    Returns:
        The results, and the paths of the runs and of the plot.

    Raises:
        HyperFLError: If a run cannot start, or fails.
    """
    plans = (_run_on_ray if engine == RAY else _run_in_process)(output, num_rounds, display)
    runs = {method: [planned.directory for planned in plans if planned.method == method] for method in METHODS}
    folder = plans[0].directory.parent.parent
    picture = folder / "comparison.png"
    subprocess_call.call_in_subprocess("hyperfl_flwr.runs.figures.plots:plot_comparison", runs, picture)
    results = [_result(method, paths) for method, paths in runs.items()]
    return Quickstart(folder=folder, picture=picture, results=results)


PLAN = "hyperfl_flwr.launch.quickstart:plan_methods"


def _run_on_ray(output: Path | None, num_rounds: int, display: Display) -> list[SimulationPlan]:
    with EarlySuperLink() as superlink:
        plans: list[SimulationPlan] = subprocess_call.call_in_subprocess(PLAN, output, num_rounds, RAY)
        for planned in plans:
            with display(_title(planned)) as observer:
                launch(planned, observer, superlink)
    return plans


def _run_in_process(output: Path | None, num_rounds: int, display: Display) -> list[SimulationPlan]:
    with InProcessEngine() as process:
        plans: list[SimulationPlan] = process.call(PLAN, output, num_rounds, IN_PROCESS)
        for planned in plans:
            with display(_title(planned)) as observer:
                launch_in_process(planned, observer, process)
    return plans


def _title(planned: SimulationPlan) -> str:
    return f"{planned.method}, seed {planned.settings['seed']}"


def plan_methods(output: Path | None, num_rounds: int, engine: str) -> list[SimulationPlan]:
    """Plan the runs of the three methods with each seed, see `quickstart`."""
    from hyperfl_flwr.launch.planning import plan  # imports torch, which the caller's process does not need
    from hyperfl_flwr.runs.run_directory import new_run_name, refuse_used_directory

    folder = output or Path.cwd() / "runs" / new_run_name("quickstart", "digits", seed=0)
    refuse_used_directory(folder)
    return [
        plan(
            quickstart_settings(method, seed)
            | {"num-rounds": num_rounds, "output": str(folder / method / f"seed-{seed}")},
            engine=engine,
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
