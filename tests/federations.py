"""Small federations in one process."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import hyperfl_flwr.app.server
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import SMALL
from hyperfl_flwr.contract.grids import Settings, plain_grid
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.server.federation import handshake
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from strategies.engine.context import ServerContext

Call = Callable[..., tuple[int, str, str]]
"""Runs `hyperfl`: words -> (exit code, stdout, stderr)."""

REPRESENTATIVES = ("local", "fedavg", "hyperfl", "pfedhn", "it-pfl", "priv-hfl", "fedgen")
"""Methods that together have every kind of group, reduction and phase; they stand for all where the code under test is
that of the engine."""

of_every_method = pytest.mark.parametrize("method", METHODS)
of_representatives = pytest.mark.parametrize("method", REPRESENTATIVES)
of_every_method_if_extended = pytest.mark.parametrize(
    "method", [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.extended) for name in METHODS]
)
"""As `of_every_method`; those that are not `REPRESENTATIVES` are tests for `make test-all`."""

OF_METHOD: Mapping[str, Settings] = {"fedbn": {"target": "own_networks:with_batchnorm"}}
"""Settings that a method needs besides `SMALL`."""


def small_settings(**changes: Scalar) -> Settings:
    """Return the settings of a small federation; `num_rounds` stands for `num-rounds`."""
    of_method = OF_METHOD.get(str(changes.get("method")), {})
    own = default_settings(str(changes.get("method", "")))
    return own | SMALL | of_method | {key.replace("_", "-"): value for key, value in changes.items()}


def trained(settings: Settings, num_nodes: int = 1) -> Path:
    """Run a federation to its end, without figures and without waiting for the disk; return its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        return hyperfl_flwr.app.server.run(plain_grid(num_nodes, settings), RunConfig.from_flat(settings), plots=False)


def setting_of(config: RunConfig, grid: InProcessGrid) -> ServerContext:
    federation = handshake(grid, config.hosted_clients, 10.0)
    return ServerContext(
        config=resolved(config), federation=federation, reductions={}, experiment="0" * 16, run_directory=config.output
    )


def repeated(run: Path, folder: Path) -> Path:
    """Copy a run's folder as that of another run with the same settings and results, and return it."""
    other = Path(shutil.copytree(run, folder))
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest | {"experiment": "0" * 16}))
    return other
