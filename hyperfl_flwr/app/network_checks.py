"""Refuse settings that need each client's predictions to be those of one known network."""

from clients.engine.base import BaseClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError


def check_kept(config: RunConfig, client: type[BaseClient]) -> None:
    """Refuse to keep the best models, or to exchange models, of clients that predict with more than a network.

    Args:
        config: The run's settings.
        client: The client's side of the method.

    Raises:
        ConfigError: Naming the setting and the reason.
    """
    for setting, wanted, given in (("keep", "last", config.keep == "best"), ("cross-site", "false", config.cross_site)):
        if given and not client.is_network:
            value = "best" if setting == "keep" else "true"
            raise ConfigError(
                f"{setting} must be {wanted} with {config.method}, got {value}: its predictions also need the client's "
                f"training samples; leave it out, or choose another method"
            )
    if config.cross_site and len(set(config.targets)) > 1:
        raise ConfigError(
            f"cross-site must be false where clients have different networks, got {', '.join(config.targets)}: a node "
            f"can only evaluate models of its own network"
        )
