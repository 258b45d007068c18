"""A node's place in a run: its number, and how many nodes the run has; nothing here imports torch.

A run has the nodes with the numbers below its setting `num-nodes`, so that nodes can be added to a deployment without
new files for the others. The setting comes from the server, which is not trusted. It decides which clients a node
hosts, and so which shares of a named data set it trains on, as `num-clients` and `data.*` do; a node with its owner's
data always has exactly one client. What protects a node in secure sums is not the server's to decide: the list of its
peers, or without one the number in the node config. With another number the node refuses secure sums.
"""

from collections.abc import Mapping
from pathlib import Path

from hyperfl_flwr.app.secure import ENABLED
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.protocol.secure_sums.peers import PEERS_FILE, read_peers

SETTING = "num-nodes"
"""The run's setting."""


def absence(node: NodeConfig, run_config: Mapping[str, Scalar]) -> str:
    """Return why a node takes no part in a run; empty if it is one of the run's nodes.

    Args:
        node: The node's config.
        run_config: The run's settings, which need not be valid.
    """
    number, num_nodes = node.partition_id, _given(node, run_config)
    if number is None or num_nodes is None or number < num_nodes:
        return ""
    return f"node {number} takes no part in this run, which has {num_nodes} nodes ({SETTING})"


def place_in(node: NodeConfig, run_config: Mapping[str, Scalar]) -> tuple[int, int]:
    """Return a node's number in a run, and the number P of the run's nodes.

    Args:
        node: The node's config.
        run_config: The run's settings, which are valid.

    Raises:
        ConfigError: If the node config lacks the node's place, or its list of peers cannot be read.
        RefusalError: If the node is not one of the run's, or the run has secure sums of another number of nodes than
            the node's owner knows.
    """
    number, own = node.place
    if reason := absence(node, run_config):
        raise RefusalError(reason)
    num_nodes = _given(node, run_config) or own
    if run_config.get(ENABLED) and not node.simulated:
        _refuse_other_peers(node, num_nodes)
    return number, num_nodes


def _given(node: NodeConfig, run_config: Mapping[str, Scalar]) -> int | None:
    """Return the number of nodes that the run's settings name; None in a simulation, or if they name none."""
    given = run_config.get(SETTING)
    # A bool is an int. A value that is not valid is refused, with all others, when the settings are parsed.
    return None if node.simulated or type(given) is not int or given < 1 else given


def _refuse_other_peers(node: NodeConfig, num_nodes: int) -> None:
    """Refuse secure sums of another number of nodes than the owner knows: the server could have chosen it."""
    if node.peers_file:
        known = sorted(read_peers(Path(node.peers_file)))
        if known != list(range(num_nodes)):
            raise RefusalError(
                f"the run has secure sums of {num_nodes} nodes ({SETTING}), but this node's peers-file has "
                f"{len(known)}; its owner needs the {PEERS_FILE} with exactly the nodes 0 to {num_nodes - 1}, and must "
                f"compare its fingerprint with the other owners"
            )
    elif node.place[1] != num_nodes:
        raise RefusalError(
            f"the run has secure sums of {num_nodes} nodes ({SETTING}), but this node knows of {node.place[1]}, and "
            f"the server cannot change that; its owner must set nodes = {num_nodes} in place.toml, or take a "
            f"{PEERS_FILE} with {num_nodes} nodes as peers-file, and restart the node"
        )
