"""What all tests share."""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from federations import Call, Federate, MakeGrid, Settings, plain_grid, small_settings

import hyperfl_flwr.server_app
from hyperfl_flwr.__main__ import main
from hyperfl_flwr.config import RunConfig, Scalar
from hyperfl_flwr.methods import METHODS

torch.set_num_threads(1)


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., Settings]:
    """Return a factory of small settings, each with an output folder of its own (of a name of one length)."""
    numbers = itertools.count()

    def make(method: str = "hyperfl", **changes: Scalar) -> Settings:
        output = str(tmp_path / f"run-{next(numbers):03d}")
        return small_settings(**({"method": method, "output": output} | changes))

    return make


@pytest.fixture
def federate(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Federate:
    """Return a function that runs a federation to its end; pictures and waiting for the disk are left out."""
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def run(
        method: str, num_nodes: int = 2, *, grid: MakeGrid = plain_grid, plots: bool = False, **changes: Scalar
    ) -> Path:
        settings = make_settings(method, **changes)
        with monkeypatch.context() as patch:
            if not plots:
                patch.setattr(hyperfl_flwr.server_app, "plot_run", lambda _: None)
            config = RunConfig.from_flat(settings, methods=METHODS)
            return hyperfl_flwr.server_app.run(grid(num_nodes, settings), config)

    return run


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Return a function that runs `hyperfl` in an empty folder: words -> (exit code, stdout, stderr)."""
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)

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
