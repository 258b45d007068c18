"""The privacy budget of a node's clients, from the settings of its owner and of the run."""

from collections.abc import Sequence
from pathlib import Path

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import DataError, RefusalError
from hyperfl_flwr.data.sample_format import is_local_data, is_same_data
from hyperfl_flwr.privacy.budget import FILE, NEEDS_BOUND, PrivacyBudget

NEEDS_PEERS = (
    "the owner of this node has set max-epsilon, but no peers-file, so the server could invent the other nodes that "
    "add noise to a secure sum; privacy.noise = sum needs peers-file and identity-key-file in the node config, or take "
    "privacy.noise = local"
)
"""Reason of the refusal of noise in a sum with nodes that the owner does not know; for the server, too."""

NOVEL_ANSWERS = (
    "the owner of this node has set max-epsilon, but the node would host a novel client, whose answers to the server's "
    "queries have no noise; set novel.clients = 0, or start the node with novel-data and novel-epsilon"
)
"""Reason of the refusal of a run of which the node hosts a novel client; for the server, too."""


def budget_of(node: NodeConfig, folder: Path, experiment: str, client: int) -> PrivacyBudget:
    """Return the record of one client in one run.

    Args:
        node: The node's config.
        folder: The node's state folder.
        experiment: Id of the run.
        client: The client's id.
    """
    return PrivacyBudget(
        path=folder / FILE,
        experiment=experiment,
        client=client,
        max_epsilon=node.max_epsilon,
        delta=node.max_epsilon_delta,
        knows_nodes=_knows_nodes(node),
        is_only_client=node.has_one_client,
    )


def refuse_own_as_public(config: RunConfig, *, simulated: bool) -> None:
    """Refuse public samples that may be the owner's: a model's answers on a record reveal it, whatever the noise.

    The server names the public samples. A deployed node takes no file or folder of its machine for them.

    Args:
        config: The run's settings, with the owner's data set.
        simulated: Whether the node is simulated.

    Raises:
        RefusalError: If the public samples are the clients' data set, or local files of a deployed node.
    """
    name = client_of(config.method).public_data(config)
    if not name:
        return
    data_root = Path(config.data_root) if config.data_root else None
    try:
        is_own = (is_local_data(name) and not simulated) or is_same_data(name, config.dataset, data_root)
    except DataError as error:
        raise RefusalError(str(error)) from None
    if is_own:
        raise RefusalError(
            f"the public samples of this run, {name}, are files of this node or its own data set, and what models "
            f"compute on them would be sent; take noise, or the name of another data set"
        )


def refuse_unbounded(node: NodeConfig, config: RunConfig, clients: Sequence[int]) -> None:
    """Refuse a run whose uploads nothing on the node bounds, if its owner has set a privacy budget.

    Each upload is checked again when it is recorded. This check is for the handshake, before anything is computed.

    Args:
        node: The node's config.
        config: The run's settings.
        clients: Ids of the clients that the node hosts; novel ones are not trained, but answer queries.

    Raises:
        RefusalError: If the owner has set `max-epsilon` and the run is not bounded.
    """
    if node.max_epsilon is None:
        return
    if any(client >= config.num_clients for client in clients):
        raise RefusalError(NOVEL_ANSWERS)
    client_class = client_of(config.method)
    if not client_class.shared:
        return
    if config.weight_epsilon:
        return
    has_plain_heads = bool(client_class.heads) and config.dp.heads == "published"
    for_records = config.dp.epsilon > 0 and client_class.has_noisy_steps and not has_plain_heads
    noise = config.privacy
    if noise.protects_clients and noise.noise == "sum" and not _knows_nodes(node):
        raise RefusalError(NEEDS_PEERS)
    if for_records or (noise.protects_clients and noise.noise_multiplier > 0 and noise.noise != "server"):
        return
    raise RefusalError(NEEDS_BOUND)


def _knows_nodes(node: NodeConfig) -> bool:
    """Return whether a node knows the identities of the other nodes; those of a simulation are on one machine."""
    return bool(node.peers_file) or node.simulated
