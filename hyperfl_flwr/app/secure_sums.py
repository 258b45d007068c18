"""Prepare a server for secure sums, and warn where they hide little."""

import secrets
from collections.abc import Iterator, Sequence
from functools import partial

from hyperfl_flwr.app.methods import check_secure_sum, client_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.protocol.secure_sums.header import settings_digest
from hyperfl_flwr.server.federation import Federation
from strategies.engine.context import SecureContext

SIMULATED = (
    "a simulation hides nothing: all nodes and the server run on this machine; it shows the costs and the results of "
    "secure sums"
)
"""Note for the user of a simulation."""

FEW_IMAGES = 5
"""Number of images in a sum from which this project's attacks have reconstructed them."""


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


def check_nodes(config: RunConfig, federation: Federation) -> None:
    """Refuse secure sums of too few nodes, or of too many.

    Raises:
        ConfigError: If the nodes that have replied cannot have a secure sum.
    """
    if config.secagg.enabled:
        hosts = [node for node in federation.nodes if node.clients]
        config.secagg.threshold_of(federation.num_nodes, len(hosts))


def secure_sum_warnings(config: RunConfig, samples: Sequence[int], *, simulated: bool) -> Iterator[str]:
    """Yield what a user of secure sums must know about a run.

    Args:
        config: The run's settings.
        samples: Number of training samples of each client, as far as known.
        simulated: Whether the run is a simulation.
    """
    if not config.secagg.enabled:
        return
    if simulated:
        yield SIMULATED
    if config.fraction_train < 1:
        yield (
            "warning: with fraction-train below 1, the sums of two rounds differ by few clients, so that their "
            "difference tells about these; only noise hides them (privacy.noise-multiplier)"
        )
    if samples and sum(samples) <= FEW_IMAGES:
        yield (
            f"warning: all clients together have {sum(samples)} training samples; images can be reconstructed from a "
            f"sum of so few (docs/privacy/secure-sums.md)"
        )
