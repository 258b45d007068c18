"""Flower's client app: a message comes in, the node's clients are built, and the adapter answers.

What the node's owner decides is in `hyperfl_flwr.config.node_config`, what a message finds in `hyperfl_flwr.app.node`.
What comes in and what leaves is written into the ledger in the state folder first, see `hyperfl_flwr.node.ledger_app`.
With `novel-data` the node is a client that was never trained and takes a model on demand, see `clients.novel.node`.
"""

from collections.abc import Callable
from functools import wraps
from logging import ERROR

from flwr.app import Context, Message
from flwr.supercore import log

from clients.engine import adapter
from clients.novel.node import DATA as NOVEL_DATA
from clients.novel.node import NovelNode
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.app.node import NodeApp
from hyperfl_flwr.config.node_config import Owner, is_simulated, state_folder
from hyperfl_flwr.core.errors import RefusalError, for_others
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.node.ledger import Ledger
from hyperfl_flwr.node.ledger_app import Book, RecordedApp
from hyperfl_flwr.protocol.messages import CONFIG, Request, printable
from hyperfl_flwr.protocol.queries import PERSONALIZE, PROBLEM, QUERIES
from hyperfl_flwr.protocol.sizes import content_bytes

Handler = Callable[[Message, Context], Message]

ON_DEMAND = "it-pfl"
"""The method whose models novel clients take."""


def book_of(message: Message, context: Context) -> Book | None:
    """Return how a node's messages are recorded: always where it has an owner, in a simulation on request.

    The handshake of a simulation is left out: its run has no folder yet.
    """
    simulated, folder = is_simulated(context), ""
    if simulated:
        if not context.run_config.get("ledger") or CONFIG not in message.content:
            return None
        folder = Request.of(message.content).run_directory
    # A novel client trains nothing: its descriptor is an it-pfl client's, whatever method the run's settings name.
    name = ON_DEMAND if NOVEL_DATA in context.node_config else str(context.run_config.get("method"))
    return Book(
        method=name,
        ledger=Ledger(state_folder(context.node_config.get("state-dir"), folder, simulated=simulated)),
        private=client_of(name).private if name in METHODS else (),
        send_details=simulated,
    )


app = RecordedApp(book_of)


def novel_node(context: Context) -> NovelNode | None:
    """Return the novel client that the node is; None if it is none."""
    return NovelNode.of(context, simulated=is_simulated(context))


def bounded(handler: Handler) -> Handler:
    """Return a handler that refuses messages larger than the node's owner allows, before their arrays are unpacked."""

    @wraps(handler)
    def handle(message: Message, context: Context) -> Message:
        Owner.of(context.node_config).refuse_large(content_bytes([message.content]))
        return handler(message, context)

    return handle


def _refuse_novel(context: Context) -> None:
    """Refuse to train and to evaluate on a novel client's node, whatever data the run's settings name."""
    if novel_node(context):
        raise RefusalError("this node is a novel client: it takes a model on demand, and does nothing else")


@app.train()
@bounded
def train(message: Message, context: Context) -> Message:
    """Train the sampled clients of this node."""
    _refuse_novel(context)
    request = Request.of(message.content)
    return adapter.train(NodeApp(context).cohort(request), message)


@app.evaluate()
@bounded
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the clients of this node."""
    _refuse_novel(context)
    request = Request.of(message.content)
    return adapter.evaluate(NodeApp(context).cohort(request), message)


@bounded
def answer(message: Message, context: Context) -> Message:
    """Answer a query about the data of clients of this node."""
    if novel := novel_node(context):
        return novel.answer(message)
    request = Request.of(message.content)
    return adapter.answer(NodeApp(context).cohort(request), message)


for query in QUERIES:
    app.query(query.removeprefix("query."))(answer)


@app.query(PERSONALIZE.removeprefix("query."))
@bounded
def personalize(message: Message, context: Context) -> Message:
    """Take the model that was made on demand.

    Raises:
        RefusalError: If the node is no novel client.
    """
    if novel := novel_node(context):
        return novel.answer(message)
    raise RefusalError("this node is no novel client and takes no model on demand")


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Tell the server which clients this node hosts, or why it cannot take part."""
    if novel := novel_node(context):
        return novel.introduce(message)
    try:
        if context.run_config.get("personalize.run"):
            raise RefusalError("the run makes models on demand, and this node's config names no novel-data")
        properties = NodeApp(context).properties()
    except Exception as error:
        number = context.node_config.get("partition-id")
        if type(number) is not int:
            raise
        log(ERROR, "the node cannot take part", exc_info=error)
        reason = f"{type(error).__name__}: {error}" if is_simulated(context) else for_others(error)
        properties = {"partition": number, PROBLEM: printable(reason)}
    return adapter.introduce(message, properties)
