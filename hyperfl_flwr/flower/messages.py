"""Set the message fields that Flower's engines set, for code that runs without an engine, and read their errors.

Wraps `flwr.common.constant.ErrorCode`, `flwr.common.serde.recorddict_to_proto`,
`flwr.supercore.task_identity.TaskIdentity` and fields of `flwr.app.Metadata`. The public `Message` has neither names
for its error codes nor a way to set its ids, cannot be constructed outside Flower's processes, and does not show the
bytes of its content.
"""

import re

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["ErrorCode", "content_as_sent", "error_text", "identify_process", "set_message_id", "set_origin"]


def identify_process() -> None:
    """Allow this process to construct messages: a `Message` reads its run and sender from this class."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def set_message_id(message: Message, message_id: str) -> None:
    """Set a message's id, which is otherwise set by the grid that sends it."""
    message.metadata.__dict__["_message_id"] = message_id


def set_origin(reply: Message, reply_to_message_id: str, src_node_id: int) -> None:
    """Set the id of the message that a reply answers, and the Flower id of the node that sent the reply."""
    reply.metadata.__dict__["_reply_to_message_id"] = reply_to_message_id
    reply.metadata.__dict__["_src_node_id"] = src_node_id


def error_text(reason: str) -> str:
    """Return the exception in an error reply as a traceback ends: its type, and its text.

    Flower's reason is `<class 'TYPE'>:<'TEXT'>`. In a simulation on Ray the text is the traceback of the actor's
    process, with the exception of the app in the middle.
    """
    found = re.fullmatch(r"<class '([^']*)'>:<'(.*)'>", reason, re.DOTALL)
    if found is None:
        return reason
    kind, text = found[1], found[2]
    if kind.startswith("ray.exceptions.RayTaskError"):
        before, _, message = text.partition("Exception ClientAppException occurred. Message: ")
        raised = re.findall(
            r"^([\w.]+): ", before.partition("\n\nThe above exception was the direct cause")[0], re.MULTILINE
        )
        if not message or not raised:
            return reason
        kind, text = raised[-1], message
    return f"{kind.rpartition('.')[2]}: {text}"


def content_as_sent(content: RecordDict) -> bytes:
    """Return the bytes of a message's content as Flower sends them."""
    return bytes(recorddict_to_proto(content).SerializeToString())
