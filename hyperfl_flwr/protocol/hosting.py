"""Which clients a node hosts, known to the node and to the server without a message."""


def clients_of_node(partition: int, num_nodes: int, num_clients: int) -> list[int]:
    """Return the ids of the clients that a node hosts; none if there are more nodes than clients."""
    return list(range(partition, num_clients, num_nodes))
