"""What processes import: a deployment starts one for every message, and people wait for a command's help."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperfl_flwr.methods import METHODS
from strategies.pfedhn import PFedHN


@pytest.mark.parametrize(
    ("modules", "not_needed"),
    [
        ("hyperfl_flwr.client_app", "flwr.superlink.grid, matplotlib, ray, scipy.optimize, scipy.stats, sklearn"),
        ("hyperfl_flwr.cli", "flwr, matplotlib, pydantic, torch"),
        (
            "experiments.deploy_files, experiments.deploy_register, experiments.deploy_check, experiments.deploy_start",
            "matplotlib, ray, torch",
        ),
        ("experiments.run, experiments.deploy_run", "matplotlib, ray, scipy.stats, sklearn"),
    ],
)
def test_a_process_does_not_import_what_it_does_not_need(modules: str, not_needed: str) -> None:
    """Each of the packages takes a tenth of a second or more, torch two."""
    program = f"import sys; import {modules}; print(set({not_needed.split(', ')}) & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


TRAINING = """
import sys
from federations import plain_grid, small_settings
from hyperfl_flwr import server_app
from hyperfl_flwr.config import RunConfig
from hyperfl_flwr.methods import METHODS

server_app.plot_run = lambda _: None
for method in sys.argv[2:]:
    settings = small_settings(method=method, output=f"{sys.argv[1]}/{method}")
    server_app.run(plain_grid(2, settings), RunConfig.from_flat(settings, methods=METHODS))
    print(method, *({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


def test_training_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    """It takes two seconds, and sympy half a second, which pFedHN's server alone imports, once in a run."""
    with_server = [name for name, method in METHODS.items() if issubclass(method.strategy, PFedHN)]
    others = [name for name in METHODS if name not in with_server]
    found = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path), *others, *with_server],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.splitlines() == [*others, *(f"{name} sympy" for name in with_server)]
