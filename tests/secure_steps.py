"""Secure steps: nodes with folders and identities, and an honest server's messages, of which tests change parts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import RecordDict

from hyperfl_flwr.node.secure_session import StoredSessions
from hyperfl_flwr.node.secure_sums import SecureNode, SecureTerms, release_shares
from hyperfl_flwr.protocol.hosting import clients_of_node
from hyperfl_flwr.protocol.messages import ARRAYS, CONFIG, Reduction, Request
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.secure_sums.header import Header, NodeRow, arrays_digest
from hyperfl_flwr.protocol.secure_sums.masks import Step, Upload
from hyperfl_flwr.protocol.secure_sums.messages import KEY, SECURE, SIGNATURE, UnmaskRequest, header_record
from hyperfl_flwr.protocol.secure_sums.numbers import NumbersEncoding

SESSION, EXPERIMENT = "5e" * 16, "e" * 16
SETTINGS = "5" * 64
RECEIVED = {"model/a": np.array([0.5, -1.0], np.float32), "model/b": np.array([[2.0]], np.float32)}
METRICS = ("accuracy", "loss")
NUM_CLIENTS = 10
TERMS = SecureTerms(
    settings=SETTINGS,
    num_clients=NUM_CLIENTS,
    reductions={"model": Reduction.MEAN},
    range=10.0,
    max_examples=1000,
    max_update_ratio=0.0,
    metric_names=lambda phase, number: METRICS,
)
"""What the settings of all nodes say."""

IDENTITIES = [ec.generate_private_key(ec.SECP384R1()) for _ in range(7)]


def nodes_in(folder: Path, num_nodes: int, **changes: Any) -> list[SecureNode]:
    """Return deployed nodes with pinned peers; `changes` replace attributes of all of them."""
    peers = {number: IDENTITIES[number].public_key() for number in range(num_nodes)}
    return [
        SecureNode(
            **{
                "partition": number,
                "num_nodes": num_nodes,
                "sessions": StoredSessions(folder=folder / f"node-{number}" / "secagg"),
                "peers": peers,
                "identity": IDENTITIES[number],
                "min_cohort": 3,
                "max_colluding": 0,
                **changes,
            }
        )
        for number in range(num_nodes)
    ]


def rows_of(nodes: Sequence[SecureNode], session: str = SESSION) -> tuple[NodeRow, ...]:
    """Ask nodes for their keys, and return their rows: all of their clients, from version 0."""
    rows = []
    for node in nodes:
        properties = node.key_properties(session)
        clients = tuple(clients_of_node(node.partition, node.num_nodes, NUM_CLIENTS))
        rows.append(
            NodeRow(
                partition=node.partition,
                key=properties[KEY],
                signature=properties[SIGNATURE],
                clients=clients,
                versions=(0,) * len(clients),
            )
        )
    return tuple(rows)


def header_for(nodes: Sequence[SecureNode], /, **changes: Any) -> Header:
    """Return the header of a training step of all nodes, of which `changes` replace fields."""
    header = Header(
        session=SESSION,
        experiment=EXPERIMENT,
        round=1,
        phase="train",
        nodes=rows_of(nodes),
        threshold=len(nodes),
        max_examples=TERMS.max_examples,
        metrics=METRICS,
        squares=False,
        settings=SETTINGS,
        arrays=arrays_digest(RECEIVED),
    )
    return replace(header, **changes)


def request_for(header: Header, node: SecureNode, **changes: Any) -> Request:
    """Return the request to one node of a step; to a node without a row, as if it were node 0."""
    row = header.row(node.partition) or header.nodes[0]
    request = Request(
        round=header.round,
        experiment=header.experiment,
        run_directory="",
        clients=list(row.clients),
        versions=list(row.versions),
        kept_versions=list(row.versions),
    )
    return replace(request, **changes)


def content_for(header: Header | bytes, request: Request) -> RecordDict:
    """Return the content of a TRAIN or EVALUATE message."""
    data = header if isinstance(header, bytes) else header.to_bytes()
    return RecordDict({ARRAYS: pack_arrays(RECEIVED), CONFIG: request.to_record(), SECURE: header_record(data)})


def accept(node: SecureNode, header: Header) -> Step:
    """Ask a node to take part in a step, as an honest server does."""
    request = request_for(header, node)
    step, _ = node.accept(content_for(header, request), header.phase, request, RECEIVED, TERMS)
    return step


def uploaded(node: SecureNode, header: Header, vector: Sequence[int] = (1, 2, 3)) -> Upload:
    """Return a node's upload of a vector [3], and of the numbers of one client."""
    encoding = NumbersEncoding(metrics=header.metrics, num_clients=header.num_clients, squares=header.squares)
    numbers = encoding.encode([{"accuracy": 0.5, "loss": 1.0}], num_examples=20, saturated=0)
    return node.mask(accept(node, header), np.array(vector, np.uint32), numbers)


def question_for(header: Header, node: SecureNode, uploads: Mapping[int, Upload], /, **changes: Any) -> RecordDict:
    """Return the content of an UNMASK message to a node."""
    question = UnmaskRequest(
        header=header.to_bytes(),
        uploads={number: upload.id for number, upload in uploads.items()},
        boxes={number: upload.boxes[node.partition] for number, upload in uploads.items()},
    )
    record = replace(question, **changes).to_record()
    return RecordDict({CONFIG: request_for(header, node).to_record(), SECURE: record})


def released(node: SecureNode, content: RecordDict) -> RecordDict:
    """Return a node's answer to an UNMASK message."""
    return release_shares(node.sessions, node.partition, content)


def changed_row(header: Header, partition: int, **changes: Any) -> Header:
    """Return a header with another row of one node."""
    rows = tuple(replace(row, **changes) if row.partition == partition else row for row in header.nodes)
    return replace(header, nodes=rows)
