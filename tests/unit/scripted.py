"""A grid whose nodes give the answers that a test lists."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from hyperfl_flwr.protocol.hosting import clients_of_node
from hyperfl_flwr.protocol.messages import PROPERTIES
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid

A, B, C = FIRST_NODE_ID, FIRST_NODE_ID + 1, FIRST_NODE_ID + 2
Answer = Callable[[Message], Message | None]


def handshake_reply(partition: int, num_nodes: int, num_clients: int, **changes: Any) -> RecordDict:
    """Return a node's answer to the handshake; a change to None leaves a property out."""
    clients = clients_of_node(partition, num_nodes, num_clients)
    properties = {
        "partition": partition,
        "num-nodes": num_nodes,
        "clients": clients,
        "num-examples": [100] * len(clients),
        "input-shape": [1, 8, 8],
        "num-classes": 10,
        "partitioned-by": "iid",
        "owners-data": False,
        "device": "cpu",
        **{key.replace("_", "-"): value for key, value in changes.items()},
    }
    told = {key: value for key, value in properties.items() if value is not None}
    return RecordDict({PROPERTIES: ConfigRecord(told)})


class ScriptedGrid(InProcessGrid):
    """Takes the answers of each node from a list, and repeats the last one of the list."""

    def __init__(
        self, answers: dict[int, Sequence[Answer]], arrivals: Sequence[int] | None = None, *, simulated: bool = False
    ) -> None:
        super().__init__(ClientApp(), len(answers), {}, {"simulated": simulated})
        self.script = {node: list(each) for node, each in answers.items()}
        self.present = [*answers] if arrivals is None else []
        self.arrivals = list(arrivals or ())
        self.asked: list[int] = []

    def get_node_ids(self) -> Sequence[int]:
        if self.arrivals:
            self.present.append(self.arrivals.pop(0))
        return self.present

    def answer(self, message: Message) -> Any:
        node = message.metadata.dst_node_id
        self.asked.append(node)
        answers = self.script[node]
        return (answers.pop(0) if len(answers) > 1 else answers[0])(message)

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        return [reply for reply in super().pull_messages(message_ids) if reply is not None]


def says(content: RecordDict) -> Answer:
    return lambda message: Message(content, reply_to=message)


def fails(code: int, reason: str = "out of memory") -> Answer:
    return lambda message: Message(Error(code=code, reason=reason), reply_to=message)


def is_silent(message: Message) -> None:
    return None


def from_the_superlink(code: int) -> Answer:
    """Return the error of a SuperLink, which names the message but comes from the SuperLink's node id, 1."""

    def answer(message: Message) -> Message:
        reply = Message(Error(code=code, reason="gone"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    return answer


def nodes_of(num_nodes: int, num_clients: int, **changes: Any) -> dict[int, Sequence[Answer]]:
    return {
        FIRST_NODE_ID + number: [says(handshake_reply(number, num_nodes, num_clients, **changes))]
        for number in range(num_nodes)
    }
