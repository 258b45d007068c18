"""The first thing that a newcomer runs: HyperFL beside FedAvg and local-only, on data that need no download."""

import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.following import Observer
from experiments.run import launch, plan
from hyperfl_flwr.config import flatten
from hyperfl_flwr.plots import plot_comparison
from hyperfl_flwr.recording import new_run_name, refuse_used_directory
from hyperfl_flwr.summary import summarise

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
    changes = flatten(tomllib.loads((Path(__file__).parent / "configs" / "quickstart.toml").read_text()))
    folder = output or Path.cwd() / "runs" / new_run_name("quickstart", str(changes["dataset"]), seed=0)
    refuse_used_directory(folder)
    paths = {method: folder / method for method in METHODS}
    plans = [
        plan(changes | {"method": method, "num-rounds": num_rounds, "output": str(path)})
        for method, path in paths.items()
    ]
    for planned in plans:
        with observed(planned.config.method) as observer:
            launch(planned, observer)
    picture = folder / "comparison.png"
    plot_comparison(paths, picture)
    return Quickstart(folder=folder, picture=picture, summaries=[summarise(path) for path in paths.values()])
