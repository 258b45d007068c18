"""Fixtures and pytest hooks that all tests share."""

import contextlib
import functools
import gc
import itertools
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer.main
from federations import Call, small_settings
from flwr.supercore.logger import ConsoleHandler
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

import hyperfl_flwr.app.server
from hyperfl_flwr.__main__ import main
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate, MakeGrid
from hyperfl_flwr.contract.grids import Settings, plain_grid
from hyperfl_flwr.core.process_memory import free_memory
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.flower.log import FLOWER_LOGGER
from hyperfl_flwr.launch import in_process_app, subprocess_call
from hyperfl_flwr.launch.in_process_engine import InProcessEngine, answer_file

torch.set_num_threads(1)
# A background job of a script ignores SIGINT, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MEMORY = Path("/dev/shm")
"""Linux's file system in memory."""

LONGEST = ("deployment", "experiments", "simulation")
"""Folders whose tests run first, so that the processes of `make test` end at about the same time."""

TOGETHER = ("deployment/test_deploy", "deployment/", "experiments/")
"""Tests that stay in one process, by how their files' paths below this folder begin; the first that fits counts.

Deployment tests wait for Flower's programs half of the time, so that two processes for them and three for the others
keep two cores busy; in one process they would take longer than all others together. Tests of experiments share the
studies that they run."""


def pytest_configure() -> None:
    """Keep the tests' files in memory, if they fit and programs may be started from there.

    On a disk, the many small files of the tests take a tenth of their time. `PYTEST_DEBUG_TEMPROOT`, `TMPDIR` and
    `--basetemp` choose another folder.

    Python's garbage collector rests until all tests are collected, of which it would take a quarter of the time.
    """
    gc.disable()
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and "TMPDIR" not in os.environ:
        found = os.statvfs(MEMORY)
        fits = min(found.f_bavail * found.f_frsize, free_memory()) >= 8e9
        if fits and not found.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_finish() -> None:
    """Let Python collect garbage again, but not among what is imported: each full collection would visit it in vain."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let Python collect what is imported at its end; else triton, which torchvision imports, reports it as leaked."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first, and skip those for CUDA where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device that torch can use"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = {name: position for position, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (order.get(item.path.parent.name, len(order)), item.path not in slow))


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Keep the tests of a file in one process of `make test`, for its fixtures, and those of `TOGETHER`.

    (pytest-xdist's own marks for groups do nothing with pytest 9.2.)
    """
    return Together(config, log)


class Together(LoadScopeScheduling):
    """Assigns all tests of a file, or of a row of `TOGETHER`, to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        below = file.removeprefix("tests/")
        return next((start for start in TOGETHER if below.startswith(start)), file)


@pytest.fixture(scope="session", autouse=True)
def own_cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep other runs of this user from delaying this process's tests.

    The tests use separate locks of the cores, and Ray's workers get a normal priority instead of a low one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("FLWR_HOME", str(tmp_path_factory.mktemp("flwr")))  # nodes keep state and ledger here by default
        yield


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., Settings]:
    """Return a factory of small settings, each with a separate output folder; the folders' names have equal lengths."""
    numbers = itertools.count()

    def make(method: str = "hyperfl", **changes: Scalar) -> Settings:
        output = str(tmp_path / f"run-{next(numbers):03d}")
        return small_settings(**({"method": method, "output": output} | changes))

    return make


@pytest.fixture
def federate(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Federate:
    """Return a function that runs a federation to its end, without figures and without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def run(
        method: str, num_nodes: int = 2, *, grid: MakeGrid = plain_grid, plots: bool = False, **changes: Scalar
    ) -> Path:
        settings = make_settings(method, **changes)
        return hyperfl_flwr.app.server.run(grid(num_nodes, settings), RunConfig.from_flat(settings), plots=plots)

    return run


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Do in this process, which has imported torch already, what the project does in a subprocess.

    So are runs with the in-process engine, with their output in the engine's log. The real processes are in
    tests/unit/test_subprocess_call.py and tests/simulation.
    """

    def request(engine: InProcessEngine, kind: str, *arguments: object) -> int:
        number, engine._requests = engine._requests, engine._requests + 1
        if engine._printed is None:
            engine._folder = Path(tempfile.mkdtemp(dir=tmp_path))
            (engine._folder / "run.log").touch()
            engine._printed = (engine._folder / "run.log").open("rb")
        consoles = [handler for handler in FLOWER_LOGGER.handlers if isinstance(handler, ConsoleHandler)]
        with (
            (engine._folder / "run.log").open("a") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
            contextlib.ExitStack() as stack,
        ):
            engine._log_starts[number] = log.tell()
            for console in consoles:
                stack.callback(console.setStream, console.stream)
                console.setStream(log)
            answer = in_process_app.answer(kind, *arguments)
        answer_file(engine._folder, number).write_bytes(pickle.dumps(answer))
        return number

    monkeypatch.setattr(subprocess_call, "call_in_subprocess", subprocess_call.call_here)
    monkeypatch.setattr(InProcessEngine, "__enter__", lambda engine: engine)  # no process
    monkeypatch.setattr(InProcessEngine, "_request", request)


command_of = functools.cache(typer.main.get_command)
"""Builds the commands of the command line, of which building all takes 0.05 s, a single time."""


@pytest.fixture
def call(
    in_this_process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """Return a function that runs `hyperfl` here, in an empty folder: words -> (exit code, stdout, stderr)."""
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(typer.main, "get_command", command_of)

    def run(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hyperfl", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
