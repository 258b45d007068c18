"""Exceptions for errors that users can act on.

::

    HyperFLError            base class; `exit_code` is the exit code of the command line
    |-- ConfigError         a setting is unknown, of the wrong type or out of range (exit 2)
    |-- DataError           a data set is missing, unreadable or too small for the federation (exit 2)
    |-- RunDirectoryError   a run's folder exists, is in use, or does not match the request (exit 2)
    |   `-- FolderInUseError    another process is writing to it (exit 2)
    |-- StateError          a checkpoint or a private state file is missing or corrupted (exit 2)
    |-- DeviceError         this machine or cluster does not have what the run needs (exit 2)
    |-- RefusalError        a node refuses a request of the server (exit 2)
    |-- InstallationError   foreign packages hide this project's, or a file of the installation is missing (exit 2)
    `-- RunFailedError      the run itself failed (exit 1)
        `-- DivergedError       since its training has diverged, which is a result (exit 1)

A message states what must hold, what was given, and what to do. Misuse of a library function raises a `ValueError`.

A node that belongs to a data owner must pass an error to the server only through `for_others`, since the full message
may name the owner's files.
"""


class HyperFLError(Exception):
    """Base class of errors that a user can act on.

    Args:
        message: Message for the user of this machine.
        public: Message that other machines may see; it must not contain the owner's paths, names or samples. If empty,
            they see only the type of the error.
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
    """A run's folder exists, is in use, or does not match the request."""


class FolderInUseError(RunDirectoryError):
    """Another process is writing to the folder."""


class StateError(HyperFLError):
    """A checkpoint or a private state file is missing or corrupted."""


class DeviceError(HyperFLError):
    """This machine does not have the requested device, or a Ray cluster lacks what a run needs."""


class RefusalError(HyperFLError):
    """A node refuses a request of the server; the message is meant for the server, unless there is a public one."""


class InstallationError(HyperFLError):
    """Foreign packages hide this project's, or a file of the installation is missing."""


class RunFailedError(HyperFLError):
    """The run itself failed."""

    exit_code = 1


DIVERGES_AGAIN = "resumed with these settings it would diverge again; start a new run with a lower learning-rate"
"""What is said of a run that has diverged, in the place of the command that resumes it."""


class DivergedError(RunFailedError):
    """The run failed since its training has diverged: a result, as others of the same settings."""


def for_others(error: Exception) -> str:
    """Return the description of an error that other machines may see: its public message, else only its type."""
    if isinstance(error, RefusalError):
        return error.public or str(error)
    public = error.public if isinstance(error, HyperFLError) else ""
    return public or f"{type(error).__name__}, see the node's log"
