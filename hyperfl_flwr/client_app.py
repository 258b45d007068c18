"""Flower's client app: a message comes in, the node's clients are built, and the adapter answers.

The node's owner decides about its machine: `device`, `threads`, `data-root`, `dataset` and `state-dir` in the node
config win over the run's settings, and `mixing-key-file` is its secret. What comes in and what leaves is written into
the ledger in the state folder first, see `hyperfl_flwr.recorded_app`. With `novel-data` the node is a client that was
never trained and takes a model on demand, see `clients.on_demand_node`.
"""

from hyperfl_flwr.packages import APP, refuse_foreign_packages

refuse_foreign_packages(APP)  # before anything else of the project is imported

# ruff: isort: split
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import ConfigRecordValues, Context, Message
from flwr.supercore.utils import get_flwr_home

from clients import adapter
from clients.base import BaseClient
from clients.on_demand_node import NovelNode
from clients.setting import client_setting
from hyperfl_flwr import __version__
from hyperfl_flwr.cohort import OneByOne, clients_of_node
from hyperfl_flwr.config import RunConfig, Scalar
from hyperfl_flwr.data.client_data import FederatedData, load_federated_data
from hyperfl_flwr.device import resolve_device
from hyperfl_flwr.errors import ConfigError, HyperFLError
from hyperfl_flwr.ledger import Ledger
from hyperfl_flwr.messages import CONFIG, Request, printable
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.own import is_factory
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.own_model import source_hash
from hyperfl_flwr.privacy.mixing import read_key, run_key
from hyperfl_flwr.queries import PERSONALIZE, PROBLEM, QUERIES
from hyperfl_flwr.recorded_app import Book, RecordedApp
from hyperfl_flwr.rng import seed_for
from hyperfl_flwr.state import PrivateState

OWNERS_SETTINGS = ("dataset", "data-root", "device", "threads")
"""Settings that a node's owner may set in the node config."""

MIXING_KEY_FILE = "mixing-key-file"
"""Node config: a file whose content all nodes share, and the server does not have."""

KEEP_MODEL = "keep-model"
"""Node config: whether the clients' models stay on the node's disk, for its owner; default: on a SuperNode, yes."""

SIMULATED = "simulated"
"""Node config by which an in-process node says that nobody's own data are at stake."""


def is_simulated(context: Context) -> bool:
    """Say whether nobody's own data are at stake."""
    ray = sys.modules.get("ray")
    return bool(context.node_config.get(SIMULATED)) or (ray is not None and ray.is_initialized())


def state_folder(owners: Scalar | None, run_directory: str, *, simulated: bool) -> Path:
    """Return a node's folder for what stays with it: the owner's `state-dir`, or in a simulation the run's own."""
    if owners:
        return Path(str(owners))
    return Path(run_directory) / "clients" if simulated else Path(get_flwr_home()) / "hyperfl-state"


def book_of(message: Message, context: Context) -> Book | None:
    """Return how a node's messages are recorded: always where it has an owner, in a simulation on request.

    The handshake of a simulation is left out: its run has no folder yet.
    """
    simulated, folder = is_simulated(context), ""
    if simulated:
        if not context.run_config.get("ledger") or CONFIG not in message.content:
            return None
        folder = Request.of(message.content).run_directory
    method = METHODS.get(str(context.run_config.get("method")))
    return Book(
        ledger=Ledger(state_folder(context.node_config.get("state-dir"), folder, simulated=simulated)),
        private=method.client.private if method else (),
        send_details=simulated,
    )


app = RecordedApp(book_of)


def novel_node(context: Context) -> NovelNode | None:
    """Return the novel client that the node is; None if it is none."""
    return NovelNode.of(context, simulated=is_simulated(context))


