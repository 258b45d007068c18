"""Prepare a server for secure sums, and warn where they hide little."""

import secrets
from collections.abc import Iterator
from functools import partial

from hyperfl_flwr.app.methods import check_secure_sum, client_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.protocol.secure_sums.header import settings_digest
from strategies.engine.context import SecureContext
from strategies.engine.sampling import evaluated

SIMULATED = (
    "a simulation hides nothing: all nodes and the server run on this machine; it shows the costs and the results of "
    "secure sums"
)
"""Note for the user of a simulation."""


def secure_context(config: RunConfig) -> SecureContext | None:
    """Return the secure part of a strategy's context for a new session; None if sums are in the clear.

    Args:
        config: The run's settings as the nodes receive them, before `auto` is replaced.

    Raises:
        ConfigError: If the method's sums cannot be secure, or another setting needs single clients.
    """
    if not config.secagg.enabled:
        return None
    check_secure_sum(config)
    return SecureContext(
        session=secrets.token_hex(16),
        settings=settings_digest(config.flat()),
        metric_names=partial(client_of(config.method).metric_names, config),
    )


def check_nodes(config: RunConfig, num_nodes: int, num_present: int) -> None:
    """Refuse secure sums of too few nodes, or of too many.

    Args:
        config: The run's settings.
        num_nodes: Number P of all nodes.
        num_present: Number of nodes that are present and host clients.

    Raises:
        ConfigError: If the present nodes, or those that host the sampled clients of a round or of the evaluation,
            cannot have a secure sum.
    """
    if not config.secagg.enabled:
        return
    sampled = max(1, round(config.fraction_train * config.num_clients))
    for num_clients in (config.num_clients, sampled):
        config.secagg.threshold_of(num_nodes, min(num_present, num_clients))
    if config.evaluate != "all":
        evaluators = evaluated(config, range(config.num_clients))
        hosts = {client % num_nodes for client in evaluators}  # as `clients_of_node` assigns them
        try:
            config.secagg.threshold_of(num_nodes, min(num_present, len(hosts)))
        except ConfigError as error:
            raise ConfigError(
                f"evaluate = {config.evaluate} draws clients of {len(hosts)} of {num_nodes} nodes, which cannot "
                f"form a secure sum: {error}; raise evaluate, or set it to all"
            ) from None


def secure_sum_warnings(config: RunConfig, *, simulated: bool) -> Iterator[str]:
    """Yield what a user of secure sums must know about a run; `launch.warnings` warns of few samples.

    Args:
        config: The run's settings.
        simulated: Whether the run is a simulation.
    """
    if not config.secagg.enabled:
        return
    if simulated:
        yield SIMULATED
    is_noisy = config.privacy.noise_multiplier > 0 and config.privacy.noise != "server"
    if config.fraction_train < 1 and not is_noisy:
        yield (
            "warning: with fraction-train below 1, the sums of two rounds differ by few clients, so that their "
            "difference tells about these; only noise hides them (privacy.noise-multiplier)"
        )
