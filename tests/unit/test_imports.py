"""The imports of processes: a deployment starts one for every message, and users wait for a command's help."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperfl_flwr.app.methods import strategy_of
from hyperfl_flwr.methods import METHODS
from strategies.pfedhn import PFedHN


@pytest.mark.parametrize(
    ("modules", "not_needed"),
    [
        ("hyperfl_flwr.app.client", "flwr.superlink.grid, matplotlib, ray, scipy, sklearn"),
        ("hyperfl_flwr.cli.main", "flwr, matplotlib, numpy, pydantic, torch"),
        ("hyperfl_flwr.methods, hyperfl_flwr.config.run_config", "flwr, matplotlib, scipy, torch"),
        (
            "hyperfl_flwr.deploy.provision, hyperfl_flwr.deploy.register, "
            "hyperfl_flwr.deploy.checks.server, hyperfl_flwr.deploy.admission",
            "matplotlib, ray, torch",
        ),
        ("hyperfl_flwr.app.server", "matplotlib, ray, scipy, sklearn"),
        ("hyperfl_flwr.launch.planning", "matplotlib, ray, scipy, sklearn"),
        (
            "hyperfl_flwr.cli.main, hyperfl_flwr.launch.simulation, hyperfl_flwr.deploy.run, "
            "hyperfl_flwr.deploy.personalize, hyperfl_flwr.launch.quickstart, hyperfl_flwr.api.train",
            "flwr, jinja2, matplotlib, ray, scipy, sklearn, torch, torchvision",
        ),
    ],
)
def test_a_process_does_not_import_what_it_does_not_need(modules: str, not_needed: str) -> None:
    """Each of these packages takes a tenth of a second or more to import, and torch takes two seconds."""
    program = f"import sys; import {modules}; print(set({not_needed.split(', ')}) & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


FOLLOWING = """
import os
import sys
from hyperfl_flwr.launch import simulation
from hyperfl_flwr.__main__ import main
from hyperfl_flwr.core.errors import RunFailedError

def follow(superlink, run_id, planned, observer):
    libraries = open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else ""
    print(run_id > 0, "libtorch" in libraries, {name.partition(".")[0] for name in sys.modules} & set(HEAVY))
    raise RunFailedError("this is far enough")

simulation.follow = follow
HEAVY = sys.argv[1].split(",")
sys.argv[:] = ["hyperfl", *sys.argv[2:]]
main()
"""


@pytest.mark.slow
def test_the_process_that_follows_a_run_has_not_imported_what_trains(tmp_path: Path) -> None:
    """The process plans, starts a SuperLink and submits a run; the test stops it where it would begin to follow."""
    heavy = "flwr,jinja2,matplotlib,ray,scipy,sklearn,torch,torchvision"
    words = [
        "run",
        "--num-clients",
        "2",
        "--num-nodes",
        "1",
        "--engine",
        "ray",
        "--output",
        str(tmp_path / "run"),
        "--quiet",
    ]
    found = subprocess.run(
        [sys.executable, "-c", FOLLOWING, heavy, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 1
    assert (found.stdout, found.stderr) == ("True False set()\n", "error: this is far enough\n")


TRAINING = """
import sys
from hyperfl_flwr.contract.grids import plain_grid
from federations import small_settings
from hyperfl_flwr.app import server as server_app
from hyperfl_flwr.config.run_config import RunConfig

server_app.plot_run = lambda _: None
for method in sys.argv[2:]:
    name, _, noisy = method.partition("+")
    settings = small_settings(method=name, output=f"{sys.argv[1]}/{method}", **{"dp.epsilon": 8.0 * bool(noisy)})
    server_app.run(plain_grid(2, settings), RunConfig.from_flat(settings))
    print(method, *({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


@pytest.mark.extended
def test_training_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    """The compiler takes two seconds to import, sympy half a second; only pFedHN's server imports sympy, once a run."""
    with_server = [name for name in METHODS if issubclass(strategy_of(name), PFedHN)]
    others = [*(name for name in METHODS if name not in with_server), "fedrep+noise"]
    found = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path), *others, *with_server],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.splitlines() == [*others, *(f"{name} sympy" for name in with_server)]
