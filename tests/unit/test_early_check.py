"""Settings are checked without torch while the process that plans a run imports it."""

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.provision import init
from hyperfl_flwr.deploy.run import deployment
from hyperfl_flwr.launch import subprocess_call
from hyperfl_flwr.launch.early_check import check_early
from hyperfl_flwr.launch.follow import Platform
from hyperfl_flwr.launch.in_process_engine import InProcessEngine
from hyperfl_flwr.launch.plans import RAY
from hyperfl_flwr.launch.simulation import simulation

PROGRAM = """
import sys
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.early_check import check_early

check_early({"method": "pfedhn", "pfedhn.targets": "cnn,lenet", "novel.corruptions": "blur"})
try:
    check_early({"lrate": 0.1, "target": "cnnn", "dataset": "mnistt"})
except ConfigError as error:
    print(error)
print({"flwr", "torch", "torchvision"} & set(sys.modules))
"""


def test_torch_is_not_imported_to_check_settings() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert "lrate is unknown" in found
    assert "did you mean mnist?" in found
    assert found.splitlines()[-1] == "set()"


AUDIT = """
import sys
from hyperfl_flwr.__main__ import main

sys.argv = ["hyperfl", "audit", "--set", "lrate=1", "--set", "output=mine"]
try:
    main()
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""


def test_an_audit_refuses_wrong_settings_without_torch() -> None:
    """An audit replaces `output`, so that it may have any value."""
    found = subprocess.run([sys.executable, "-c", AUDIT], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr.splitlines()) == (
        "2 False\n",
        ["error: lrate is unknown; did you mean fedala.rate?"],
    )


def never(*_: object) -> NoReturn:
    pytest.fail("a run with wrong settings is planned")


@pytest.mark.parametrize("kind", ["in process", "ray", "deployment"])
def test_no_run_with_wrong_settings_is_planned(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessEngine, "call", never)
    monkeypatch.setattr(subprocess_call, "call_in_subprocess", never)
    platform: Platform = simulation(engine=RAY) if kind == "ray" else simulation()
    if kind == "deployment":
        init(Deployment(folder=tmp_path / "fl", host="127.0.0.1", port=8000, num_nodes=2))
        platform = deployment(tmp_path / "fl")
    with (
        pytest.raises(ConfigError, match=r"(?s)learning-rate must be.*num-clients must be"),
        platform({"num-clients": 0, "learning-rate": -1.0}),
    ):
        pass


@pytest.mark.parametrize("dataset", ["npz:digits.npz", "folder:/data/images"])
def test_a_deployment_refuses_files_that_a_run_names(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes would, and the run would wait for them until `node-timeout`."""
    monkeypatch.setattr(subprocess_call, "call_in_subprocess", never)
    init(Deployment(folder=tmp_path / "fl", host="127.0.0.1", port=8000, num_nodes=2))
    with (
        pytest.raises(ConfigError, match=f"got '{dataset}'; set `data` in each node's node.toml, and leave out --data"),
        deployment(tmp_path / "fl")({"dataset": dataset}),
    ):
        pass


@pytest.mark.parametrize(
    "left_out",
    [{"resume": "runs/of-an-older-version", "lrate": 1}, {"method": "package_of_mine:METHOD", "mine.rate": 1}],
)
def test_what_only_planning_knows_is_left_to_it(left_out: dict[str, Scalar]) -> None:
    check_early(left_out)
    assert "package_of_mine" not in sys.modules
