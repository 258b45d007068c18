"""Train shadow federations, and keep what attackers hold of them; interrupted games continue.

A federation is an ordinary run in this process, on an `.npz` file with its clients' samples. When it is complete, what
the attackers hold of it is written to a file, and the run's folder is deleted.
"""

import contextlib
import json
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from numpy.typing import NDArray

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.server import run
from hyperfl_flwr.audit.membership.shadow_data import LEAST_FEDERATIONS, GameData
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError, RunFailedError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.files.storage import read_arrays, write_arrays
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import CLASSIFICATION
from hyperfl_flwr.models.provenance import find_sources, use_weights
from hyperfl_flwr.protocol.secure_sums.thresholds import MOST_NODES
from hyperfl_flwr.runs.run_sources import find_sources_of
from hyperfl_flwr.server.in_process_grid import InProcessGrid

DESCRIPTION = "game.json"
"""File with the settings that a game's folder was created with."""

Data = TypeVar("Data", bound=GameData)
"""The samples of a game."""

Arrays = Mapping[str, NDArray[Any]]
"""What the attackers hold of one federation, by name."""


@dataclass(frozen=True, kw_only=True)
class ShadowGame(ABC, Generic[Data]):
    """A game of inference, with the federations that are trained for it.

    Attributes:
        settings: Settings of the federations, all but their samples, by key.
        federations: Number M of federations, even.
        run: Folder of a run, whose copy of the user's own code the federations are trained with; None for the code in
            the working directory.
        kind: What the attackers infer.
        has_secure_sums: Whether the federations have the secure sums that the settings ask for.
    """

    settings: Mapping[str, Scalar]
    federations: int
    run: Path | None = None
    kind: ClassVar[str]
    has_secure_sums: ClassVar[bool]

    def __post_init__(self) -> None:
        """Check the number of federations, the task, that all nodes are honest, and where noise is added.

        Raises:
            ConfigError: If they are wrong.
        """
        if self.federations < LEAST_FEDERATIONS or self.federations % 2:
            raise ConfigError(
                f"the number of federations must be even and at least {LEAST_FEDERATIONS}, got {self.federations}"
            )
        if self.settings.get("task", CLASSIFICATION.name) != CLASSIFICATION.name:
            raise ConfigError(f"task must be classification, which the attacks are for; got {self.settings['task']!r}")
        if (attack := self.settings.get("adversary.attack", "none")) != "none":
            raise ConfigError(f"adversary.attack must be none, as the attacks are on honest clients; got {attack!r}")
        if not self.has_secure_sums and self.settings.get("privacy.noise") == "sum":
            raise ConfigError(
                "privacy.noise must be local or server, as single uploads are recorded and have no complete noise with "
                "sum; got 'sum'"
            )

    @property
    def config(self) -> RunConfig:
        """The settings before the samples are drawn, which decide how many each client has."""
        return RunConfig.from_flat({**self.settings, "output": "", "resume": "", "data.augmentation": "none"})

    def find_sources(self) -> None:
        """Make the user's own code importable, which every process needs that trains federations."""
        if self.run is None:
            find_sources(self.settings)
        else:
            find_sources_of(self.run, self.settings)

    @property
    def description(self) -> dict[str, Any]:
        """All that determines the game, for its folder."""
        return {"federations": self.federations, "settings": self.config.flat()}

    @property
    @abstractmethod
    def records_uploads(self) -> bool:
        """Whether the attackers use what the server observes of single clients."""

    @abstractmethod
    def load(self) -> Data:
        """Load the samples of the game.

        Raises:
            ConfigError: If the settings do not suit the game.
            DataError: If the data set cannot be loaded, or is too small.
        """

    @abstractmethod
    def write_samples(self, data: Data, number: int, path: Path) -> None:
        """Write the samples of one federation, from 0, to an `.npz` file, see `GameData.write_clients`."""

    @abstractmethod
    def observed(self, run: Path, config: RunConfig, data: Data) -> Arrays:
        """Return what the attackers hold of a federation.

        Args:
            run: Folder of its complete run.
            config: Its settings, resolved.
            data: The samples of the game.
        """

    def of_federation(self, data: Data, samples: Path, output: Path) -> RunConfig:
        """Return the settings of one federation.

        Args:
            data: The samples of the game.
            samples: File of the federation's samples.
            output: Folder of its run.
        """
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
                "num-nodes": "auto",
                "novel.clients": 0,
                "early-stopping": 0,
                "keep": "last",
                "audit.clients": "all" if self.records_uploads else "",
                "audit.rounds": "all",
                "secagg.enabled": self.config.secagg.enabled and self.has_secure_sums,
                "threads": 1 if self.config.threads == "auto" else self.config.threads,
            }
        )


