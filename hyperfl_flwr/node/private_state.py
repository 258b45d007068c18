"""The private state of a node's clients, on the node's own disk.

Versions are keyed by the round that wrote them: a message names the version to start from, so a message that is sent
twice gives the same result twice, and a run resumed from the checkpoint of round 10 finds the clients' round-10 state
even if they had gone on. A version is deleted once the server has reported a durable checkpoint that does not need
it.
(Flower's own `Context.state` loses large states in a deployment and is copied with every message in a simulation.)
"""

from pathlib import Path

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.storage import Arrays, leftovers, read_arrays, stored_bytes, unwritable, write_arrays

INITIAL = 0
"""The version of a client that was never trained; it is computed from the seed, not stored."""


class PrivateState:
    """One client's private arrays, by version.

    Args:
        directory: The node's folder for one experiment; made on the first save, readable by its owner alone.
        experiment: Identity of the run, checked when a version is read.
        client: The client's id.
    """

    def __init__(self, directory: Path, experiment: str, client: int) -> None:
        self.client = client
        self.experiment = experiment
        self.directory = directory / f"client-{client:05d}"

    def path(self, version: int) -> Path:
        """Return the file of a version."""
        return self.directory / f"round-{version:06d}.npz"

    def save(self, version: int, arrays: Arrays) -> None:
        """Store a version; it is on disk when this returns.

        Raises:
            StateError: If it cannot be written, as on a full disk; older versions are there as before.
        """
        meta = {"client": self.client, "experiment": self.experiment, "round": version}
        try:
            for directory in (self.directory.parent, self.directory):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_arrays(self.path(version), arrays, meta, mode=0o600)
        except OSError as error:
            raise StateError(self._unwritten(version, arrays, error)) from error

    def _unwritten(self, version: int, arrays: Arrays, error: OSError) -> str:
        """Return in words why a version was not stored, and what is there instead."""
        size = sum(value.nbytes for value in arrays.values())
        older = max(self.directory.glob("round-*.npz"), default=None)
        kept = f"; the state of round {int(older.stem.removeprefix('round-'))} is kept" if older else ""
        problem = unwritable(self.directory, error, size)
        return f"the state of client {self.client} after round {version} is not stored: {problem}{kept}"

    def load(self, version: int) -> Arrays:
        """Read a version.

        Raises:
            StateError: If it is missing, damaged or another run's.
        """
        path = self.path(version)
        arrays, meta = read_arrays(path)
        expected = {"client": self.client, "experiment": self.experiment, "round": version}
        if meta != expected:
            raise StateError(f"{path} must be of {expected}, is of {meta}; restore it from a copy or start a new run")
        return arrays

    def forget_before(self, version: int, *, but: set[int]) -> None:
        """Delete the versions older than one, but for those in `but`.

        Newer ones stay: a process that the server has given up on may come to its end after its successor. What a
        process left that was killed while it wrote one of these goes, too.
        """
        kept = {self.path(older) for older in but}
        written = [path for path in self.directory.glob("round-*.npz") if path not in kept]
        for path in [*written, *leftovers(self.directory, "round-*.npz")]:
            if path.name.removeprefix(".") < self.path(version).name:
                path.unlink(missing_ok=True)


def largest_state(directory: Path) -> int | None:
    """Return the size in memory of the largest private state that a client of a node has now; None if none has any.

    Args:
        directory: The node's folder for one experiment.

    Raises:
        StateError: If a client's newest version is damaged.
    """
    newest = [max(client.glob("round-*.npz"), default=None) for client in sorted(directory.glob("client-*"))]
    return max((sum(stored_bytes(path).values()) for path in newest if path), default=None)
