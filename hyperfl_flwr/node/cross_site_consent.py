"""Which runs of a node are for a cross-site matrix, from their first message on.

The server names a run by its identity, and chooses its settings anew with each message. Without a record, a run that
asks for models could name an earlier one, whose owner had not allowed it or which had promised more privacy.
"""

from pathlib import Path

from hyperfl_flwr.core.errors import RefusalError, StateError

MARK = "cross-site"
"""Name of the file in a run's folder that says that its models may be sent."""


def require_same(folder: Path, *, allowed: bool) -> None:
    """Check that a run is for a cross-site matrix now if and only if it was in its first message; record the first.

    Args:
        folder: The node's folder of the run.
        allowed: Whether the settings of the message and the owner ask for and allow the matrix.

    Raises:
        RefusalError: If it was different before.
        StateError: If the record cannot be written.
    """
    mark = folder / MARK
    if mark.is_file():
        if not allowed:
            raise RefusalError(
                "this run began with cross-site = true, which must stay, at the server and at the node's owner; begin "
                "a new run without it"
            )
    elif allowed:
        if folder.is_dir() and any(folder.iterdir()):
            raise RefusalError(
                "this run began without cross-site = true, so none of its models is sent; begin a new run with it"
            )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark.touch(mode=0o600)
        except OSError as error:
            raise StateError(
                f"{mark} cannot be written: {error.strerror}; check the disk and its permissions"
            ) from error
