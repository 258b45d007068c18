"""Measure the memory of this process, and name it in reports."""

import os
import resource
import secrets
import sys


def peak_memory() -> int:
    """Return the peak resident memory of this process so far, in bytes."""
    # ru_maxrss is in bytes on macOS and in kilobytes on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_NAMES: dict[int, str] = {}


def process_name() -> str:
    """Return a unique name of this process; it is random, so that it reveals nothing about the machine."""
    return _NAMES.setdefault(os.getpid(), secrets.token_hex(8))
