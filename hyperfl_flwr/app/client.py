"""Flower's client app: handle a message by building the node's clients and passing it to the adapter.

The node config is parsed once for each message (`hyperfl_flwr.config.node_config`) and passed on;
`hyperfl_flwr.app.node` loads the data and builds the clients. Messages are recorded in the ledger in the state folder
before they are handled or sent, see `hyperfl_flwr.node.ledger_app`. A node with `novel-data` is a novel client: it
requests a model on demand and refuses all other messages, see `clients.novel.node`.

With secure sums, every round has a message UNMASK, and a deployment starts a process for each message. So this module
imports torch, directly or not, only in the functions that need it.
"""

import time
from collections.abc import Callable, Sequence
from logging import ERROR, INFO, WARNING
from typing import TYPE_CHECKING

from flwr.app import Context, Message

from hyperfl_flwr.app.place import absence
from hyperfl_flwr.app.secure import key_properties, refuse_plain, sends_sums_only, sessions_of
from hyperfl_flwr.config.node_config import JOIN_DATA, NOVEL_DATA, NodeConfig, is_simulated
from hyperfl_flwr.core.errors import ConfigError, RefusalError, for_others
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.flower.ray_start import prepare_ray
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.node.ledger import Ledger
from hyperfl_flwr.node.ledger_app import LedgerApp, LedgerHandle, finding_recorder
from hyperfl_flwr.node.private_state import state_folder
from hyperfl_flwr.node.secure_sums import release_shares
from hyperfl_flwr.protocol.in_step import wait_for_the_other
from hyperfl_flwr.protocol.messages import CONFIG, Request, printable
from hyperfl_flwr.protocol.queries import JOIN, PERSONALIZE, PROBLEM, QUERIES
from hyperfl_flwr.protocol.secure_sums.messages import UNMASK
from hyperfl_flwr.protocol.sizes import content_bytes

if TYPE_CHECKING:
    from clients.engine.adapter import Cohort
    from hyperfl_flwr.app.node import NodeApp

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
    on_demand = any(context.node_config.get(key) for key in (NOVEL_DATA, JOIN_DATA))
    name = ON_DEMAND if on_demand else str(context.run_config.get("method"))
    return LedgerHandle(
        method=name,
        ledger=Ledger(state_folder(context.node_config.get("state-dir"), folder, simulated=simulated)),
        private=_private_groups(name, message),
        send_details=simulated,
        sums_only=sends_sums_only(context.node_config, context.run_config),
    )


def _private_groups(method: str, message: Message) -> Sequence[str] | None:
    """Return the groups that must not leave the node; none for UNMASK, of which the reply must not have any arrays.

    They are not known of a method of the user's own that cannot be imported: the node then refuses the message.
    """
    if message.metadata.message_type == UNMASK or method not in METHODS:
        return ()
    from hyperfl_flwr.app.methods import client_of

    try:
        return client_of(method).private
    except ConfigError:
        return None


prepare_ray()  # Flower's simulation imports this module before it starts Ray
app = LedgerApp(ledger_for)


def on_node(answer: Answer) -> Handler:
    """Return a handler for Flower that parses the node config and refuses messages that the owner does not allow.

    A message that is too large is refused; the ledger names its arrays all the same. If only secure sums may leave the
    node, other messages are refused.
    """

    def handle(message: Message, context: Context) -> Message:
        node = NodeConfig.of_context(context)
        node.refuse_large(content_bytes([message.content]))
        refuse_plain(message, node, context.run_config)
        return answer(message, context, node)

    return handle


@app.train()
@on_node
def train(message: Message, context: Context, node: NodeConfig) -> Message:
    """Train the sampled clients of this node."""
    from clients.engine import adapter

    return _with_line(adapter.train, message, context, node)


@app.evaluate()
@on_node
def evaluate(message: Message, context: Context, node: NodeConfig) -> Message:
    """Evaluate the clients of this node."""
    from clients.engine import adapter

    return _with_line(adapter.evaluate, message, context, node)


def _with_line(
    work: Callable[["Cohort", Message], Message], message: Message, context: Context, node: NodeConfig
) -> Message:
    """Train or evaluate; on a deployed node, a line in its log says how the round went."""
    from hyperfl_flwr.app.round_line import round_line

    began, found = time.perf_counter(), _node_app(context, node)
    request = Request.of(message.content)
    reply = work(_cohort(found, message, context), message)
    if not found.simulated:
        try:
            log(INFO, "%s", round_line(found.states(request), message, reply, time.perf_counter() - began))
        except Exception as error:  # noqa: BLE001 - a line of the log must not decide about the reply
            log(WARNING, "round %d: its summary line could not be written", request.round, exc_info=error)
    return reply


