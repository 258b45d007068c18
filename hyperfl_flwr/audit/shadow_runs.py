"""Train shadow federations, and keep the confidences of their models; interrupted games continue.

A federation is an ordinary run in this process, on an `.npz` file with its clients' samples. When it is complete, what
the attackers hold of it is turned into confidences in all samples, and the run's folder is deleted.
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.server import run
from hyperfl_flwr.attacks.shadow_scores import Confidences
from hyperfl_flwr.audit.shadow_data import LEAST_FEDERATIONS, ShadowData, draws_of, load_shadow_data, write_samples
from hyperfl_flwr.audit.shadow_views import confidences, views_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.storage import read_arrays, write_arrays, write_atomically
from hyperfl_flwr.core.tasks import CLASSIFICATION
from hyperfl_flwr.models.provenance import find_sources, use_weights
from hyperfl_flwr.protocol.secure_sums.thresholds import MOST_NODES
from hyperfl_flwr.server.in_process_grid import InProcessGrid

DESCRIPTION = "game.json"
"""File with the settings that a game's folder was created with."""


@dataclass(frozen=True, kw_only=True)
class ShadowGame:
    """A game of membership inference, with the federations that are trained for it.

    Attributes:
        settings: Settings of the federations, all but their samples, by key.
        federations: Number M of federations, even.
    """

    settings: Mapping[str, Scalar]
    federations: int

    def __post_init__(self) -> None:
        """Check the number of federations, the task, and that all nodes are honest.

        Raises:
            ConfigError: If they are wrong.
        """
        if self.federations < LEAST_FEDERATIONS or self.federations % 2:
            raise ConfigError(
                f"the number of federations must be even and at least {LEAST_FEDERATIONS}, got {self.federations}"
            )
        if self.settings.get("task", CLASSIFICATION.name) != CLASSIFICATION.name:
            raise ConfigError(f"task must be classification, which the attacks are for; got {self.settings['task']!r}")
        if (lie := self.settings.get("adversary.attack", "none")) != "none":
            raise ConfigError(f"adversary.attack must be none, as the attacks are on honest clients; got {lie!r}")

    @property
    def config(self) -> RunConfig:
        """The settings before the samples are drawn, which decide the clients' pools."""
        return RunConfig.from_flat({**self.settings, "output": "", "resume": "", "data.augmentation": "none"})

    def of_federation(self, data: ShadowData, samples: Path, output: Path) -> RunConfig:
        """Return the settings of one federation.

        Args:
            data: The samples of the game.
            samples: File of the federation's samples.
            output: Folder of its run.
        """
        sees_uploads = {"server", "client"} & set(views_of(self.config)) and not self.config.secagg.enabled
        return RunConfig.from_flat(
            {
                **self.config.flat(),
                "dataset": f"npz:{samples}",
                "output": str(output),
                "data.partition": "natural",
                "data.train-samples": "auto",
                "data.normalisation": data.normalisation,
                "data.global-test": False,
                "data.validation-fraction": 0.0,
                "learning-rate": resolved(self.config).learning_rate,
                "fraction-train": 1.0,
                "early-stopping": 0,
                "keep": "last",
                "audit.clients": "all" if sees_uploads else "",
                "audit.rounds": "all",
                "threads": 1 if self.config.threads == "auto" else self.config.threads,
            }
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Played:
    """The confidences of all federations' models.

    Attributes:
        data: The samples of the game.
        confidences: By view, for each client [M, q, n + c], the controls last.
    """

    data: ShadowData
    confidences: Mapping[str, Sequence[Confidences]]


def open_game(game: ShadowGame, folder: Path) -> None:
    """Create a game's folder, or check that an existing one was created for the same game.

    Raises:
        RunDirectoryError: If the folder belongs to something else.
    """
    document = {"federations": game.federations, "settings": game.config.flat()}
    file = folder / DESCRIPTION
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps(document, indent=2) + "\n").encode())
    elif not file.is_file():
        raise RunDirectoryError(f"{folder} is not empty and not the folder of a membership game; choose another output")
    elif json.loads(file.read_text()) != document:
        raise RunDirectoryError(f"{folder} was created with other settings, see {file}; choose another output")


def missing_federations(game: ShadowGame, folder: Path) -> list[int]:
    """Return the numbers of the federations that a game's folder lacks."""
    return [number for number in range(game.federations) if not _file(folder, number).is_file()]


def play(game: ShadowGame, folder: Path, on_played: Callable[[], None] = lambda: None) -> Played:
    """Train the federations that a game's folder lacks, and return the confidences of all.

    Args:
        game: The game.
        folder: The game's folder, see `open_game`.
        on_played: Called when a federation is complete.

    Raises:
        HyperFLError: If a federation cannot be trained.
    """
    if missing := missing_federations(game, folder):
        play_some(game, folder, missing, on_played)
    return _read(game, folder)


def play_some(
    game: ShadowGame, folder: Path, numbers: Sequence[int], on_played: Callable[[], None] = lambda: None
) -> None:
    """Train some federations one after the other in this process, and write the confidences of each to a file.

    Args:
        game: The game.
        folder: The game's folder, see `open_game`.
        numbers: Numbers of the federations, from 0.
        on_played: Called when a federation is complete.

    Raises:
        HyperFLError: If a federation cannot be trained.
    """
    find_sources(game.settings)
    use_weights(game.config.lpm.weights)
    data = load_shadow_data(game.config)
    drawn, _ = draws_of(data, game.config.seed, game.federations)
    for number in numbers:
        work = folder / f"federation-{number:03d}"
        if work.exists():  # it was interrupted
            shutil.rmtree(work)
        work.mkdir(mode=0o700)
        write_samples(data, drawn, number, work / "samples.npz")
        config = game.of_federation(data, work / "samples.npz", work / "run")
        # A robust rule and secure sums are about nodes, each of which is one client as in `hyperfl run`.
        num_nodes = config.num_clients if config.robust.is_robust or config.secagg.enabled else 1
        if config.secagg.enabled:
            num_nodes = min(num_nodes, MOST_NODES)
        with _quiet():
            run(InProcessGrid(app, num_nodes, config.flat(), {"simulated": True}), config, plots=False)
        _write(folder, number, work / "run", resolved(config), data)
        shutil.rmtree(work)
        on_played()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the lines about the rounds of every federation from the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _write(folder: Path, number: int, path: Path, config: RunConfig, data: ShadowData) -> None:
    arrays = {
        f"{view}/{client}": values
        for client in range(config.num_clients)
        for view, values in confidences(path, config, data, client).items()
    }
    write_arrays(_file(folder, number), arrays, {"federation": number}, mode=0o600)


def _read(game: ShadowGame, folder: Path) -> Played:
    data = load_shadow_data(game.config)
    found = [read_arrays(_file(folder, number))[0] for number in range(game.federations)]
    return Played(
        data=data,
        confidences={
            view: [np.stack([arrays[f"{view}/{client}"] for arrays in found]) for client in range(len(data.pools))]
            for view in views_of(game.config)
        },
    )


def _file(folder: Path, number: int) -> Path:
    return folder / f"confidences-{number:03d}.npz"
