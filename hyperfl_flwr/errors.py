"""The errors that users see.

::

    HyperFLError            something a user can act on; `exit_code` is what the command line returns
    |-- ConfigError         a setting is unknown, of the wrong type or out of range (exit 2)
    |-- DataError           a data set is missing, unreadable or too small for the federation (exit 2)
    |-- RunDirectoryError   a run directory exists, is in use, or does not fit what is asked of it (exit 2)
    |-- StateError          a checkpoint or a private state file is missing or corrupted (exit 2)
    |-- DeviceError         a device was asked for that this machine does not offer (exit 2)
    |-- InstallationError   foreign packages hide this project's, or a file of the installation is missing (exit 2)
    `-- RunFailedError      the run itself failed (exit 1)

A message says what must hold, what was given, and what to do. Misuse of a library function is a `ValueError`.
"""


class HyperFLError(Exception):
    """An error that a user can act on."""

    exit_code = 2


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


class InstallationError(HyperFLError):
    """Foreign packages hide this project's, or a file of the installation is missing."""


class RunFailedError(HyperFLError):
    """The run itself failed."""

    exit_code = 1
