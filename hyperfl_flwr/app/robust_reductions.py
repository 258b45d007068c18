"""Refuse robust reductions where they would not hold: by the method, other settings, or the number of nodes."""

from collections.abc import Callable, Iterator

from clients.engine.base import BaseClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.protocol.messages import Reduction
from strategies.engine.base import BaseStrategy

LARGEST_RATIO = 1e9
"""Largest `max-update-ratio` with a robust rule: float32 holds such changes of all usual parameters, and their norms
are finite."""


def check_robust(
    config: RunConfig,
    client_of: Callable[[str], type[BaseClient]],
    strategy_of: Callable[[str], type[BaseStrategy]],
) -> None:
    """Refuse a robust reduction of what is no mean over clients, or where no node may be seen by itself.

    Args:
        config: The run's settings.
        client_of: Returns the clients' side of a method by its name.
        strategy_of: Returns the server's side of a method by its name.

    Raises:
        ConfigError: Naming the setting, the reason, and what to do instead.
    """
    if not config.robust.is_robust:
        return
    given = f"robust.reduction must be mean with {{}}, got {config.robust.reduction}: "
    if reason := _reason(config, client_of(config.method)):
        able = [name for name in METHODS if not _reason(config.model_copy(update={"method": name}), client_of(name))]
        raise ConfigError(f"{given.format(config.method)}{reason}; take one of {', '.join(able)}")
    if config.secagg.enabled:
        raise ConfigError(
            f"{given.format('secagg.enabled')}the server opens the sum over all nodes and sees none by itself; bound "
            f"what each client of an honest node changes with privacy.clip-norm, which is applied before masking"
        )
    if config.privacy.protects_clients:
        raise ConfigError(
            f"{given.format('privacy.unit = client')}the noise, and the epsilon that is stated, are those of a mean "
            f"over all clients, of which privacy.clip-norm already bounds each one's part; leave out one of them"
        )
    if not 0 < config.max_update_ratio <= LARGEST_RATIO:
        raise ConfigError(
            f"max-update-ratio must be above 0 and at most {LARGEST_RATIO:g} with robust.reduction = "
            f"{config.robust.reduction}, got {config.max_update_ratio:g}: distances of unbounded numbers overflow"
        )
    strategy_of(config.method).check_robust(config)


def _reason(config: RunConfig, client: type[BaseClient]) -> str:
    """Return why what the clients of a method upload is no mean that a rule can replace; empty if it is."""
    groups = {name: each for name, each in client.active_groups(config).items() if each is not Reduction.DOWN}
    if not groups:
        return "its clients upload nothing"
    if alone := [name for name, each in groups.items() if each.is_alone]:
        return f"the server uses each client's {', '.join(alone)} by itself, where no rule keeps a malicious one out"
    if summed := [name for name, each in groups.items() if each is Reduction.SUM]:
        return f"its {', '.join(summed)} are summed over the clients, and absent ones count as zero"
    if client.keeps_upload:
        return "server and client must add the same upload to their states, so that no other may take its place"
    if config.weight_epsilon:
        return "its clients randomise each number that they send, which only a mean evens out"
    return ""


def asked_nodes(config: RunConfig, num_nodes: int) -> int:
    """Return the largest number of nodes that a usual round asks, of some number that host clients."""
    return min(num_nodes, max(1, round(config.fraction_train * config.num_clients)))


def robust_warnings(config: RunConfig, num_nodes: int) -> Iterator[str]:
    """Yield a warning if more nodes of a simulation are malicious than a robust rule allows.

    Args:
        config: The run's settings.
        num_nodes: Number P of all nodes.
    """
    if not config.robust.is_robust or config.adversary.attack == "none":
        return
    asked = asked_nodes(config, min(num_nodes, config.num_clients))
    malicious = len(config.adversary.malicious_nodes(config.seed, num_nodes))
    byzantine = config.robust.byzantine_of(asked)
    if min(malicious, asked) > byzantine:
        yield (
            f"warning: {malicious} of {num_nodes} nodes are malicious, and up to {min(malicious, asked)} of the "
            f"{asked} of a round; robust.reduction = {config.robust.reduction} is set for {byzantine} at most "
            f"(robust.byzantine)"
        )


def check_enough_nodes(config: RunConfig, num_nodes: int) -> None:
    """Refuse a robust reduction over so few nodes that its rule does not hold.

    Args:
        config: The run's settings.
        num_nodes: Number of nodes that are present and host clients.

    Raises:
        ConfigError: With the number of nodes that is needed.
    """
    robust, asked = config.robust, asked_nodes(config, num_nodes)
    if asked >= (fewest := robust.fewest_nodes(asked)):
        return
    raise ConfigError(
        f"robust.reduction = {robust.reduction} needs {fewest} nodes with clients in a round, if "
        f"{robust.byzantine_of(asked)} of them may be malicious (robust.byzantine), got {asked}: a node counts as "
        f"one, whatever the number of its clients; set at least {fewest} nodes (--num-nodes in a simulation) and "
        f"clients in a round (num-clients, fraction-train), or robust.reduction = mean"
    )
