"""What a node's process imports: a deployment starts one for every message."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["flwr.superlink.grid", "ray", "scipy.optimize", "scipy.stats", "sklearn", "matplotlib"]
)
def test_a_node_does_not_import_what_it_does_not_need(module: str) -> None:
    """Each takes a third of a second or more."""
    program = f"import sys; import hyperfl_flwr.client_app; print({module!r} in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]
