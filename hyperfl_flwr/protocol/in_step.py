"""Bring a SuperNode that sends each reply one message too late back into step: two replies at the same moment.

A SuperNode of Flower 1.41 receives a message, waits for a reply, and sends the replies that there are. If a run ends
while a message of it arrives, the SuperNode does not wait, although the message is still handled. From then on it finds
that reply after the next message, and sends each reply only when it has received one message more: the next run waits
for a reply that lies on the node. Nothing but a restart ends that, unless two replies become ready while it waits for
one, since it then sends both.

So a node that does not reply gets two requests for the handshake that ask for this. In a SuperNode out of step, their
processes run at the same time, and reply at the same moment of the node's clock. In one that is in step, the second
arrives only after the reply to the first, and both replies are merely up to `MOMENTS` seconds late.
"""

import time
from collections.abc import Callable

from flwr.app import ConfigRecord, RecordDict

IN_STEP = "in-step"
"""Name of the record in a request that asks for it."""

MOMENTS = 10.0
"""A reply waits until the node's clock shows a multiple of so many seconds."""


def two_at_once(content: Callable[[], RecordDict]) -> list[RecordDict]:
    """Return two contents of messages of which the replies are to be sent at the same moment.

    Args:
        content: Makes the content of a message.
    """
    contents = [content(), content()]
    for each in contents:
        each[IN_STEP] = ConfigRecord()
    return contents


def wait_for_the_other(content: RecordDict) -> None:
    """Wait for the moment at which the reply to a message is to be sent; not at all for other messages."""
    if IN_STEP in content:
        time.sleep(MOMENTS - time.time() % MOMENTS)
