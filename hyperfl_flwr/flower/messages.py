"""What Flower's engines write into messages, for code that does an engine's part.

Wraps `flwr.common.constant.ErrorCode`, `flwr.supercore.task_identity.TaskIdentity` and fields of `flwr.app.Metadata`.
The public `Message` has neither names for the codes of its errors nor a way to set its ids, and cannot be made outside
of Flower's processes.
"""

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["ErrorCode", "identify_process", "set_message_id", "set_origin"]


def identify_process() -> None:
    """Let this process make messages: a `Message` takes its run and sender from what Flower's engines set here."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that the grid which takes it otherwise sets."""
    message.metadata.__dict__["_message_id"] = message_id


def set_origin(reply: Message, reply_to_message_id: str, src_node_id: int) -> None:
    """Set which message a reply answers, and the Flower id of the node that has sent it."""
    reply.metadata.__dict__["_reply_to_message_id"] = reply_to_message_id
    reply.metadata.__dict__["_src_node_id"] = src_node_id
