"""Quick forms of studies, for tests of their outputs."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.runner import StudyManifest, open_study_folder, task_of
from experiments.study import load_study
from experiments.worker import problem_of
from hyperfl_flwr.cli.main import cli


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

    def run_here(name: str, folder: Path) -> None:
        study = load_study(name)
        open_study_folder(folder, StudyManifest(study=name, quick=True, changes={}))
        for cell in study.cells(quick=True):
            assert problem_of(json.loads(task_of(cell, folder, study.num_nodes)), lambda note: None) == "", cell

    @functools.cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("study") / name
        (run_by_command if name == "table-1" else run_here)(name, folder)
        return folder

    return run
