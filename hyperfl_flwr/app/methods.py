"""Both sides of a method: their classes, loaded when they are needed, and checks of a run's settings."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from clients.engine.base import BaseClient
from hyperfl_flwr.app.adversary import check_adversary
from hyperfl_flwr.app.keep_and_cross_site import check_cross_site, check_kept
from hyperfl_flwr.app.robust_reductions import check_robust
from hyperfl_flwr.app.target_checks import check_noise, check_target
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError, DataError
from hyperfl_flwr.core.packages.package_finder import where
from hyperfl_flwr.core.packages.user_code import UserCode, is_user_code
from hyperfl_flwr.data.corruptions import require_corruption
from hyperfl_flwr.data.sample_format import is_same_data
from hyperfl_flwr.data.unlabelled_pool import unlabelled_pool
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.layers.batchnorm import has_statistics
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.server.federation import Federation
from strategies.engine.base import BaseStrategy
from strategies.engine.context import SecureContext, ServerContext

Side = TypeVar("Side")


def client_of(method: str) -> type[BaseClient]:
    """Return the clients' side of a method, by its name.

    Raises:
        KeyError: If there is no such method.
        ImportError: If the module that the row of a built-in method names has no such class.
        ConfigError: If a method of the user's own cannot be imported, or its declaration is wrong.
    """
    return _load(method, METHODS[method].client, BaseClient)


def strategy_of(method: str) -> type[BaseStrategy]:
    """Return the server's side of a method, by its name; raises as `client_of` does."""
    return _load(method, METHODS[method].strategy, BaseStrategy)  # type: ignore[type-abstract]


