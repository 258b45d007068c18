"""Observations of earlier rounds, for attacks that follow a client from the first round on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hyperfl_flwr.audit.observation_files import ObservationFiles
from hyperfl_flwr.audit.record_round import AttackedRound
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.observation import Observation, observation_path
from hyperfl_flwr.runs.run_directory import settings_of


class ObservationHistory(ObservationFiles):
    """Recorded observations, each with all earlier ones of the same client.

    Args:
        paths: Files of the observations.
        folder: Folder of the run that has recorded all earlier rounds.
    """

    def __init__(self, paths: Sequence[Path], folder: Path) -> None:
        super().__init__(paths)
        self.folder = folder

    def part(self, index: slice) -> "ObservationHistory":
        """Return a part of the observations."""
        return ObservationHistory(self.paths[index], self.folder)

    def read(self, path: Path) -> Observation:
        """Read an observation and attach the earlier ones."""
        found = super().read(path)
        possible = (observation_path(self.folder, number, found.client) for number in range(1, found.round))
        return replace(found, earlier=ObservationFiles([path for path in possible if path.exists()]))


def attacked_round(target: AttackedRound) -> int:
    """Return the number of the attacked round."""
    if target.recorded_round:
        return target.recorded_round
    return 1 if target.trained is None else Checkpoints(target.trained / "checkpoints").rounds()[-1] + 1


def require_history(target: AttackedRound) -> None:
    """Check that all rounds before the attacked one were recorded; a missing file then means a round without a reply.

    Raises:
        ConfigError: If an earlier round was not recorded for all attacked clients.
    """
    config = target.config
    if target.trained is not None:
        config = RunConfig.from_flat(settings_of(target.trained))
    before = range(1, attacked_round(target))
    if all(config.audit.covers(client, number) for client in target.clients for number in before):
        return
    clients = ",".join(map(str, target.clients))
    raise ConfigError(
        f"attacks on {config.method} follow the clients from the first round on, but not all rounds before round "
        f"{attacked_round(target)} were recorded; run it with --set audit.clients={clients} --set audit.rounds=all"
    )
