"""The network and command of docs/how-to/own-network.md, run from another folder with Flower's engine on Ray."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hyperfl_flwr import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "how-to" / "own-network.md"
HYPERFL = Path(sys.executable).with_name("hyperfl")


def example() -> str:
    """Return the page's network."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]


def hyperfl(*words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(HYPERFL), *words], cwd=folder, capture_output=True, text=True, check=False)


def test_the_pages_example(tmp_path: Path) -> None:
    """The network is trained on the actors and kept; a changed source cannot resume the run, the kept one can."""
    (tmp_path / "mynet.py").write_text(example())
    (line,) = re.findall(r"^\$ hyperfl (run --model .*)$", PAGE.read_text(), re.MULTILINE)
    done = hyperfl(*line.split(), "--engine", "ray", "--num-nodes", "2", "--set", "local-epochs=1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "mynet"
    assert done.stdout.splitlines()[-1] == str(run)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["model"]["factory"] == manifest["settings"]["target"] == "mynet:build"
    assert (run / "model" / "mynet.py").read_text() == example()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.1  # ten classes

    with (tmp_path / "mynet.py").open("a") as file:
        file.write("\n# a change\n")
    changed = hyperfl("run", "--resume", str(run), "--num-rounds", "3", "--dry-run", folder=tmp_path)
    assert changed.returncode == 2
    assert "the source of mynet:build has changed" in changed.stderr
    (tmp_path / "elsewhere").mkdir()
    resumed = hyperfl("run", "--resume", str(run), "--num-rounds", "3", "--dry-run", folder=tmp_path / "elsewhere")
    assert resumed.returncode == 0, resumed.stderr
