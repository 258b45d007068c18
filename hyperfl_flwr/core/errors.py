"""The errors that users see.

::

    HyperFLError            something a user can act on; `exit_code` is what the command line returns
    |-- ConfigError         a setting is unknown, of the wrong type or out of range (exit 2)
    |-- DataError           a data set is missing, unreadable or too small for the federation (exit 2)
    |-- RunDirectoryError   a run directory exists, is in use, or does not fit what is asked of it (exit 2)
    |-- StateError          a checkpoint or a private state file is missing or corrupted (exit 2)
    |-- DeviceError         a device was asked for that this machine does not offer (exit 2)
    |-- RefusalError        a node does not do what the server asks (exit 2)
    |-- InstallationError   foreign packages hide this project's, or a file of the installation is missing (exit 2)
    `-- RunFailedError      the run itself failed (exit 1)

A message says what must hold, what was given, and what to do. Misuse of a library function is a `ValueError`.

What happens on a node with an owner is told to the server by `for_others` only: a message may name the owner's files.
"""


class HyperFLError(Exception):
    """An error that a user can act on.

    Args:
        message: For the user at this machine.
        public: What another machine may learn of it: nothing of the owner's paths, names or samples. Empty for the kind
            of error alone.
    """

    exit_code = 2

    def __init__(self, message: str = "", *, public: str = "") -> None:
        super().__init__(message)
        self.public = public


class ConfigError(HyperFLError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(HyperFLError):
    """A data set is missing, unreadable or too small for the federation."""


class RunDirectoryError(HyperFLError):
    """A run directory exists, is in use, or does not fit what is asked of it."""


class StateError(HyperFLError):
    """A checkpoint or a private state file is missing or corrupted."""


class DeviceError(HyperFLError):
    """A device was asked for that this machine does not offer."""


class RefusalError(HyperFLError):
    """A node does not do what the server asks; the message is meant for the server."""


class InstallationError(HyperFLError):
    """Foreign packages hide this project's, or a file of the installation is missing."""


class RunFailedError(HyperFLError):
    """The run itself failed."""

    exit_code = 1


def for_others(error: Exception) -> str:
    """Return what another machine may learn of an error: a sentence that was written for it, or the kind alone."""
    if isinstance(error, RefusalError):
        return str(error)
    public = error.public if isinstance(error, HyperFLError) else ""
    return public or f"{type(error).__name__}, see the node's log"
