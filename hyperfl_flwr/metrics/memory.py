"""Memory of processes."""

import os
import platform
import resource
import sys


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def process_name() -> str:
    """Return machine and id of this process."""
    return f"{platform.node()}:{os.getpid()}"
