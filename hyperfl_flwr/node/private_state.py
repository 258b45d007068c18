"""Store the private state of a node's clients on the node's disk.

Versions are numbered by the round that wrote them. A message names the version to start from, so a message that is sent
twice gives the same result twice, apart from the noise of differential privacy, which is drawn again. A run resumed
from the checkpoint of round 10 finds the clients' state of round 10, even if the clients trained further. A version is
deleted once the server has reported a durable checkpoint that does not need it. (Flower's `Context.state` is not used:
it loses large states in a deployment, and is copied with every message in a simulation.)
"""

from pathlib import Path

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.atomic_files import leftovers, unwritable
from hyperfl_flwr.core.files.storage import Arrays, read_arrays, stored_bytes, write_arrays
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.flower.home import get_flwr_home

FOLDER_SIZE = 1000
"""Number of clients of which the folders lie in one folder; some file systems are slow with more."""

INITIAL = 0
"""Version of a client that was never trained; its state is computed from the seed and not stored."""


def state_folder(configured: Scalar | None, run_directory: str, *, simulated: bool) -> Path:
    """Return a node's folder for private files: its `state-dir`, or in a simulation a part of the run's folder."""
    if configured:
        return Path(str(configured))
    return Path(run_directory) / "clients" if simulated else Path(get_flwr_home()) / "hyperfl-state"


def client_folder(directory: Path, client: int) -> Path:
    """Return the folder of a client's private state; it need not exist.

    The first `FOLDER_SIZE` clients have theirs in the node's folder for the run, each further thousand in a folder of
    its own, such as `clients-00012000/client-12345`. Earlier versions had all of them in the node's folder; one that is
    found there is used.

    Args:
        directory: The node's folder for one experiment.
        client: The client's id.
    """
    plain = directory / f"client-{client:05d}"
    first = client // FOLDER_SIZE * FOLDER_SIZE
    return plain if not first or plain.is_dir() else directory / f"clients-{first:08d}" / plain.name


def run_folder(folder: Path) -> Path:
    """Return the node's folder for the experiment, which a client's folder lies in."""
    return folder.parent.parent if folder.parent.name.startswith("clients-") else folder.parent


def create_client_folder(folder: Path) -> None:
    """Create a client's folder and the folders that it lies in, with access for their owner only.

    Raises:
        OSError: If one cannot be created.
    """
    for directory in (run_folder(folder), folder.parent, folder):  # mkdir applies `mode` only to the last folder
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def client_folders(directory: Path) -> list[Path]:
    """Return the folders of all clients that have one, see `client_folder`, ordered by name within each thousand."""
    return [*sorted(directory.glob("client-*")), *sorted(directory.glob("clients-*/client-*"))]


class PrivateState:
    """Private arrays of one client, by version.

    Args:
        directory: The node's folder for one experiment; created by the first save, with access for its owner only.
        experiment: Identity of the run, checked when a version is read.
        client: The client's id.
    """

    def __init__(self, directory: Path, experiment: str, client: int) -> None:
        self.client = client
        self.experiment = experiment
        self.directory = client_folder(directory, client)

    def path(self, version: int) -> Path:
        """Return the file of a version."""
        return self.directory / f"round-{version:06d}.npz"

    def save(self, version: int, arrays: Arrays) -> None:
        """Store a version; it is on disk when this returns.

        Raises:
            StateError: If it cannot be written, for example on a full disk; older versions are unchanged.
        """
        meta = {"client": self.client, "experiment": self.experiment, "round": version}
        try:
            create_client_folder(self.directory)
            write_arrays(self.path(version), arrays, meta, mode=0o600)
        except OSError as error:
            raise StateError(self._unwritten(version, arrays, error)) from error

    def _unwritten(self, version: int, arrays: Arrays, error: OSError) -> str:
        """Return a message for the user: why a version was not stored, and which version is kept."""
        size = sum(value.nbytes for value in arrays.values())
        older = max(self.directory.glob("round-*.npz"), default=None)
        kept = f"; the state after round {int(older.stem.removeprefix('round-'))} is kept" if older else ""
        problem = unwritable(self.directory, error, size)
        return f"the state of client {self.client} after round {version} is not stored: {problem}{kept}"

    def load(self, version: int) -> Arrays:
        """Read a version.

        Raises:
            StateError: If it is missing or damaged, or belongs to another run.
        """
        path = self.path(version)
        arrays, meta = read_arrays(path)
        expected = {"client": self.client, "experiment": self.experiment, "round": version}
        if meta != expected:
            raise StateError(f"{path} must belong to {expected}, got {meta}; restore it from a copy or start a new run")
        return arrays

    def forget_before(self, version: int, *, but: set[int]) -> None:
        """Delete all versions older than `version`, except those in `but`.

        Newer versions stay: a process that the server has given up on may finish after its successor. Temporary files
        of such older versions, left by processes that were killed while writing, are deleted, too.
        """
        kept = {self.path(older) for older in but}
        written = [path for path in self.directory.glob("round-*.npz") if path not in kept]
        for path in [*written, *leftovers(self.directory, "round-*.npz")]:
            # Zero-padded round numbers make the order of the names that of the rounds.
            if path.name.removeprefix(".") < self.path(version).name:
                path.unlink(missing_ok=True)


def largest_state(directory: Path) -> int | None:
    """Return the size in memory, in bytes, of the largest current private state of a node's clients; None without any.

    Args:
        directory: The node's folder for one experiment.

    Raises:
        StateError: If a client's newest version is damaged.
    """
    newest = [max(client.glob("round-*.npz"), default=None) for client in client_folders(directory)]
    return max((sum(stored_bytes(path).values()) for path in newest if path), default=None)
