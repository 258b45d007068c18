"""Which runs of a node are for a cross-site matrix, from their first message on.

The server names a run by its identity, and chooses its settings anew with each message. Without a record, a run that
asks for models could name an earlier one, whose owner had not allowed it or which had promised more privacy.
"""

from pathlib import Path

from hyperfl_flwr.core.errors import RefusalError, StateError

MARK = "cross-site"
"""Name of the file in a run's folder that says that its models may be sent."""


def is_for_matrix(folder: Path, *, allowed: bool) -> bool:
    """Return whether the models of a run may be sent; record it in the run's first message.

    Args:
        folder: The node's folder of the run.
        allowed: Whether the settings of the message and the owner ask for and allow the matrix.

    Returns:
        Whether they do now and did in the first message.

    Raises:
        RefusalError: If they did in the first message, and do not now: the run could promise more privacy now.
        StateError: If the record cannot be written.
    """
    mark = folder / MARK
    if mark.is_file():
        if not allowed:
            raise RefusalError(
                "this run began with cross-site = true, which must stay, at the server and at the node's owner; begin "
                "a new run without it"
            )
        return True
    if not allowed or (folder.is_dir() and any(folder.iterdir())):
        return False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600)
    except OSError as error:
        raise StateError(f"{mark} cannot be written: {error.strerror}; check the disk") from error
    return True
