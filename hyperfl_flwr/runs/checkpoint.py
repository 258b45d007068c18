"""Save and load the server's checkpoints, from which a run can be resumed after a round."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.atomic_files import leftovers
from hyperfl_flwr.core.files.storage import read_arrays, stored_bytes, write_arrays
from hyperfl_flwr.protocol.arrays import SharedArrays

KEPT = 2
"""Number of checkpoints to keep; the older one is needed if a run is resumed with more rounds."""

SERVER = "server/"
"""Prefix of the keys of the strategy's state in a checkpoint; all other keys are shared parameters."""


@dataclass(kw_only=True)
class Progress:
    """Progress of a run after a round.

    Attributes:
        round: The last finished round; 0 before the first.
        num_rounds: Planned number of rounds; with client sampling, the last round may train all clients.
        phase: Name of the training phase that the round belonged to; empty if there is only one phase.
        last_phase_after: The round after which the run's last phase began, which depends on `num_rounds`; None if it
            has not begun.
        versions: For each client the version of its current private state; 0 if it was never trained.
        trainings: Number of requested client trainings so far.
        failed_trainings: Number of those that failed.
        failed_rounds: Number of consecutive rounds, up to this one, in which no sampled client finished.
        best_validation: Highest mean accuracy on validation data, or merit of another task (`Task.merit`), by kind of
            model, `aggregate` and `personalized`; empty without validation data that decide about rounds.
        best_round: The round, the last of several, after which the models had that merit.
        last_rise: The last round after which one of these means was higher than ever before.
        rounds_without_rise: Number of rounds with known means since then.
    """

    round: int = 0
    num_rounds: int = 0
    phase: str = ""
    last_phase_after: int | None = None
    versions: dict[int, int] = field(default_factory=dict)
    trainings: int = 0
    failed_trainings: int = 0
    failed_rounds: int = 0
    best_validation: dict[str, float] = field(default_factory=dict)
    best_round: dict[str, int] = field(default_factory=dict)
    last_rise: int = 0
    rounds_without_rise: int = 0


class Checkpoints:
    """The checkpoints of a run.

    Args:
        directory: Folder of the checkpoints; it must exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, arrays: SharedArrays, progress: Progress) -> None:
        """Write a checkpoint; it is on disk when this returns.

        Deletes older checkpoints except the last two, the best one by validation data, and the one at which the run's
        last phase began. A run that is resumed with more rounds continues from the latter. What a writer that was
        killed has left is deleted, too.
        """
        for unfinished in leftovers(self.directory, "round-*.npz"):  # of an earlier process: a folder has one writer
            unfinished.unlink(missing_ok=True)
        write_arrays(self.path(progress.round), arrays, asdict(progress))  # before any older one is deleted
        for number in self.rounds()[:-KEPT]:
            if number not in (progress.last_phase_after, progress.best_round.get("aggregate")):
                self.path(number).unlink(missing_ok=True)

    def load(self, number: int) -> tuple[SharedArrays, Progress]:
        """Read the checkpoint of a round.

        Raises:
            StateError: If it is missing or damaged.
        """
        try:
            arrays, meta = read_arrays(self.path(number))
        except StateError as error:
            earlier = [other for other in self.rounds() if other < number]
            if not earlier or not self.path(number).is_file():
                raise
            raise StateError(f"{error}; without the file the run would continue after round {earlier[-1]}") from error
        try:
            versions = {int(client): int(version) for client, version in meta.pop("versions").items()}
            progress = Progress(versions=versions, **meta)
            if progress.round != number:
                raise ValueError(f"it belongs to round {progress.round}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"{self.path(number)} is not a checkpoint that this version of hyperfl-flwr can use: {error}; "
                f"start a new run"
            ) from None
        return arrays, progress

    def server_state_bytes(self, number: int) -> int:
        """Return the size in memory, in bytes, of the strategy's state in the checkpoint of a round.

        Raises:
            StateError: If it is missing or damaged.
        """
        return sum(size for key, size in stored_bytes(self.path(number)).items() if key.startswith(SERVER))

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, ascending."""
        return sorted(int(path.stem.removeprefix("round-")) for path in self.directory.glob("round-[0-9]*.npz"))

    def path(self, number: int) -> Path:
        """Return the checkpoint file of a round."""
        return self.directory / f"round-{number:06d}.npz"
