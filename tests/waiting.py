"""How long a test waits for another process. There is one limit, since only a broken program reaches it."""

import time
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds. One machine has taken three times as long for all tests as another."""


def eventually(holds: Callable[[], object], what: str, every: float = 0.1) -> None:
    """Wait until a condition holds, and fail after `PATIENCE` seconds.

    Args:
        holds: The condition. Missing files count as no.
        what: Its name, for the failure.
        every: Seconds between two attempts.
    """
    end = time.monotonic() + PATIENCE
    while not _holds(holds):
        assert time.monotonic() < end, f"{what}: not within {PATIENCE:g} s"
        time.sleep(every)


def _holds(condition: Callable[[], object]) -> bool:
    try:
        return bool(condition())
    except FileNotFoundError:
        return False
