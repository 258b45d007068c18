"""Refuse settings that need each client's predictions to be those of one known network."""

from clients.engine.base import BaseClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError

_REASON = "its predictions also need the client's training samples; leave it out, or choose another method"


def check_kept(config: RunConfig, client: type[BaseClient]) -> None:
    """Refuse to keep the best models of clients that predict with more than a network.

    Args:
        config: The run's settings.
        client: The client's side of the method.

    Raises:
        ConfigError: Naming the setting and the reason.
    """
    if config.keep == "best" and not client.is_network:
        raise ConfigError(f"keep must be last with {config.method}, got best: {_REASON}")


def check_cross_site(config: RunConfig, client: type[BaseClient]) -> None:
    """Refuse a cross-site matrix of clients that predict with more than a network, differ in it, or hide their models.

    Nodes check this, too. Arguments and errors are those of `check_kept`.
    """
    if not config.cross_site:
        return
    if not client.is_network:
        raise ConfigError(f"cross-site must be false with {config.method}, got true: {_REASON}")
    if len(set(config.targets)) > 1:
        raise ConfigError(
            f"cross-site must be false where clients have different networks, got {', '.join(config.targets)}: a node "
            f"can only evaluate models of its own network"
        )
    if client.hides_models(config):
        raise ConfigError(
            f"cross-site must be false with {config.method}.mixing: it sends the models that mixing hides from the "
            f"server; leave out one of them"
        )
