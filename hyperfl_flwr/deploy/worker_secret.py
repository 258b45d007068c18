"""Make and read the secret that a SuperNode and its worker share, by which they recognise each other."""

import os
import shlex
import stat
from pathlib import Path
from secrets import token_bytes

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.atomic_files import write_atomically

KEY_FILE = "worker.secret"
"""File in the node's folder with the secret that the SuperNode and its worker share; a new one at each start."""


def supernode_arguments(folder: Path) -> str:
    """Write a new secret, and return the SuperNode's arguments for a worker, quoted for the shell.

    Args:
        folder: The node's folder.
    """
    file = folder.absolute() / KEY_FILE
    write_atomically(file, token_bytes(32), mode=0o600)
    return shlex.join(["--isolation", "process", "--superexec-auth-secret-file", str(file)])


def read_secret(folder: Path) -> bytes:
    """Return the secret that `supernode_arguments` wrote.

    Raises:
        StateError: If the file is not a regular file of this user that no other user can read or change.
    """
    file = folder.absolute() / KEY_FILE
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid() or status.st_mode != stat.S_IFREG | 0o600:
                raise StateError(f"{file} must be yours alone (mode 0600); start the node again, which writes it")
            return opened.read(64)
    except OSError as error:
        raise StateError(f"{file} cannot be read ({error.strerror}); start the node again, which writes it") from None
