"""Quick forms of studies, for tests of their outputs."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyperfl_flwr.cli.main import cli


@pytest.fixture(scope="session")
def quick_study(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that runs a study's quick form by the command line, once, and returns its folder.

    One process runs it, as starting another one takes longer than the cells. A test that adds or removes anything must
    work on a copy.
    """

    @functools.cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("study") / name
        words = [
            "study",
            name,
            "--quick",
            "--jobs",
            "1",
            "--output",
            str(folder),
        ]  # each process takes seconds to start
        result = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return folder

    return run
