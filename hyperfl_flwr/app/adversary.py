"""Refuse simulated attacks in a deployment, and where their effect could not be measured."""

from collections.abc import Sequence

from clients.engine.base import BaseClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.methods import METHODS


def check_adversary(config: RunConfig, client: type[BaseClient], input_shape: Sequence[int], num_classes: int) -> None:
    """Refuse attacks of malicious nodes that do not fit the method, the data or other settings.

    Args:
        config: The run's settings.
        client: The client's side of the method.
        input_shape: Shape of a sample: (channels, height, width), or (D,) of feature vectors.
        num_classes: Number of classes.

    Raises:
        ConfigError: Naming the setting, the reason, and what to do instead.
    """
    adversary = config.adversary
    if adversary.attack == "none":
        return
    given = f"adversary.attack must be none with {{}}, got {adversary.attack}: "
    if not client.active_groups(config):
        raise ConfigError(f"{given.format(config.method)}its clients upload nothing that they could forge")
    if adversary.forges and not METHODS[config.method].uploads:
        raise ConfigError(
            f"{given.format(config.method)}its clients send no parameters that could be forged; take label-flip, or "
            f"another method"
        )
    unfit = {
        "secagg.enabled": (config.secagg.enabled, "the sums of metrics would hold those of the malicious nodes"),
        "novel.clients above 0": (config.novel.clients > 0, "nodes answer honestly for clients that they do not train"),
        "cross-site": (config.cross_site, "its means are over all clients, also those of the malicious nodes"),
    }
    for name, (is_so, reason) in unfit.items():
        if is_so:
            raise ConfigError(f"{given.format(name)}{reason}; leave out one of them")
    if adversary.attack == "backdoor":
        _check_backdoor(config, input_shape, num_classes)


def _check_backdoor(config: RunConfig, input_shape: Sequence[int], num_classes: int) -> None:
    """Refuse a trigger that does not fit the samples, and a class that there is not; errors as of `check_adversary`."""
    adversary = config.adversary
    if len(input_shape) != 3:
        raise ConfigError(
            "adversary.attack must not be backdoor with feature vectors: its trigger is a square of pixels; take "
            "label-flip, or a data set of images"
        )
    if adversary.trigger_size >= min(input_shape[1:]):
        raise ConfigError(
            f"adversary.trigger-size must be below the images' smaller side, {min(input_shape[1:])}; got "
            f"{adversary.trigger_size}"
        )
    if adversary.target_class >= num_classes:
        raise ConfigError(
            f"adversary.target-class must be below the number of classes, {num_classes}; got {adversary.target_class}"
        )


def adversary_problem(config: RunConfig, *, simulated: bool) -> str:
    """Return why a run may not have malicious nodes, whatever the method and the data; empty if it may, or has none.

    Args:
        config: The run's settings.
        simulated: Whether the nodes are simulated.
    """
    if simulated or config.adversary.attack == "none":
        return ""
    return (
        f"adversary.attack must be none in a deployment, got {config.adversary.attack}: it makes nodes malicious, "
        f"which is for simulations only"
    )
