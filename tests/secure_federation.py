"""Deployed nodes behind the real client app, and an honest server's side of secure steps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from clients.engine.base import BaseClient
from clients.engine.context import client_setting
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import ARRAYS, CONFIG, HELLO, PROPERTIES, Request, record_of
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.secure_sums.encoding import Encoding
from hyperfl_flwr.protocol.secure_sums.header import (
    Header,
    NodeRow,
    Phase,
    arrays_digest,
    settings_digest,
    transcript_of,
)
from hyperfl_flwr.protocol.secure_sums.masks import Opening, Step
from hyperfl_flwr.protocol.secure_sums.messages import (
    KEY,
    SECURE,
    SIGNATURE,
    UNMASK,
    SecureReply,
    UnmaskRequest,
    handshake_request,
    header_record,
    release_of,
)
from hyperfl_flwr.protocol.secure_sums.numbers import NumbersEncoding, Tally
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid

SESSION, EXPERIMENT = "5e" * 16, "e" * 16


class SecureFederation(InProcessGrid):
    """Nodes with owners and separate state folders.

    Attributes:
        config: The run's settings.
        folders: The nodes' state folders.
        initial: The shared arrays of the first round.
    """

    def __init__(self, settings: Settings, folder: Path, num_nodes: int = 3, **node: Scalar) -> None:
        settings = {**settings, "secagg.enabled": True, "secagg.max-examples": 1000}
        super().__init__(app, num_nodes, settings, {"min-cohort": 2} | node)
        self.settings = settings
        self.num_nodes = num_nodes
        self.config = resolved(RunConfig.from_flat(settings))
        self.folders = [folder / f"node-{number}" for number in range(num_nodes)]
        for number, state in enumerate(self.folders):
            self.context(number).node_config["state-dir"] = str(state)
        self._data = load_federated_data(self.config.data_settings())
        member = self.member(0, folder)
        self.initial: SharedArrays = {}
        for group in member.exchanged_groups():
            values = initial_state(member.groups[group], torch_generator(self.config.seed, group))
            self.initial |= {f"{group}/{name}": value.numpy() for name, value in values.items()}

    def context(self, partition: int) -> Context:
        """Return the context of a node."""
        return self._contexts[FIRST_NODE_ID + partition]

    def member(self, client: int, folder: Path) -> BaseClient:
        """Return a client outside of any node, with the same data and settings."""
        state = PrivateState(folder / "outside", EXPERIMENT, client)
        setting = client_setting(self.config, self._data, client, torch.device("cpu"), state)
        return client_of(self.config.method)(replace(setting, round=1))

    def ask(self, partition: int, kind: str, content: RecordDict) -> Message:
        """Send a message to a node and return its reply."""
        return self.answer(Message(content, dst_node_id=FIRST_NODE_ID + partition, message_type=kind))

    def handshake(self, partition: int, session: str = SESSION) -> Mapping[str, Any]:
        """Return the properties of a node."""
        content = handshake_request(session)
        return dict(record_of(self.ask(partition, HELLO, content).content, PROPERTIES, ConfigRecord))

    def header(self, phase: Phase = "train", versions: Mapping[int, int] | None = None, **changes: Any) -> Header:
        """Ask all nodes for the handshake; return the header of a step of all clients, from versions 0 unless given."""
        rows = []
        for number in range(self.num_nodes):
            properties = self.handshake(number)
            clients = tuple(properties["clients"])
            begun = tuple((versions or {}).get(client, 0) for client in clients)
            row = NodeRow(
                partition=number,
                key=properties[KEY],
                signature=properties[SIGNATURE],
                clients=clients,
                versions=begun,
            )
            rows.append(row)
        header = Header(
            session=SESSION,
            experiment=EXPERIMENT,
            round=1,
            phase=phase,
            nodes=tuple(rows),
            threshold=2,
            max_examples=self.config.secagg.max_examples_of(()),
            metrics=client_of(self.config.method).metric_names(self.config, phase, 1),
            squares=False,
            settings=settings_digest(RunConfig.from_flat(self.settings).flat()),
            arrays=arrays_digest(self.initial),
        )
        return replace(header, **changes)

    def request(self, header: Header, partition: int) -> Request:
        """Return the request to a node."""
        row = header.row(partition)
        assert row is not None
        return Request(
            round=header.round,
            experiment=header.experiment,
            run_directory="",
            clients=list(row.clients),
            versions=list(row.versions),
            kept_versions=list(row.versions),
        )

    def content(self, header: Header, partition: int) -> RecordDict:
        """Return the content of a TRAIN or EVALUATE message."""
        records = {ARRAYS: pack_arrays(self.initial), CONFIG: self.request(header, partition).to_record()}
        return RecordDict({**records, SECURE: header_record(header.to_bytes())})

    def replies(self, header: Header, partitions: Sequence[int]) -> dict[int, SecureReply]:
        """Return the replies of nodes to a step."""
        found = {number: self.ask(number, header.phase, self.content(header, number)) for number in partitions}
        return {number: SecureReply.of(reply.content) for number, reply in found.items()}

    def encoding(self, header: Header) -> Encoding:
        """Return the encoding of a step."""
        return Encoding(
            received=self.initial,
            reductions=client_of(self.config.method).reductions(self.config),
            num_clients=header.num_clients,
            max_examples=header.max_examples,
            range=self.config.secagg.range,
        )

    def question(self, header: Header, replies: Mapping[int, SecureReply], partition: int) -> RecordDict:
        """Return the content of an UNMASK message about the nodes that have uploaded."""
        uploads = {number: reply.upload for number, reply in replies.items() if reply.upload}
        question = UnmaskRequest(
            header=header.to_bytes(),
            uploads={number: upload.id for number, upload in uploads.items()},
            boxes={number: upload.boxes[partition] for number, upload in uploads.items()},
        )
        return RecordDict({CONFIG: self.request(header, partition).to_record(), SECURE: question.to_record()})

    def open(
        self, header: Header, replies: Mapping[int, SecureReply], asked: Sequence[int]
    ) -> tuple[NDArray[np.uint32], Tally]:
        """Ask nodes for shares, and return the opened sums."""
        size = self.encoding(header).size if header.phase == "train" else 0
        numbers = NumbersEncoding(metrics=header.metrics, num_clients=header.num_clients, squares=header.squares)
        step = Step(header=header, transcript=transcript_of(header.to_bytes()))
        opening = Opening(step=step, size=size, num_numbers=numbers.size)
        for number, reply in replies.items():
            if reply.upload:
                opening.add(number, reply.upload)
        answers = {}
        for number in asked:
            content = self.question(header, replies, number)
            answers[number] = release_of(self.ask(number, UNMASK, content).content, UnmaskRequest.of(content).digest)
            opening.check_release(answers[number])
        vector, found = opening.open(answers)
        return vector, numbers.decode(found)
