"""End a deployment's ServerApp when the process that started it has ended.

Flower's own monitor raises SIGINT in its thread. That does not interrupt a main thread that waits for a lock, for
example for transfers of a message that are repeated without end: the process would stay and keep the run's folder
locked.
"""

import os
import signal
import threading
import time

POLL_SECONDS = 0.5
"""Time between two checks of the parent."""

GRACE_SECONDS = 30.0
"""Time that the process has to end after SIGINT: Flower's exit handlers wait up to 10 seconds for the SuperLink."""


def end_with_parent(grace: float = GRACE_SECONDS) -> None:
    """Send this process SIGINT when its parent ends, and SIGKILL if it has not ended some time later.

    Args:
        grace: Seconds between the two signals.
    """
    parent = os.getppid()

    def monitor() -> None:
        # An orphan gets another parent.
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)  # to the process, so that it reaches the main thread
        time.sleep(grace)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=monitor, name="parent-monitor", daemon=True).start()
