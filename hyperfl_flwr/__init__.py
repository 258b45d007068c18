"""Federated learning with hypernetworks and without sharing models, on Flower.

`run`, `resume`, `Run`, `RunCallbacks`, `compare`, `run_sweep`, `run_study`, `open_study`, `StudyResults`, `run_audit`,
`Audit`, `deployment` and `HyperFLError` are the Python interface (docs/how-to/python.md). Each is imported when it is
first used: this module is also imported by every process that trains, and on nodes, which have only what trains.

Ray puts the working directory of the simulation's process first on every actor's import path, so a foreign package
named `clients` or `strategies` there would be imported instead of ours. In that process, and only there, the working
directory is moved to the app's own folder. Every output path is therefore absolute.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.run_study import run_study, run_sweep
    from experiments.study_results import StudyResults, open_study
    from hyperfl_flwr.api.compare import compare
    from hyperfl_flwr.api.run import Run
    from hyperfl_flwr.api.train import resume, run
    from hyperfl_flwr.audit.run_audit import Audit, run_audit
    from hyperfl_flwr.core.errors import HyperFLError
    from hyperfl_flwr.deploy.run import deployment
    from hyperfl_flwr.launch.follow import RunCallbacks

__all__ = [
    "Audit", "HyperFLError", "Run", "RunCallbacks", "StudyResults", "compare", "deployment", "open_study", "resume",
    "run", "run_audit", "run_study", "run_sweep",
]  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds this project's packages: the checkout, Flower's unpacked app, or site-packages."""

__version__ = "0.1.0"

if Path(sys.argv[0]).name == "flwr-simulation":
    os.chdir(ROOT)

if not TYPE_CHECKING:  # a type checker would take any name for an attribute
    _HOMES = {
        "Audit": "hyperfl_flwr.audit.run_audit",
        "HyperFLError": "hyperfl_flwr.core.errors",
        "RunCallbacks": "hyperfl_flwr.launch.follow",
        "Run": "hyperfl_flwr.api.run",
        "StudyResults": "experiments.study_results",
        "compare": "hyperfl_flwr.api.compare",
        "deployment": "hyperfl_flwr.deploy.run",
        "open_study": "experiments.study_results",
        "resume": "hyperfl_flwr.api.train",
        "run": "hyperfl_flwr.api.train",
        "run_audit": "hyperfl_flwr.audit.run_audit",
        "run_study": "experiments.run_study",
        "run_sweep": "experiments.run_study",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _HOMES[name]
        try:
            return getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as error:
            if not f"{home}.".startswith(f"{error.name}."):
                raise
            raise AttributeError(
                f"{__name__}.{name} is not in what travels to nodes; install hyperfl-flwr to start runs"
            ) from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
