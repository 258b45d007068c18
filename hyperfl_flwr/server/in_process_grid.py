"""Grid that runs every node's client app in the calling process, for tests and for machines without Ray.

It replaces only Flower's engines. Messages, client apps and strategies are the same as in other runs.
"""

from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.flower.grid import NodeInfo, Run
from hyperfl_flwr.flower.messages import ErrorCode, identify_process, set_message_id

FIRST_NODE_ID = 1000


class InProcessGrid(Grid):
    """Run the nodes of a federation one after another.

    Args:
        app: The client app.
        num_nodes: Number of nodes P.
        run_config: The run's settings, as Flower passes them to apps.
        node_config: Additional node config, the same for every node.

    Attributes:
        simulated: True if the nodes belong to a simulation (`simulated` in the node config).
    """

    def __init__(
        self,
        app: ClientApp,
        num_nodes: int,
        run_config: Mapping[str, Scalar],
        node_config: Mapping[str, Scalar] | None = None,
    ) -> None:
        self._app = app
        self.simulated = bool((node_config or {}).get("simulated"))
        self._contexts = {
            FIRST_NODE_ID + partition: Context(
                run_id=1,
                node_id=FIRST_NODE_ID + partition,
                node_config={"partition-id": partition, "num-partitions": num_nodes, **(node_config or {})},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for partition in range(num_nodes)
        }
        identify_process()
        self._sent = 0
        self._waiting: dict[str, Message] = {}

    def get_node_ids(self) -> Sequence[int]:
        """Return Flower's ids of the nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        """Accept messages and return their ids."""
        ids = []
        for message in messages:
            self._sent += 1
            set_message_id(message, f"message-{self._sent}")
            ids.append(message.metadata.message_id)
            self._waiting[message.metadata.message_id] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        """Run the receivers of these messages, once per message, and return their replies."""
        return [self.answer(self._waiting.pop(name)) for name in message_ids if name in self._waiting]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Sequence[Message]:
        """Run the receivers and return their replies; `timeout` has no effect."""
        return self.pull_messages(self.push_messages(messages))

    def answer(self, message: Message) -> Message:
        """Run the receiver of one message; an exception becomes an error reply, as in Flower's engines."""
        try:
            return self._app(message=message, context=self._contexts[message.metadata.dst_node_id])
        except Exception as error:  # noqa: BLE001 - whatever a client app raises
            reason = f"{type(error)}:<'{error}'>"
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes; all are connected, and none has ever restarted."""
        return [NodeInfo(node_id=node) for node in self.get_node_ids()]

    def set_run(self, run: Run) -> None:
        """Raise NotImplementedError, since there is no Flower run."""
        raise NotImplementedError("an in-process grid has no Flower run")

    @property
    def run(self) -> Run:
        """Raise NotImplementedError, since there is no Flower run."""
        raise NotImplementedError("an in-process grid has no Flower run")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Raise NotImplementedError; the method is deprecated in Flower."""
        raise NotImplementedError("create_message is not supported; create a flwr.app.Message instead")
