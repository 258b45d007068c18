"""The server's checkpoints: all that is needed to go on after a round."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.storage import read_arrays, stored_bytes, write_arrays
from hyperfl_flwr.protocol.arrays import SharedArrays

KEPT = 2
"""Checkpoints that are kept; the older of them also serves a run that is resumed with more rounds."""

SERVER = "server/"
"""Prefix of the keys of the strategy's own state in a checkpoint; the others are the shared parameters."""


@dataclass(kw_only=True)
class Progress:
    """Where a run stands after a round.

    Attributes:
        round: The last finished round; 0 before the first.
        num_rounds: How many rounds the run was to have; its last round is special with client sampling.
        phase: Name of the phase of training that the round was part of; empty where there is but one.
        last_phase_after: The round after which the run's last phase began, if it has; `num_rounds` decides which.
        versions: For each client the round whose private state is its last; 0 if it was never trained.
        trainings: Client trainings that were asked for so far.
        failed_trainings: How many of them failed.
        failed_rounds: Rounds in a row, up to this one, in which no sampled client finished.
    """

    round: int = 0
    num_rounds: int = 0
    phase: str = ""
    last_phase_after: int | None = None
    versions: dict[int, int] = field(default_factory=dict)
    trainings: int = 0
    failed_trainings: int = 0
    failed_rounds: int = 0


class Checkpoints:
    """The checkpoints of a run.

    Args:
        directory: Their folder; it exists.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, arrays: SharedArrays, progress: Progress) -> None:
        """Write a checkpoint; it is on disk when this returns.

        Older ones than the last two are deleted, but for that with which the run's last phase began: a run that is
        resumed with more rounds goes on from there.
        """
        write_arrays(self.path(progress.round), arrays, asdict(progress))
        for number in self.rounds()[:-KEPT]:
            if number != progress.last_phase_after:
                self.path(number).unlink(missing_ok=True)

    def load(self, number: int) -> tuple[SharedArrays, Progress]:
        """Read the checkpoint of a round.

        Raises:
            StateError: If it is missing or damaged.
        """
        arrays, meta = read_arrays(self.path(number))
        try:
            versions = {int(client): int(version) for client, version in meta.pop("versions").items()}
            progress = Progress(versions=versions, **meta)
            if progress.round != number:
                raise ValueError(f"it is of round {progress.round}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"{self.path(number)} is no checkpoint that this version of hyperfl-flwr can use: {error}; "
                f"start a new run"
            ) from None
        return arrays, progress

    def server_state_bytes(self, number: int) -> int:
        """Return the size in memory of the strategy's own state in the checkpoint of a round.

        Raises:
            StateError: If it is missing or damaged.
        """
        return sum(size for key, size in stored_bytes(self.path(number)).items() if key.startswith(SERVER))

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, ascending."""
        return sorted(int(path.stem.removeprefix("round-")) for path in self.directory.glob("round-[0-9]*.npz"))

    def path(self, number: int) -> Path:
        """Return the file of a round."""
        return self.directory / f"round-{number:06d}.npz"
