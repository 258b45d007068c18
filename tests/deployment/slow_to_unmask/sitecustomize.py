"""Alter the Python that is installed on a node so that it releases the shares of a round only when it may.

With this folder in PYTHONPATH, Python imports this file before a program begins. A client app then waits with its
answer to UNMASK while the round is later than the number in the file that MAY_UNMASK names. Its ledger already has the
message. Before it waits, it writes which files are in its memory to "memory-of-unmask" in FLWR_HOME.
"""

import os
import sys
import time
from pathlib import Path

if Path(sys.argv[0]).name == "flwr-clientapp" or sys.argv[1:3] == ["deploy", "worker"]:  # forks them
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    MAY_UNMASK = Path(os.environ["MAY_UNMASK"])
    MEMORY = Path(os.environ["FLWR_HOME"]) / "memory-of-unmask"
    answered = ClientApp.__call__

    def waiting(self: ClientApp, message: Message, context: Context) -> Message:
        """Answer a message; wait first if it asks for the shares of a round that must not be opened yet."""
        if message.metadata.message_type == "query.unmask":
            written = MEMORY.with_suffix(".new")
            written.write_text(Path("/proc/self/maps").read_text())
            written.replace(MEMORY)
            while int(MAY_UNMASK.read_text()) < int(message.content["config"]["round"]):
                time.sleep(0.1)
        return answered(self, message, context)

    ClientApp.__call__ = waiting
