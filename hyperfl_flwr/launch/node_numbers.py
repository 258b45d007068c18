"""Choose the number of simulated nodes where it matters: secure sums, robust reductions, malicious nodes."""

from hyperfl_flwr.app.robust_reductions import check_enough_nodes
from hyperfl_flwr.app.secure_sums import check_nodes
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.protocol import hosting
from hyperfl_flwr.protocol.secure_sums.thresholds import MOST_NODES


def suitable_for_reduction(config: RunConfig, num_nodes: int) -> int:
    """Return the number of nodes that is next to a suitable one and allows the run's sums to be secure.

    With a robust reduction or malicious nodes it is the number of clients, whatever suits the machine: how much each
    client counts, and which are malicious, must not depend on it.

    Args:
        config: The run's settings; with the method's mean in the clear, any number is allowed.
        num_nodes: A suitable number of nodes.

    Raises:
        ConfigError: If no number of nodes allows secure sums of so few clients, or they are too few for the rule.
    """
    if config.robust.is_robust or config.adversary.attack != "none":
        num_nodes = one_node_per_client(config)
        check_enough_nodes(config, num_nodes)
        return num_nodes
    if not config.secagg.enabled:
        return num_nodes
    allowed = _allowed(config)
    return next((number for number in allowed if number >= num_nodes), allowed[-1])


def one_node_per_client(config: RunConfig) -> int:
    """Return the number of nodes of a simulation in which each client has a node of its own."""
    return min(config.num_clients, hosting.MOST_NODES)


def check_given_nodes(config: RunConfig, num_nodes: int) -> None:
    """Refuse a given number of nodes that does not allow the run's sums to be secure, or its rule to hold.

    Raises:
        ConfigError: With the numbers that do.
    """
    check_enough_nodes(config, num_nodes)
    try:
        check_nodes(config, num_nodes, num_nodes)
    except ConfigError as error:
        allowed = _allowed(config)
        raise ConfigError(
            f"--num-nodes must be {allowed[0]} to {allowed[-1]} with secagg.enabled, got {num_nodes}: {error}"
        ) from None


def _allowed(config: RunConfig) -> list[int]:
    """Return the numbers of nodes that allow secure sums, ascending.

    Raises:
        ConfigError: If there is none.
    """
    allowed = [number for number in range(1, MOST_NODES + 1) if _is_allowed(config, number)]
    if not allowed:
        sampled = max(1, round(config.fraction_train * config.num_clients))
        try:
            check_nodes(config, sampled, sampled)
        except ConfigError as error:
            raise ConfigError(
                f"secagg.enabled must be false with {sampled} clients in a round, or give more (num-clients, "
                f"fraction-train): {error}"
            ) from None
    return allowed


def _is_allowed(config: RunConfig, num_nodes: int) -> bool:
    try:
        check_nodes(config, num_nodes, num_nodes)
    except ConfigError:
        return False
    return True