def _cohort(found: "NodeApp", message: Message, context: Context) -> "Cohort":
    """Return the clients that a message is for; what the owner's checks find in it is recorded in the ledger."""
    note = finding_recorder(ledger_for(message, context), message, context)
    return found.cohort(Request.of(message.content), note)


def _node_app(context: Context, node: NodeConfig) -> "NodeApp":
    """Return the node as it is in a run.

    Raises:
        RefusalError: If the node is a novel client, so that the server cannot select data on it.
    """
    from hyperfl_flwr.app.node import NodeApp

    if node.novel_data or node.join_data:
        raise RefusalError("this node is a novel client: it only receives a model on demand and does not train")
    return NodeApp(node, context.run_config)


@app.query(UNMASK.removeprefix("query."))
@on_node
def unmask(message: Message, _: Context, node: NodeConfig) -> Message:
    """Release this node's shares of a step, with which the server opens the sum."""
    return Message(release_shares(sessions_of(node), node.place[0], message.content), reply_to=message)


@on_node
def answer(message: Message, context: Context, node: NodeConfig) -> Message:
    """Answer a query about the data of clients of this node."""
    from clients.engine import adapter
    from clients.novel.node import NovelNode

    if novel := NovelNode.of(node):
        return novel.answer(message)
    return adapter.answer(_cohort(_node_app(context, node), message, context), message)


for query in QUERIES:
    app.query(query.removeprefix("query."))(answer)


@app.query(PERSONALIZE.removeprefix("query."))
@on_node
def personalize(message: Message, _: Context, node: NodeConfig) -> Message:
    """Store the model that the server has created on demand.

    Raises:
        RefusalError: If the node is not a novel client.
    """
    from clients.novel.node import NovelNode

    if novel := NovelNode.of(node):
        return novel.answer(message)
    raise RefusalError("this node is not a novel client and does not accept a model on demand")


@app.query(JOIN.removeprefix("query."))
@on_node
def join(message: Message, context: Context, node: NodeConfig) -> Message:
    """Train the model that the server has generated for a client that joins a finished run.

    Raises:
        RefusalError: If the node does not join a run.
    """
    from clients.engine.node_checks import checks_of
    from clients.novel.joining import JoiningNode

    if joining := JoiningNode.of(node):
        note = finding_recorder(ledger_for(message, context), message, context)
        return joining.answer(message, checks_of(node, note))
    raise RefusalError("this node does not join a finished run; its owner must set join-data in the node config")


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Answer the handshake with the properties of this node, or with the reason why it cannot take part."""
    from clients.engine import adapter
    from clients.novel.joining import JoiningNode
    from clients.novel.node import NovelNode
    from hyperfl_flwr.app.node import NodeApp

    try:
        node = NodeConfig.of_context(context)
        if reason := absence(node, context.run_config):  # before anything is read or made for the run
            log(INFO, "%s", reason)
            wait_for_the_other(message.content)
            return adapter.handshake_reply(message, {"partition": node.place[0], PROBLEM: reason})
        refuse_plain(message, node, context.run_config)
        if special := NovelNode.of(node) or JoiningNode.of(node):
            reply = special.handshake_reply(message)
            wait_for_the_other(message.content)
            return reply
        if context.run_config.get("personalize.run"):
            raise RefusalError(
                "the run serves new clients, but this node's config has neither novel-data nor join-data"
            )
        found = NodeApp(node, context.run_config)
        properties = found.properties() | key_properties(message, node, found.num_nodes)
    except Exception as error:
        number = context.node_config.get("partition-id")
        if type(number) is not int:  # the handshake's answer needs the node's number
            raise
        log(ERROR, "the node cannot take part", exc_info=error)
        # The texts of errors may contain paths or data, which must not leave a deployed node.
        reason = f"{type(error).__name__}: {error}" if is_simulated(context) else for_others(error)
        properties = {"partition": number, PROBLEM: printable(reason)}
    wait_for_the_other(message.content)
    return adapter.handshake_reply(message, properties)