def _load(method: str, path: str, kind: type[Side]) -> type[Side]:
    """Return the class that a path as `package.module:Class` names in the declaration of a method."""
    module, _, name = path.partition(":")
    own = UserCode("method", method) if is_user_code(method) else None
    if own is not None:
        own.refuse_other_module(path)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except BaseException as error:
        if own is None or isinstance(error, KeyboardInterrupt):
            raise
        raise own.problem(f"{module} cannot be imported: {where(error)}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        text = f"{path} must be a {kind.__module__}.{kind.__name__}, got {found!r}; correct the method's declaration"
        raise ImportError(text) if own is None else own.problem(text)
    return found


def new_strategy(
    config: RunConfig,
    federation: Federation,
    *,
    experiment: str,
    run_directory: str,
    secure: SecureContext | None = None,
) -> BaseStrategy:
    """Return the server's side of a run's method, as it is before the first round; see `strategies.engine.base`."""
    context = ServerContext(
        config=config,
        federation=federation,
        reductions=client_of(config.method).reductions(config),
        experiment=experiment,
        run_directory=run_directory,
        secure=secure,
    )
    return strategy_of(config.method)(context)


def check_run(config: RunConfig, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Refuse settings that do not fit the data or each other.

    Args:
        config: The run's settings.
        input_shape: Shape of a sample: (channels, height, width), or (D,) of feature vectors.
        num_classes: Number of classes.

    Raises:
        ConfigError: Naming the setting and what is wrong with it.
    """
    for name in dict.fromkeys(config.targets):
        check_target(name, client_of(config.method), config, input_shape, num_classes)
    _check_novel(config, input_shape)
    _check_audit(config)
    check_kept(config, client_of(config.method))
    check_cross_site(config, client_of(config.method))
    check_privacy(config, input_shape, num_classes)
    check_adversary(config, client_of(config.method), input_shape, num_classes)
    check_secure_sum(config)
    check_robust(config, client_of, strategy_of)
    _check_public_data(config, input_shape)
    strategy_of(config.method).check(config, input_shape)


def _check_audit(config: RunConfig) -> None:
    """Refuse to record the uploads of a method that has none."""
    if config.audit.clients and not METHODS[config.method].uploads:
        raise ConfigError(
            f"audit.clients must be empty with {config.method}, got {config.audit.clients}: its clients upload "
            f"nothing that could be recorded; leave it out, or choose another method"
        )


def _check_public_data(config: RunConfig, input_shape: tuple[int, ...]) -> None:
    """Refuse public samples that are the clients' own, are missing, or have another shape."""
    name = client_of(config.method).public_data(config)
    if not name:
        return
    data_root = Path(config.data_root) if config.data_root else None
    try:
        is_own = is_same_data(name, config.dataset, data_root)
        if not is_own:
            unlabelled_pool(name, input_shape, data_root)
    except DataError as error:
        raise ConfigError(f"{config.method}.unlabelled: {error}") from None
    if is_own:
        raise ConfigError(
            f"{config.method}.unlabelled must not be {name}, the clients' own data set: its samples are not public, "
            f"and what models compute on them would be sent; take noise, or another data set"
        )


def check_privacy(config: RunConfig, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Refuse settings `dp.*` and `privacy.*` that would not hold; arguments and errors are those of `check_run`.

    Nodes check this, too: an epsilon that they record must not depend on the server's checks.
    """
    _check_clipping(config)
    _check_noisy_steps(config, input_shape, num_classes)
    _check_randomised(config)
    _check_client_privacy(config)
    check_noise(client_of(config.method), config, input_shape, num_classes)


def _check_clipping(config: RunConfig) -> None:
    """Refuse clipping, and the noise that needs it, where an upload must be what the client has computed."""
    privacy, reason = config.privacy, client_of(config.method).unclippable
    if reason and (privacy.clip_norm or privacy.protects_clients):
        able = ", ".join(name for name in METHODS if client_of(name).shared and not client_of(name).unclippable)
        found = f"clip-norm = {privacy.clip_norm:g}" if privacy.clip_norm else "unit = client"
        raise ConfigError(f"privacy.{found} must not be set with {config.method}: {reason}; take one of {able}")


def _check_noisy_steps(config: RunConfig, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Refuse differential privacy of single records where the local training cannot have it."""
    if not config.dp.epsilon:
        return
    given = f"dp.epsilon must be 0 with {{}}, got {config.dp.epsilon:g}: "
    if not client_of(config.method).has_noisy_steps:
        able = ", ".join(name for name in METHODS if client_of(name).has_noisy_steps)
        raise ConfigError(f"{given.format(config.method)}its local training has no noisy steps; take one of {able}")
    if config.precision != "fp32":
        found = given.format(f"precision = {config.precision}")
        raise ConfigError(f"{found}rounded norms weaken the bound of clipping; take precision = fp32")
    if config.privacy.clip_norm:
        raise ConfigError(
            f"{given.format(f'privacy.clip-norm = {config.privacy.clip_norm:g}')}the noise of the steps is all that "
            f"an upload needs for a stated epsilon of records; set privacy.clip-norm to 0, or dp.epsilon to 0"
        )
    if has_statistics(build_target(config.target, input_shape, num_classes)):
        raise ConfigError(
            f"{given.format(f'target = {config.target}')}its BatchNorm mixes the samples of a batch, so that clipping "
            f"the gradient of one sample does not bound its effect; take cnn, lenet, mlp or mlp-500, or a network of "
            f"your own with GroupNorm"
        )


def _check_randomised(config: RunConfig) -> None:
    """Refuse clipping and noise on uploads that the method's clients randomise themselves."""
    privacy = config.privacy
    if config.weight_epsilon and (privacy.protects_clients or privacy.clip_norm):
        found = "privacy.unit = client" if privacy.protects_clients else f"privacy.clip-norm = {privacy.clip_norm:g}"
        raise ConfigError(
            f"{found} must not be set with {config.method}: its clients randomise each number that they send; set "
            f"{config.method}.epsilon instead"
        )


def _check_client_privacy(config: RunConfig) -> None:
    """Refuse differential privacy of clients where it would not hold, or says nothing."""
    privacy = config.privacy
    if not privacy.protects_clients:
        return
    if not _is_mean(config):
        found = client_of(config.method).reductions(config)
        alone = ", ".join(name for name, each in found.items() if each not in (Reduction.MEAN, Reduction.DOWN))
        reason = f"its {alone} are not averaged over the clients" if found else "its clients upload nothing"
        able = [name for name in METHODS if _is_mean(config.model_copy(update={"method": name}))]
        raise ConfigError(
            f"privacy.unit must be none with {config.method}: {reason}, so noise on a mean does not protect them; take "
            f"one of {', '.join(able)}"
        )
    if not privacy.clip_norm:
        raise ConfigError(
            "privacy.clip-norm must be above 0 with privacy.unit=client: without a bound on what a client changes, no "
            "noise suffices; set it to about the norm of a usual change, for example 1"
        )
    if not privacy.noise_multiplier and privacy.noise != "local":
        raise ConfigError(
            f"privacy.noise-multiplier must be above 0 with privacy.noise={privacy.noise}; to study clipping without "
            f"noise, take privacy.noise=local"
        )
    if privacy.noise == "sum" and not config.secagg.enabled:
        raise ConfigError(
            "privacy.noise must not be sum without secagg.enabled: the server would see each node's sum, which has "
            "only a share of the noise; set secagg.enabled=true, or privacy.noise to server or local"
        )
    if privacy.noise == "server" and config.secagg.enabled:
        raise ConfigError(
            "privacy.noise must not be server with secagg.enabled: the server adds noise after the sum is opened, and "
            "a node could make that sum overflow or not depending on one client; take privacy.noise=sum instead"
        )


def check_secure_sum(config: RunConfig) -> None:
    """Refuse secure sums where the server must see single clients, or could separate them.

    Nodes check this, too: a malicious server starts runs that an honest one refuses.

    Raises:
        ConfigError: Naming the setting, the reason, and what to do instead.
    """
    if not config.secagg.enabled:
        return
    alone = [name for name, each in _groups(config).items() if each.is_alone]
    if alone or not _is_summed(config):
        reason = f"the server must see each client's {', '.join(alone)}" if alone else "its clients upload nothing"
        summed = [name for name in METHODS if _is_summed(config.model_copy(update={"method": name}))]
        others = [name for name in summed if name != "hyperfl"]  # it needs a setting, see its strategy
        raise ConfigError(
            f"secagg.enabled must be false with {config.method}: {reason}, so there is no sum to hide it in; take one "
            f"of {', '.join(others)}"
        )
    if config.audit.clients:
        raise ConfigError(
            f"audit.clients must be empty with secagg.enabled, got {config.audit.clients}: the server does not see "
            f"single clients; audit.rounds alone records what it opens"
        )
    if config.novel.clients:
        raise ConfigError(
            f"novel.clients must be 0 with secagg.enabled, got {config.novel.clients}: each novel client answers for "
            f"itself alone; assess them in a run without secure sums"
        )
    strategy_of(config.method).check_secure_sum(config)


def _groups(config: RunConfig) -> Mapping[str, Reduction]:
    return client_of(config.method).active_groups(config)


def _is_mean(config: RunConfig) -> bool:
    if config.weight_epsilon:
        return False
    client_class = client_of(config.method)
    found = set(client_class.reductions(config).values()) - {Reduction.DOWN}
    return not client_class.unclippable and found == {Reduction.MEAN}


def _is_summed(config: RunConfig) -> bool:
    found = set(_groups(config).values())
    return any(each.is_summed for each in found) and not any(each.is_alone for each in found)


def _check_novel(config: RunConfig, input_shape: Sequence[int]) -> None:
    """Refuse novel clients where the method or the data do not allow them."""
    novel, method = config.novel, config.method
    if not novel.clients:
        return
    if not strategy_of(method).novel_modes:
        able = ", ".join(name for name in METHODS if strategy_of(name).novel_modes)
        raise ConfigError(
            f"novel.clients must be 0 with {method}: its clients keep {', '.join(client_of(method).private)} "
            f"private, which a client without labels cannot train; take one of {able}"
        )
    for name in novel.corruptions.split(","):
        if name != "none" and len(input_shape) != 3:
            raise ConfigError(f"novel.corruptions must be none, got {name}: the samples are not images")
        if name != "none":
            try:
                require_corruption(name, input_shape[0])
            except DataError as error:
                raise ConfigError(f"novel.corruptions must not have {name}: {error}") from None
