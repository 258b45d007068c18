"""Refuse target networks that do not fit a run's data or its method."""

from clients.engine.base import BaseClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.models.custom.checks import check_custom
from hyperfl_flwr.models.groups import groups_of
from hyperfl_flwr.models.layers.batchnorm import has_statistics
from hyperfl_flwr.models.provenance import body_hash
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.messages import Reduction

_EXTRACTORS = frozenset({"extractor", "hypernetwork"})
"""Groups that hold the parameters of an extractor, or generate them."""


def check_target(
    name: str, client: type[BaseClient], config: RunConfig, input_shape: tuple[int, ...], num_classes: int
) -> None:
    """Refuse a target network that cannot take the data, that the method cannot train, or that lacks its weights.

    Args:
        name: Name of the target network.
        client: The client's side of the method.
        config: The run's settings.
        input_shape: Shape of a sample: (channels, height, width), or (D,) of feature vectors.
        num_classes: Number of classes.

    Raises:
        ConfigError: Naming the network and what is wrong.
    """
    try:
        target = build_target(name, input_shape, num_classes)
    except ValueError as error:
        raise ConfigError(f"{error}; choose another target or other data") from None
    if is_user_code(name):
        check_custom(name, input_shape, num_classes)
    body_hash(name, config.lpm.weights)  # raises if there are no weights
    if has_statistics(target) and client.is_generated:
        raise ConfigError(
            f"target = {name} has running statistics (BatchNorm), which a hypernetwork cannot generate; "
            f"with {config.method} take cnn, lenet, mlp or mlp-500"
        )
    if not _EXTRACTORS.isdisjoint((*client.shared, *client.private)) and not list(target.extractor.parameters()):
        raise ConfigError(
            f"target = {name} has no parameters but those of its classifier, and {config.method} trains the others "
            f"separately; take a target with adapters, or a method for whole models such as fedavg or local"
        )


def check_noise(client: type[BaseClient], config: RunConfig, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Refuse noise on uploads with running statistics, whatever it is for.

    Arguments are those of `check_target`.

    Raises:
        ConfigError: Naming the network.
    """
    noise = config.privacy.noise_multiplier
    if not noise:
        return
    groups = groups_of(build_target(config.target, input_shape, num_classes))
    sent = {name for name, each in client.active_groups(config).items() if each is not Reduction.DOWN}
    if any(has_statistics(groups[name]) for name in sent & set(groups)):
        raise ConfigError(
            f"privacy.noise-multiplier must be 0 with target = {config.target}, got {noise:g}: its BatchNorm uploads "
            f"variances, which noise makes negative; take cnn, lenet, mlp or mlp-500, or a network of your own with "
            f"GroupNorm"
        )
