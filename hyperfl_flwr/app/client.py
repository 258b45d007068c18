"""Flower's client app: a message comes in, the node's clients are built, and the adapter answers.

The node config is parsed once for each message (`hyperfl_flwr.config.node_config`) and passed on;
`hyperfl_flwr.app.node` builds what the message needs. What comes in and what leaves is written into the ledger in the
state folder first, see `hyperfl_flwr.node.ledger_app`. A node with `novel-data` is a novel client: it takes a model on
demand and does nothing else, see `clients.novel.node`.
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
from hyperfl_flwr.node.ledger_app import Book, RecordedApp
from hyperfl_flwr.protocol.messages import CONFIG, Request, printable
from hyperfl_flwr.protocol.queries import PERSONALIZE, PROBLEM, QUERIES
from hyperfl_flwr.protocol.sizes import content_bytes

Handler = Callable[[Message, Context], Message]
Answer = Callable[[Message, Context, NodeConfig], Message]

ON_DEMAND = "it-pfl"
"""The method whose models novel clients take."""


def book_of(message: Message, context: Context) -> Book | None:
    """Return how a node's messages are recorded: always where it has an owner, in a simulation on request.

    The handshake of a simulation is left out: its run has no folder yet. The node config is not parsed here, since
    errors in it are recorded, too.
    """
    simulated, folder = is_simulated(context), ""
    if simulated:
        if not context.run_config.get("ledger") or CONFIG not in message.content:
            return None
        folder = Request.of(message.content).run_directory
    # A novel client trains nothing: its descriptor is an it-pfl client's, whatever method the run's settings name.
    name = ON_DEMAND if context.node_config.get(NOVEL_DATA) else str(context.run_config.get("method"))
    return Book(
        method=name,
        ledger=Ledger(state_folder(context.node_config.get("state-dir"), folder, simulated=simulated)),
        private=client_of(name).private if name in METHODS else (),
        send_details=simulated,
    )


app = RecordedApp(book_of)


def on_node(answer: Answer) -> Handler:
    """Return a handler for Flower: it parses the node config, and refuses what the owner does not allow.

    A message that is too large is refused before its arrays are unpacked.
    """

    def handle(message: Message, context: Context) -> Message:
        node = NodeConfig.of_context(context)
        node.refuse_large(content_bytes([message.content]))
        return answer(message, context, node)

    return handle


def _refuse_novel(node: NodeConfig) -> None:
    """Refuse to train and to evaluate on a novel client's node, whatever data the run's settings name."""
    if node.novel_data:
        raise RefusalError("this node is a novel client: it takes a model on demand, and does nothing else")


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
    """Take the model that was made on demand.

    Raises:
        RefusalError: If the node is no novel client.
    """
    if novel := NovelNode.of(node):
        return novel.answer(message)
    raise RefusalError("this node is no novel client and takes no model on demand")


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Tell the server which clients this node hosts, or why it cannot take part."""
    try:
        node = NodeConfig.of_context(context)
        if novel := NovelNode.of(node):
            return novel.introduce(message)
        if context.run_config.get("personalize.run"):
            raise RefusalError("the run makes models on demand, and this node's config names no novel-data")
        properties = NodeApp(node, context.run_config).properties()
    except Exception as error:
        number = context.node_config.get("partition-id")
        if type(number) is not int:
            raise
        log(ERROR, "the node cannot take part", exc_info=error)
        reason = f"{type(error).__name__}: {error}" if is_simulated(context) else for_others(error)
        properties = {"partition": number, PROBLEM: printable(reason)}
    return adapter.introduce(message, properties)
