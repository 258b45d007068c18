"""Assign clients to nodes by a fixed rule, which nodes and server evaluate without a message."""

MOST_NODES = 10_000
"""Largest number of nodes of a run; the server lists missing nodes, so the list must stay short."""

MOST_CLIENTS = 1_000_000
"""Largest number of clients of a run; nodes list theirs, and the server names the number."""


def clients_of_node(partition: int, num_nodes: int, num_clients: int) -> list[int]:
    """Return the ids of the clients that a node hosts, ascending.

    Args:
        partition: The node's number, 0 .. `num_nodes` - 1.
        num_nodes: Number of nodes P.
        num_clients: Number of clients N.

    Returns:
        The clients `partition`, `partition` + P, ... below N; empty if `partition` is N or more.
    """
    return list(range(partition, num_clients, num_nodes))
