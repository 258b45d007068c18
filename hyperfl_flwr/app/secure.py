"""Set up a node for secure sums from its owner's config; nothing here imports torch, so that UNMASK is fast."""

from collections.abc import Mapping
from logging import WARNING
from pathlib import Path

from flwr.app import Message, MessageType

from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.core.errors import ConfigError, RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.node.private_state import state_folder
from hyperfl_flwr.node.secure_session import FOLDER, Sessions, SimulatedSessions, StoredSessions
from hyperfl_flwr.node.secure_sums import SecureNode
from hyperfl_flwr.protocol.messages import HELLO
from hyperfl_flwr.protocol.secure_sums.messages import SECURE, UNMASK, session_in
from hyperfl_flwr.protocol.secure_sums.peers import read_identity, read_peers
from hyperfl_flwr.protocol.secure_sums.thresholds import usual_colluding

ENABLED = "secagg.enabled"
"""The run's setting."""

SECURE_SUM_ONLY = "secure-sum-only"
"""The owner's setting."""


def sends_sums_only(node_config: Mapping[str, Scalar], run_config: Mapping[str, Scalar]) -> bool:
    """Return whether nothing but masked sums may leave a node, by the run's setting or its owner's."""
    return bool(run_config.get(ENABLED)) or bool(node_config.get(SECURE_SUM_ONLY))


def refuse_plain(message: Message, node: NodeConfig, run_config: Mapping[str, Scalar]) -> None:
    """Refuse a message that asks for more than a secure sum, if that is all that may leave the node.

    Raises:
        RefusalError: Naming the setting.
    """
    enabled, kind = bool(run_config.get(ENABLED)), message.metadata.message_type
    if node.secure_sum_only and not enabled:
        raise RefusalError(
            f"its owner allows only secure sums ({SECURE_SUM_ONLY} = true); start the run with {ENABLED} = true"
        )
    is_secure = SECURE in message.content
    if kind in (MessageType.TRAIN, MessageType.EVALUATE, HELLO, UNMASK):
        if enabled and not is_secure:
            raise RefusalError(f"the run has {ENABLED} = true, but a message of type {kind} is not for a secure sum")
        if is_secure and not enabled:
            raise RefusalError(f"a message of type {kind} is for a secure sum, but the run has {ENABLED} = false")
    elif enabled:
        raise RefusalError(f"the run has {ENABLED} = true, so a message of type {kind} is not answered")


def sessions_of(node: NodeConfig) -> Sessions:
    """Return a node's keys and memory of secure sums."""
    if node.simulated:
        return SimulatedSessions(partition=node.place[0])
    return StoredSessions(folder=state_folder(node.state_dir, "", simulated=False) / FOLDER)


def secure_node(node: NodeConfig, num_nodes: int) -> SecureNode:
    """Return the node's part in secure sums, with its owner's peers and limits.

    Args:
        node: The node's config.
        num_nodes: Number P of the run's nodes, see `hyperfl_flwr.app.place`.

    Raises:
        ConfigError: If the files of peers and identity cannot be read, or do not fit each other.
    """
    partition, _ = node.place
    peers = read_peers(Path(node.peers_file)) if node.peers_file else {}
    identity = read_identity(Path(node.identity_key_file)) if node.identity_key_file else None
    if peers:
        public = identity.public_key() if identity else None
        if partition not in peers or public is None or peers[partition] != public:
            raise ConfigError(
                f"identity-key-file must be the key of node {partition} in peers-file; set it to node.key of this "
                f"node's folder, or ask the operator for a peers-file with this node's key",
                public="its identity-key-file is not the key of its own row in its peers-file",
            )
    colluding = usual_colluding(len(peers) or num_nodes) if node.max_colluding == "auto" else node.max_colluding
    return SecureNode(
        partition=partition,
        num_nodes=num_nodes,
        sessions=sessions_of(node),
        peers=peers,
        identity=identity,
        min_cohort=node.min_cohort,
        max_colluding=colluding,
        sends_metrics=node.sends_metrics,
    )


def key_properties(message: Message, node: NodeConfig, num_nodes: int) -> dict[str, str]:
    """Return the properties that the session of the handshake asks for; none without a session.

    Args:
        message: The handshake's request.
        node: The node's config.
        num_nodes: Number P of the run's nodes.

    Raises:
        RefusalError: If the session is invalid.
    """
    try:
        session = session_in(message.content)
    except ValueError as error:
        raise RefusalError(str(error)) from None
    if not session:
        return {}
    if not (node.peers_file or node.simulated):
        log(WARNING, "without peers-file, keys come from the server: safe only if it follows the protocol")
    return secure_node(node, num_nodes).key_properties(session)
