"""The first thing that a newcomer runs: HyperFL beside FedAvg and local-only, on data that need no download."""

import json
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.following import Observer
from experiments.plans import SimulationPlan
from experiments.run import launch
from experiments.subprocess_call import call_in_subprocess
from hyperfl_flwr.toml_settings import flatten

METHODS = ("hyperfl", "fedavg", "local")


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """What came of it.

    Attributes:
        folder: Holds one run folder per method.
        picture: Accuracy over the rounds.
        summaries: The summaries of the runs, see `hyperfl_flwr.summary`.
    """

    folder: Path
    picture: Path
    summaries: list[dict[str, Any]]


def quickstart(
    output: Path | None, num_rounds: int, observed: Callable[[str], AbstractContextManager[Observer]]
) -> Quickstart:
    """Run the three methods one after the other and compare them.

    Args:
        output: Folder of the runs; None makes a new one below `runs` in the working directory.
        num_rounds: Number of federated rounds.
        observed: Returns what hears of the run with a title.

    Raises:
        HyperFLError: If a run cannot start, or fails.
    """
    plans: list[SimulationPlan] = call_in_subprocess("experiments.quickstart:plan_methods", output, num_rounds)
    for planned in plans:
        with observed(planned.method) as observer:
            launch(planned, observer)
    paths = {planned.method: planned.directory for planned in plans}
    folder = plans[0].directory.parent
    picture = folder / "comparison.png"
    call_in_subprocess("hyperfl_flwr.plots:plot_comparison", paths, picture)
    summaries = [json.loads((path / "summary.json").read_text()) for path in paths.values()]
    return Quickstart(folder=folder, picture=picture, summaries=summaries)


def plan_methods(output: Path | None, num_rounds: int) -> list[SimulationPlan]:
    """Plan the runs of the three methods, see `quickstart`."""
    from experiments.planning import plan  # with torch, which the process that follows the runs does without
    from hyperfl_flwr.recording import new_run_name, refuse_used_directory

    changes = flatten(tomllib.loads((Path(__file__).parent / "configs" / "quickstart.toml").read_text()))
    folder = output or Path.cwd() / "runs" / new_run_name("quickstart", str(changes["dataset"]), seed=0)
    refuse_used_directory(folder)
    return [
        plan(changes | {"method": method, "num-rounds": num_rounds, "output": str(folder / method)})
        for method in METHODS
    ]
