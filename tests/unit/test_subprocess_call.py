"""Functions that run in a subprocess: results and errors arrive, and no process is left when either side ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from federations import Call
from waiting import PATIENCE, eventually

from hyperfl_flwr import ROOT
from hyperfl_flwr.launch.processes import descendants, process_table

PROGRAM = """
import sys
from hyperfl_flwr.launch.subprocess_call import call_in_subprocess
from hyperfl_flwr.core.errors import HyperFLError
try:
    print(repr(call_in_subprocess(*eval(sys.argv[1]))))
except (HyperFLError, OSError) as error:
    print(type(error).__name__, error, vars(error), getattr(error, "filename", None))
except KeyboardInterrupt:
    print("interrupted")
"""


def program(name: str, *arguments: object, folder: Path = ROOT, **options: Any) -> "subprocess.Popen[str]":
    """Start a process without torch that calls a function in a subprocess and prints its result or error."""
    command = [sys.executable, "-c", PROGRAM, repr((name, *arguments))]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def done(*words: object, **options: Any) -> tuple[str, str]:
    """Run such a process, and return its standard output and standard error."""
    process = program(*words, **options)  # type: ignore[arg-type]
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out.rstrip("\n"), err


def test_values_come_back() -> None:
    assert done("operator:add", [1, 2.5], ["three", None]) == ("[1, 2.5, 'three', None]", "")


def test_it_is_another_process_and_what_it_prints_goes_to_standard_error() -> None:
    process = program("os:getpid")
    out, _ = process.communicate(timeout=PATIENCE)
    assert int(out) != process.pid
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    assert done("builtins:print", "a note", env=buffered) == ("None", "a note\n")


def test_errors_for_users_come_back_as_they_are(tmp_path: Path) -> None:
    wrong = {**os.environ, "HYPERFL_CORES": "many"}
    out, err = done("hyperfl_flwr.launch.core_locks:usable_cores", wrong)
    assert out == "ConfigError HYPERFL_CORES must be a positive integer, got 'many'. {'public': ''} None"
    assert err == ""
    out, err = done("os:stat", str(tmp_path / "gone"))
    assert out.startswith("FileNotFoundError [Errno 2] No such file or directory")
    assert out.endswith(f" {tmp_path / 'gone'}")
    assert err == ""


def test_other_errors_show_their_traceback_and_a_dead_process_its_status() -> None:
    out, err = done("json:loads", "nonsense")
    assert out.startswith("RunFailedError the process that ran json:loads ended without a result, with exit code 1")
    assert "Traceback" in err
    assert "JSONDecodeError" in err
    out, _ = done("os:abort")
    assert f"exit code {-signal.SIGABRT}" in out


def test_nothing_is_imported_from_a_working_directory_that_is_not_on_the_import_path(tmp_path: Path) -> None:
    """`json` and `experiments` in that directory are not Python's and not this project's."""
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("raise SystemExit('not this one')")
    code = f"import sys; sys.path[0] = {str(ROOT)!r}\n{textwrap.dedent(PROGRAM)}"
    words = repr(("json:dumps", {"a": 1}))
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(eval(found.stdout)) == {"a": 1}


def children(process: "subprocess.Popen[str]") -> list[int]:
    """Return the processes below a process, once there is one."""

    def found() -> list[int]:
        return list(descendants([process.pid], process_table()))

    eventually(found, "a child", every=0.05)
    return found()


def assert_gone(pids: list[int]) -> None:
    eventually(lambda: not set(pids) & set(process_table()), "the end of all", every=0.05)


@pytest.mark.parametrize("after", [0.0, 1.0])
def test_an_interrupted_call_leaves_nothing(after: float) -> None:
    """The call is interrupted as soon as the subprocess exists, or within the function; there is no error message."""
    with program("time:sleep", 1000) as process:
        left = children(process)
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE) == ("interrupted\n", "")
        assert_gone(left)


def test_a_killed_caller_leaves_nothing() -> None:
    with program("time:sleep", 1000) as process:
        left = children(process)
        time.sleep(1.0)
        process.kill()
        process.wait(PATIENCE)
        assert_gone(left)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("--set", "num-cliens=3"), ("--output", "full"), ("--dataset", "npz:gone.npz"), ("--resume", "damaged")]
)
def test_the_command_says_what_it_says_in_one_process(words: tuple[str, str], call: Call, tmp_path: Path) -> None:
    """The command, with its subprocess, has the output and exit code of `call`, which plans in this process."""
    Path("full").mkdir()
    Path("full", "something").touch()
    Path("damaged", "manifest.json").mkdir(parents=True)
    command = [sys.executable, "-m", "hyperfl_flwr", "run", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == call("run", *words)
    assert found.returncode == 2
