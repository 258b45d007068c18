"""Findings: a line of text or a JSON object for each, and an exit code for all."""

import io
import json

import pytest
from rich.console import Console

from hyperfl_flwr.launch.findings import Finding, Level, as_json, error, exit_code, ok, print_finding, warning

FOUND = [
    ok("memory", "12 GB are free"),
    warning("/dev/shm", "64 MB are free", "give the container --shm-size=2g"),
    error("port", "8000 is taken\nby process 77", "end it, or choose another port with --port"),
]


def printed(*findings: Finding, width: int) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width)
    for finding in findings:
        print_finding(console, finding)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 200])
def test_each_finding_is_one_whole_line_whatever_the_width(width: int) -> None:
    assert printed(*FOUND, width=width) == [
        "ok      memory: 12 GB are free",
        "warning /dev/shm: 64 MB are free; give the container --shm-size=2g",
        "error   port: 8000 is taken by process 77; end it, or choose another port with --port",
    ]


def test_brackets_are_text_and_no_markup() -> None:
    assert printed(ok("host", "[bold]::1[/bold]"), width=80) == ["ok      host: [bold]::1[/bold]"]


def test_only_an_error_makes_the_command_fail() -> None:
    assert exit_code([]) == 0
    assert exit_code(FOUND[:2]) == 0
    assert exit_code(FOUND) == 1


def test_json_has_every_field() -> None:
    first, second, _ = json.loads(as_json(FOUND))
    assert first == {"level": "ok", "subject": "memory", "text": "12 GB are free", "remedy": ""}
    assert second["level"] == "warning"
    assert second["remedy"] == "give the container --shm-size=2g"


@pytest.mark.parametrize("level", [Level.WARNING, Level.ERROR])
def test_what_is_wrong_must_say_what_to_do(level: Level) -> None:
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding(level=level, subject="disk", text="full")
