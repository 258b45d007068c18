"""Quick forms of studies, for tests of their outputs."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torchvision.models import resnet18
from typer.testing import CliRunner

from experiments.runner import task_of
from experiments.study import load_study
from experiments.study_folder import StudyManifest, open_study_folder
from experiments.worker import problem_of
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.core.setting_types import Scalar


@pytest.fixture(scope="session")
def quick_study(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that runs a study's quick form, once, and returns its folder.

    `table-1` is run by the command line; the cells of others are run in this process, as starting another one takes
    longer. A test that adds or removes anything must work on a copy.
    """

    def run_by_command(name: str, folder: Path) -> None:
        words = ["study", name, "--quick", "--jobs", "1", "--output", str(folder)]
        result = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output

    def changes_of(name: str) -> dict[str, Scalar]:
        """Return random weights of ResNet-18 for the study with a pre-trained body, which would be downloaded."""
        if name != "table-2":
            return {}
        path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
        torch.manual_seed(0)
        torch.save(resnet18().state_dict(), path)
        return {"lpm.weights": str(path)}

    def run_here(name: str, folder: Path) -> None:
        study, changes = load_study(name), changes_of(name)
        open_study_folder(folder, StudyManifest(study=name, quick=True, changes=changes))
        for cell in study.cells(quick=True, changes=changes):
            assert problem_of(json.loads(task_of(cell, folder, study.num_nodes)), lambda note: None) == "", cell

    @functools.cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("study") / name
        (run_by_command if name == "table-1" else run_here)(name, folder)
        return folder

    return run


@pytest.fixture
def folder(quick_study: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of the quick runs of two rows of `table-1`."""
    others = [row.name for row in load_study("table-1").rows if row.name not in ("fedavg", "local")]
    ignored = shutil.ignore_patterns(*others, "table.*", "*.png", "checkpoints")
    return Path(shutil.copytree(quick_study("table-1"), tmp_path / "study", ignore=ignored))