def open_game(game: ShadowGame[Data], folder: Path) -> None:
    """Create a game's folder, or check that an existing one was created for the same game.

    Raises:
        RunDirectoryError: If the folder belongs to something else.
    """
    file = folder / DESCRIPTION
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps(game.description, indent=2) + "\n").encode())
    elif not file.is_file():
        raise RunDirectoryError(
            f"{folder} is not empty and not the folder of a {game.kind} game; choose another output"
        )
    elif json.loads(file.read_text()) != game.description:
        raise RunDirectoryError(f"{folder} was created with other settings, see {file}; choose another output")


def missing_federations(game: ShadowGame[Data], folder: Path) -> list[int]:
    """Return the numbers of the federations that a game's folder lacks."""
    return [number for number in range(game.federations) if not _file(folder, number).is_file()]


def play(game: ShadowGame[Data], folder: Path, on_played: Callable[[], None] = lambda: None) -> Sequence[Arrays]:
    """Train the federations that a game's folder lacks, and return what the attackers hold of each.

    Args:
        game: The game.
        folder: The game's folder, see `open_game`.
        on_played: Called when a federation is complete.

    Raises:
        HyperFLError: If a federation cannot be trained.
    """
    if missing := missing_federations(game, folder):
        play_some(game, folder, missing, on_played)
    return [read_arrays(_file(folder, number))[0] for number in range(game.federations)]


def play_some(
    game: ShadowGame[Data], folder: Path, numbers: Sequence[int], on_played: Callable[[], None] = lambda: None
) -> None:
    """Train some federations one after the other in this process, and write what the attackers hold of each to a file.

    Args:
        game: The game.
        folder: The game's folder, see `open_game`.
        numbers: Numbers of the federations, from 0.
        on_played: Called when a federation is complete.

    Raises:
        HyperFLError: If a federation cannot be trained.
    """
    game.find_sources()
    use_weights(game.config.lpm.weights)
    data = game.load()
    for number in numbers:
        work = folder / f"federation-{number:03d}"
        if work.exists():  # it was interrupted
            shutil.rmtree(work)
        work.mkdir(mode=0o700)
        game.write_samples(data, number, work / "samples.npz")
        config = game.of_federation(data, work / "samples.npz", work / "run")
        # A robust rule and secure sums are about nodes, each of which is one client as in `hyperfl run`.
        num_nodes = config.num_clients if config.robust.is_robust or config.secagg.enabled else 1
        if config.secagg.enabled:
            num_nodes = min(num_nodes, MOST_NODES)
        try:
            with _quiet():
                run(InProcessGrid(app, num_nodes, config.flat(), {"simulated": True}), config, plots=False)
        except RunFailedError as error:
            reason = str(error).splitlines()[0]  # the others say how to resume the run, which a game starts anew
            raise RunFailedError(f"federation {number} cannot be trained: {reason}") from error
        check_failures(work / "run", number)
        observed = game.observed(work / "run", resolved(config), data)
        write_arrays(_file(folder, number), observed, {"federation": number}, mode=0o600)
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


def check_failures(run: Path, number: int) -> None:
    """Check that every client has trained in every round.

    Raises:
        RunFailedError: If one has failed.
    """
    for file in sorted((run / "failures").glob("*.txt")):
        reason = file.read_text().splitlines()[0]
        raise RunFailedError(
            f"the attacks need all clients in all rounds, but in federation {number}, {file.stem.replace('-', ' ')} "
            f"failed: {reason}; change the settings, such as a lower learning-rate"
        )


def _file(folder: Path, number: int) -> Path:
    return folder / f"observed-{number:03d}.npz"
