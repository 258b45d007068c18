"""What a node's process imports: a deployment starts one for every message."""

import subprocess
import sys

NOT_NEEDED = ("flwr.superlink.grid", "matplotlib", "ray", "scipy.optimize", "scipy.stats", "sklearn")


def test_a_node_does_not_import_what_it_does_not_need() -> None:
    """Each takes a third of a second or more."""
    program = f"import sys; import hyperfl_flwr.client_app; print([m for m in {NOT_NEEDED} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