class NodeApp:
    """What one message finds on its node.

    Args:
        context: Flower's context.
    """

    def __init__(self, context: Context) -> None:
        owner: dict[str, Scalar] = dict(context.node_config)
        settings: dict[str, Scalar] = dict(context.run_config)
        settings |= {key: owner[key] for key in OWNERS_SETTINGS if key in owner}
        self.config = RunConfig.from_flat(settings, methods=METHODS)
        if missing := [key for key in ("partition-id", "num-partitions") if key not in owner]:
            raise ConfigError(
                f"the node config lacks {' and '.join(missing)}; start the SuperNode with "
                f"--node-config 'partition-id=0 num-partitions=2'"
            )
        self.partition, self.num_nodes = int(owner["partition-id"]), int(owner["num-partitions"])
        self.clients = clients_of_node(self.partition, self.num_nodes, self.config.hosted_clients)
        self.simulated = is_simulated(context)
        self.state_directory = owner.get("state-dir")
        self.keeps_model = self._keeps_model(owner.get(KEEP_MODEL, not self.simulated))
        self.mixing_secret = self._mixing_secret(owner.get(MIXING_KEY_FILE))
        self.device = resolve_device(self.config.device)
        if self.config.threads != "auto":
            torch.set_num_threads(self.config.threads)
        elif self.simulated:  # other nodes share the machine
            torch.set_num_threads(1)

    def data(self) -> FederatedData:
        """Return the data of all clients; a process reads them once."""
        return load_federated_data(self.config.data_settings())

    def cohort(self, request: Request) -> adapter.Cohort:
        """Return what trains the clients that the request names.

        Raises:
            ValueError: If this node does not host one of them.
        """
        if foreign := sorted(set(request.clients) - set(self.clients)):
            raise ValueError(f"this node hosts the clients {self.clients}, asked for {foreign}")
        client_class = METHODS[self.config.method].client
        data = self.data()
        states, key = self._states(request), self._mixing_key(request.experiment)

        def make_client(client: int) -> BaseClient:
            state = PrivateState(states, request.experiment, client)
            setting = client_setting(self.config, data, client, self.device, state, key)
            return client_class(replace(setting, round=request.round, keeps_model=self.keeps_model))

        return adapter.Cohort(
            make_client=make_client,
            trainer=OneByOne(make_client),
            reductions=client_class.shared,
            send_details=self.simulated,
        )

    @staticmethod
    def _keeps_model(value: Scalar) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{KEEP_MODEL} in the node config must be true or false, got {value!r}")
        return value

    def _mixing_secret(self, file: Scalar | None) -> bytes:
        """Return the owner's secret for `priv-hfl.mixing`; empty without one.

        Raises:
            ConfigError: If the run mixes, and a node with an owner has no good key file.
        """
        if not self.config.priv_hfl.mixing or (file is None and self.simulated):
            return b""
        if file is None:
            raise ConfigError(
                f"priv-hfl.mixing needs a secret that all nodes share and the server has not: start the SuperNode with "
                f"{MIXING_KEY_FILE}='/path/to/file' in --node-config"
            )
        return read_key(Path(str(file)))

    def _mixing_key(self, experiment: str) -> bytes:
        """Return the run's key: of the owner's secret, or in a simulation of the seed, which hides nothing."""
        if self.mixing_secret:
            return run_key(self.mixing_secret, experiment)
        return seed_for(self.config.seed, "mixing").to_bytes(8, "big")

    def _states(self, request: Request) -> Path:
        """Return the folder of the clients' private state: the owner's, or in a simulation the run's own."""
        folder = state_folder(self.state_directory, request.run_directory, simulated=self.simulated)
        return folder / request.experiment if self.state_directory or not self.simulated else folder

    def properties(self) -> dict[str, ConfigRecordValues]:
        """Return the node's answer to the handshake; label counts only where nobody's own data are at stake."""
        data = self.data()
        properties: dict[str, ConfigRecordValues] = {
            "partition": self.partition,
            "num-nodes": self.num_nodes,
            "clients": self.clients,
            "input-shape": list(data.dataset.input_shape),
            "num-classes": data.dataset.num_classes,
            "num-examples": [len(data.train_indices(client)) for client in self.clients],
            "partitioned-by": data.partition,
            "device": str(self.device),
            "version": __version__,
        }
        if is_factory(self.config.target):
            build_target(self.config.target, data.dataset.input_shape, data.dataset.num_classes)  # or says why not
            properties["model"] = source_hash(self.config.target)
        if self.simulated:
            for split, counts in zip(("train", "test"), data.label_counts(), strict=True):
                properties[f"{split}-label-counts"] = counts[self.clients].flatten().tolist()
            properties["data-reuse"] = json.dumps(data.reuse)
        return properties


def _refuse_novel(context: Context) -> None:
    """Refuse to train and to evaluate on a novel client's node, whatever data the run's settings name."""
    if novel_node(context):
        raise ConfigError("this node is a novel client: it takes a model on demand, and does nothing else")


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the sampled clients of this node."""
    _refuse_novel(context)
    request = Request.of(message.content)
    return adapter.train(NodeApp(context).cohort(request), message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the clients of this node."""
    _refuse_novel(context)
    request = Request.of(message.content)
    return adapter.evaluate(NodeApp(context).cohort(request), message)


def answer(message: Message, context: Context) -> Message:
    """Answer a query about the data of clients of this node."""
    if novel := novel_node(context):
        return novel.answer(message)
    request = Request.of(message.content)
    return adapter.answer(NodeApp(context).cohort(request), message)


for query in QUERIES:
    app.query(query.removeprefix("query."))(answer)


@app.query(PERSONALIZE.removeprefix("query."))
def personalize(message: Message, context: Context) -> Message:
    """Take the model that was made on demand.

    Raises:
        ConfigError: If the node is no novel client.
    """
    if novel := novel_node(context):
        return novel.answer(message)
    raise ConfigError("this node is no novel client and takes no model on demand")


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Tell the server which clients this node hosts, or why it cannot take part."""
    if novel := novel_node(context):
        return novel.introduce(message)
    try:
        if context.run_config.get("personalize.run"):
            raise ConfigError("the run makes models on demand, and this node's config names no novel-data")
        properties = NodeApp(context).properties()
    except HyperFLError as error:
        if (number := context.node_config.get("partition-id")) is None:
            raise
        properties = {"partition": int(number), PROBLEM: printable(f"{type(error).__name__}: {error}")}
    return adapter.introduce(message, properties)
