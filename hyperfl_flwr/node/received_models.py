"""Keep the models that a client has received last on the node's disk, to compare the next one with.

The files lie next to the private state and are in no message. They are numbered by the round of the message. The server
names the rounds, so a round that comes again, or out of order, is compared, too: with the model of an earlier round if
there is one, otherwise with the newest.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.atomic_files import leftovers, unwritable
from hyperfl_flwr.core.files.storage import Arrays, read_arrays, write_arrays
from hyperfl_flwr.node.private_state import PrivateState, create_client_folder

PATTERN = "received-*.npz"


class ReceivedModels:
    """The last two models that a client has received in a run.

    Args:
        state: The client's private state.
    """

    def __init__(self, state: PrivateState) -> None:
        self._state = state
        self._identity = {"client": state.client, "experiment": state.experiment}

    def before(self, server_round: int) -> tuple[Arrays, Mapping[str, Any]] | None:
        """Return the arrays and the facts of the model before a round; None if no model is kept.

        Raises:
            StateError: If the file is damaged, or belongs to another run.
        """
        files = self._files()
        if not files:
            return None
        path = max((file for file in files if file < self._path(server_round)), default=files[-1])
        arrays, meta = read_arrays(path)
        if (found := {key: meta.get(key) for key in self._identity}) != self._identity:
            raise StateError(f"{path} must belong to {self._identity}, got {found}; move it away")
        return arrays, meta["facts"]

    def keep(self, server_round: int, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        """Keep the model of a round, and that of the last round before it; others are deleted.

        Args:
            server_round: The round of the message.
            arrays: The model's arrays.
            facts: Further JSON values.

        Raises:
            StateError: If it cannot be written, for example on a full disk; earlier ones are unchanged.
        """
        path, folder = self._path(server_round), self._state.directory
        try:
            create_client_folder(folder)
            write_arrays(path, arrays, {**self._identity, "facts": facts}, mode=0o600)
        except OSError as error:
            size = sum(array.nbytes for array in arrays.values())
            raise StateError(
                f"the model that client {self._state.client} has received in round {server_round} is not stored: "
                f"{unwritable(folder, error, size)}"
            ) from error
        earlier = [file for file in self._files() if file < path][-1:]
        for file in [*self._files(), *leftovers(folder, PATTERN)]:
            if file not in (path, *earlier):
                file.unlink(missing_ok=True)

    def forget(self) -> bool:
        """Delete all models of the client, and its folder if nothing else is in it; returns whether there were any."""
        folder, kept = self._state.directory, self._files()
        for file in [*kept, *leftovers(folder, PATTERN)]:
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        return bool(kept)

    def _path(self, server_round: int) -> Path:
        return self._state.directory / f"received-{server_round:06d}.npz"

    def _files(self) -> list[Path]:
        """Return the files in the order of the rounds."""
        return sorted(self._state.directory.glob(PATTERN))
