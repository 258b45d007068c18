"""Flower's client app: handle a message by building the node's clients and passing it to the adapter.

The node config is parsed once for each message (`hyperfl_flwr.config.node_config`) and passed on;
`hyperfl_flwr.app.node` loads the data and builds the clients. Messages are recorded in the ledger in the state folder
before they are handled or sent, see `hyperfl_flwr.node.ledger_app`. A node with `novel-data` is a novel client: it
requests a model on demand and refuses all other messages, see `clients.novel.node`.
"""

from collections.abc import Callable
from logging import ERROR

from flwr.app import Context, Message

from clients.engine import adapter
from clients.novel.node import NovelNode
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.app.node import NodeApp
from hyperfl_flwr.config.node_config import NOVEL_DATA, NodeConfig, is_simulated, state_folder
from hyperfl_flwr.core.errors import RefusalError, for_others
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.node.ledger import Ledger
from hyperfl_flwr.node.ledger_app import LedgerApp, LedgerHandle
from hyperfl_flwr.protocol.messages import CONFIG, Request, printable
from hyperfl_flwr.protocol.queries import PERSONALIZE, PROBLEM, QUERIES
from hyperfl_flwr.protocol.sizes import content_bytes

Handler = Callable[[Message, Context], Message]
Answer = Callable[[Message, Context, NodeConfig], Message]

ON_DEMAND = "it-pfl"
"""Method that creates the models of novel clients."""


def ledger_for(message: Message, context: Context) -> LedgerHandle | None:
    """Return the ledger for a node's message, or None: always for a deployed node, in a simulation with `ledger`.

    The handshake of a simulation is not recorded, because its run has no folder yet. The node config is not parsed
    here, so that errors in it are recorded, too.
    """
    simulated, folder = is_simulated(context), ""
    if simulated:
        if not context.run_config.get("ledger") or CONFIG not in message.content:
            return None
        folder = Request.of(message.content).run_directory
    # A novel client trains nothing: its descriptor is an it-pfl client's, whatever method the run's settings name.
    name = ON_DEMAND if context.node_config.get(NOVEL_DATA) else str(context.run_config.get("method"))
    return LedgerHandle(
        method=name,
        ledger=Ledger(state_folder(context.node_config.get("state-dir"), folder, simulated=simulated)),
        private=client_of(name).private if name in METHODS else (),
        send_details=simulated,
    )


app = LedgerApp(ledger_for)


def on_node(answer: Answer) -> Handler:
    """Return a handler for Flower that parses the node config and refuses messages that the owner does not allow.

    A message that is too large is refused before its arrays are unpacked.
    """

    def handle(message: Message, context: Context) -> Message:
        node = NodeConfig.of_context(context)
        node.refuse_large(content_bytes([message.content]))
        return answer(message, context, node)

    return handle


def _refuse_novel(node: NodeConfig) -> None:
    """Refuse training and evaluation on a novel client's node, so that the server cannot select data on it."""
    if node.novel_data:
        raise RefusalError("this node is a novel client: it only receives a model on demand and does not train")


@app.train()
@on_node
def train(message: Message, context: Context, node: NodeConfig) -> Message:
    """Train the sampled clients of this node."""
    _refuse_novel(node)
    request = Request.of(message.content)
    return adapter.train(NodeApp(node, context.run_config).cohort(request), message)


@app.evaluate()
@on_node
def evaluate(message: Message, context: Context, node: NodeConfig) -> Message:
    """Evaluate the clients of this node."""
    _refuse_novel(node)
    request = Request.of(message.content)
    return adapter.evaluate(NodeApp(node, context.run_config).cohort(request), message)


@on_node
def answer(message: Message, context: Context, node: NodeConfig) -> Message:
    """Answer a query about the data of clients of this node."""
    if novel := NovelNode.of(node):
        return novel.answer(message)
    request = Request.of(message.content)
    return adapter.answer(NodeApp(node, context.run_config).cohort(request), message)


for query in QUERIES:
    app.query(query.removeprefix("query."))(answer)


@app.query(PERSONALIZE.removeprefix("query."))
@on_node
def personalize(message: Message, _: Context, node: NodeConfig) -> Message:
    """Store the model that the server has created on demand.

    Raises:
        RefusalError: If the node is not a novel client.
    """
    if novel := NovelNode.of(node):
        return novel.answer(message)
    raise RefusalError("this node is not a novel client and does not accept a model on demand")


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Answer the handshake with the properties of this node, or with the reason why it cannot take part."""
    try:
        node = NodeConfig.of_context(context)
        if novel := NovelNode.of(node):
            return novel.introduce(message)
        if context.run_config.get("personalize.run"):
            raise RefusalError("the run makes models on demand, but this node's config has no novel-data")
        properties = NodeApp(node, context.run_config).properties()
    except Exception as error:
        number = context.node_config.get("partition-id")
        if type(number) is not int:  # the handshake's answer needs the node's number
            raise
        log(ERROR, "the node cannot take part", exc_info=error)
        # The texts of errors may contain paths or data, which must not leave a deployed node.
        reason = f"{type(error).__name__}: {error}" if is_simulated(context) else for_others(error)
        properties = {"partition": number, PROBLEM: printable(reason)}
    return adapter.introduce(message, properties)
