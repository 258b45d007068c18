"""What processes import: a deployment starts one for every message, and people wait for a command's help."""

import subprocess
import sys

import pytest


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
