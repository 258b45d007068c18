"""Flower's commands run one after the other in one process."""

import os
from pathlib import Path

import pytest

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.launch.flower import commands as flower_commands
from hyperfl_flwr.launch.flower.commands import FlowerCommands, json_in


@pytest.fixture
def flower(tmp_path: Path) -> FlowerCommands:
    settings = {"FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return FlowerCommands({**os.environ, **settings}, tmp_path)


def test_a_process_runs_several_commands_and_goes_on_after_one_that_fails(flower: FlowerCommands) -> None:
    with flower:
        flower.prepare()
        process = flower._process
        assert process is not None
        first = flower.run("--version")
        assert "Flower version: 1." in first
        unknown = flower.run("no-such-command")
        assert "No such command" in unknown
        refused = json_in(flower.run("list", "no-such-connection", "--format", "json"))
        assert refused["success"] is False
        assert "no-such-connection" in str(refused["error-message"])
        assert flower.run("--version") == first
        assert flower._process is process
    assert process.returncode is not None


def test_a_command_that_does_not_end_is_killed(flower: FlowerCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_commands, "COMMAND_SECONDS", 0.0)
    flower.prepare()
    process = flower._process
    assert process is not None
    with pytest.raises(RunFailedError, match="`flwr list` did not end within 0 s"):
        flower.run("list")
    assert process.returncode is not None


def test_the_error_of_a_process_that_ends_is_its_output(tmp_path: Path) -> None:
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "__init__.py").write_text('raise SystemExit("flwr is broken here")')
    with FlowerCommands({**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path) as flower:
        assert flower.run("--version").strip() == "flwr is broken here"


def test_a_long_output_is_returned_in_full(tmp_path: Path) -> None:
    """The end of the output is searched only in what is new."""
    (tmp_path / "flwr" / "cli").mkdir(parents=True)
    for name in ("__init__.py", "cli/__init__.py"):
        (tmp_path / "flwr" / name).touch()
    (tmp_path / "flwr" / "cli" / "app.py").write_text("def app():\n    print('0123456789' * 2_000_000)\n")
    with FlowerCommands({**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path) as flower:
        for _ in range(2):
            assert flower.run("log") == "0123456789" * 2_000_000 + "\n"


def test_a_document_is_found_after_other_text() -> None:
    assert json_in('Generated a key.\n{"success": true, "run-id": "7"}\nmore') == {"success": True, "run-id": "7"}
    assert json_in("[1]") == json_in("{1") == json_in("") == {}
