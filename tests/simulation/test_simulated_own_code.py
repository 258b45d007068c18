"""The network and the method of their how-to pages, run from another folder with Flower's engine on Ray."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hyperfl_flwr import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "how-to" / "own-network.md"
METHOD_PAGE = PAGE.with_name("own-method.md")
RAY = ("--engine", "ray", "--num-nodes", "2", "--set", "local-epochs=1", "--set", "damped.share=0.75")
HYPERFL = Path(sys.executable).with_name("hyperfl")


def example(page: Path = PAGE) -> str:
    """Return a page's network or method."""
    return re.findall(r"```python.*?\n(.*?)```", page.read_text(), re.DOTALL)[0]


def hyperfl(*words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(HYPERFL), *words], cwd=folder, capture_output=True, text=True, check=False)


def test_the_pages_example(tmp_path: Path) -> None:
    """The actors train the network with the method; changed sources cannot resume the run, the kept ones can."""
    (tmp_path / "mynet.py").write_text(example())
    (tmp_path / "damped.py").write_text(example(METHOD_PAGE))
    (line,) = re.findall(r"^\$ hyperfl (run --model .*)$", PAGE.read_text(), re.MULTILINE)
    done = hyperfl(*line.split(), "--method", "damped:METHOD", *RAY, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "mynet"
    assert done.stdout.splitlines()[-1] == str(run)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["model"]["factory"] == manifest["settings"]["target"] == "mynet:build"
    assert (run / "model" / "mynet.py").read_text() == example()
    assert manifest["method"]["name"] == manifest["settings"]["method"] == "damped:METHOD"
    assert manifest["settings"]["damped.share"] == 0.75
    assert (run / "method" / "damped.py").read_text() == example(METHOD_PAGE)
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


def test_the_commands_of_the_methods_page(tmp_path: Path) -> None:
    (tmp_path / "damped.py").write_text(example(METHOD_PAGE))
    lines = re.findall(r"^\$ hyperfl (.*)$", METHOD_PAGE.read_text(), re.MULTILINE)
    done = [hyperfl(*line.split(), folder=tmp_path) for line in lines]
    assert [each.returncode for each in done] == [0, 0, 0], [each.stderr for each in done]
    assert 'damped.share = "auto"' in done[0].stdout
    assert json.loads((tmp_path / "runs" / "damped" / "manifest.json").read_text())["settings"]["damped.share"] == 0.8
    parts = re.findall(r"^\| ([a-z ]+) \| [a-z]", METHOD_PAGE.read_text(), re.MULTILINE)
    said = re.findall(r"^ok +([a-z ]+):", done[2].stdout, re.MULTILINE)
    assert [part for part in parts if part != "part"] == said
    (tmp_path / "damped.py").unlink()
    report = hyperfl("report", "runs/damped", folder=tmp_path)
    assert report.returncode == 0, report.stderr
