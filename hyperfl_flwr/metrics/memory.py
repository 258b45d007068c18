"""Memory of processes."""

import os
import resource
import secrets
import sys


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_NAMES: dict[int, str] = {}


def process_name() -> str:
    """Return a name that no other process has: at random, so that it tells nothing of the machine."""
    return _NAMES.setdefault(os.getpid(), secrets.token_hex(8))
