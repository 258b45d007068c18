"""Make the round that an audit attacks: its settings, with data of the attacked size, and the attacked clients."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hyperfl_flwr.app.methods import strategy_of
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.audit.by_network import check_knowledge
from hyperfl_flwr.audit.neighbour_view import attackable_clients
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import AttackedRound
from hyperfl_flwr.audit.replaced import SECTIONS
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import training_autos, with_defaults
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.provenance import find_sources, use_weights
from hyperfl_flwr.runs.run_directory import settings_of
from hyperfl_flwr.runs.run_sources import find_sources_of
from strategies.engine.base import BaseStrategy

DIVIDING = frozenset(
    {
        "data.dirichlet-alpha",
        "data.group-by",
        "data.iid-fraction",
        "data.partition",
        "data.seed",
        "data.shards-per-client",
        "data.train-samples",
        "data.validation-fraction",
        "dataset",
        "novel.clients",
        "num-clients",
    }
)
"""Settings by which the training samples are divided among the clients."""

TEST_SAMPLES = 10
"""Number of test samples of each client; few, since the audit does not use accuracies."""


def make_attacked_round(settings: Mapping[str, Scalar], options: Options, trained: Path | None = None) -> AttackedRound:
    """Return the round to attack, in which every audited client holds `samples` images.

    Those of a trained run's client are drawn from the samples on which it has trained.

    With `secagg.enabled`, the server of a round with fresh parameters opens the sum of all clients' uploads.

    Args:
        settings: All settings of the round; without `trained`, the clients' data and their number are replaced.
        options: Options of the audit, with the number of images.
        trained: See `AttackedRound`; if given, `settings` are those of the run, except for the local training.

    Raises:
        ConfigError: If the images cannot be divided in this way, a trained run's client has fewer, or the settings are
            wrong.
        DataError: If the data set cannot be loaded, or is too small.
    """
    if trained is None:
        find_sources(settings)
    else:
        find_sources_of(trained)
    number, samples = _clients_and_samples(settings, options)
    opened = trained is None and bool(settings["secagg.enabled"])
    attacked = _attacked(settings, number, samples, opened=opened)
    own = _numbers_of(trained, settings) if trained else _fresh(settings, number, attacked)
    division = {} if trained is None else _division_of(trained, settings)
    settings = {**settings, **own, **attacked, **division}
    whose = "the trained run" if trained else str(settings["dataset"])
    _check_number(number, samples, int(settings["num-clients"]), whose, opened=opened)
    if opened:
        _refuse_small_sum(int(settings["secagg.min-cohort"]), number, samples)
        options = replace(options, summed=True)
    config = resolved(RunConfig.from_flat(settings))
    use_weights(config.lpm.weights)
    clients = attackable_clients(config) if options.by_neighbours else range(number)
    target = AttackedRound(
        config=config,
        clients=clients,
        trained=trained,
        samples=0 if trained is None else samples,
        summed=options.summed,
        opened=opened,
        by_neighbours=options.by_neighbours,
        prior=options.prior,
        malicious_server=options.malicious_server,
        labels_known=options.labels_known,
    )
    check_knowledge(target)  # loads the data, so that missing data are reported before anything starts
    for client, size in zip(target.clients, target.sizes, strict=True):
        if size < samples:
            raise ConfigError(
                f"client {client} of the trained run has {counted(size, 'training sample')}, but {samples} of each "
                f"client would be attacked; give --samples {min(target.sizes)} at most"
            )
    return target


def _division_of(trained: Path, settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings by which a run has divided its training samples: its clients keep their own.

    Raises:
        ConfigError: If others are given.
    """
    division = {key: value for key, value in settings_of(trained).items() if key in DIVIDING}
    for key, value in division.items():
        if settings[key] != value:
            raise ConfigError(
                f"with --checkpoint, {key} must be {value} as in the trained run, whose clients keep their samples; "
                f"got {settings[key]}; leave it out"
            )
    return division


def _check_number(number: int, samples: int, num_clients: int, whose: str, *, opened: bool) -> None:
    """Raise `ConfigError` if there are fewer clients than are attacked, or more in a sum that the server opens."""
    if number > num_clients:
        raise ConfigError(
            f"{number} clients would be attacked, {counted(samples, 'image')} each, but {whose} has "
            f"{counted(num_clients, 'client')}; attack at most {num_clients * samples} images, or take more per client"
        )
    if opened and number < num_clients:
        raise ConfigError(
            f"the server opens the sum of all clients, and {whose} has {num_clients}, but {number} would be attacked; "
            f"attack {num_clients * samples} images"
        )


def _fresh(settings: Mapping[str, Scalar], number: int, attacked: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings of a round that starts from fresh parameters, with all clients of a data set with client ids.

    The other data sets are divided among the clients that are attacked.
    """
    # The noise on records is that of the whole run: the more rounds, the more noise each step needs.
    length: dict[str, Scalar] = {} if settings["dp.epsilon"] else {"num-rounds": 1}
    fresh = {"num-clients": number, "data.partition": "iid", **length, **_strategy(settings).only_round()}
    data = RunConfig.from_flat({**settings, **fresh, **attacked}).data_settings()
    dataset = load_dataset(data.dataset, Path(data.data_root) if data.data_root else None, data.sample_format)
    if dataset.train.clients is None:
        return fresh
    return fresh | {"num-clients": int(dataset.train.clients.max()) + 1 - data.novel_clients}


def _attacked(settings: Mapping[str, Scalar], number: int, samples: int, *, opened: bool) -> dict[str, Scalar]:
    """Return the settings of a round of all clients, of which the first `number` are recorded."""
    records = METHODS[str(settings["method"])].uploads and not opened
    return {
        "output": "",
        "resume": "",
        "fraction-train": 1.0,
        "data.train-samples": samples,
        "data.test-samples": TEST_SAMPLES,
        "data.augmentation": "none",
        "data.global-test": False,
        "data.validation-fraction": 0.0,
        "early-stopping": 0,
        "keep": "last",
        "audit.clients": ",".join(map(str, range(number))) if records else "",
        "audit.rounds": "all",
        "secagg.enabled": opened,  # else single uploads are recorded, and for `summed` added up for the attacks
        **_defaults_of(*SECTIONS),
    }


def _clients_and_samples(settings: Mapping[str, Scalar], options: Options) -> tuple[int, int]:
    """Return the number of audited clients and of images of each, or raise `ConfigError` if there is none."""
    samples = options.samples or int(settings["batch-size"])
    number, rest = divmod(options.num_images, samples)
    if rest or not number:
        raise ConfigError(
            f"the number of images must be a multiple of the samples per client, {samples}, got {options.num_images}"
        )
    return number, samples


def _refuse_small_sum(least: int, number: int, samples: int) -> None:
    if number < least:
        raise ConfigError(
            f"a secure sum needs {least} clients at least (secagg.min-cohort), but {number * samples} images at "
            f"{samples} each are those of {number}; attack more images, or take fewer per client"
        )


def local_epochs_setting(settings: Mapping[str, Scalar], options: Options) -> dict[str, Scalar]:
    """Return the method's setting with which a client takes `local-epochs` epochs over its images, if it has one."""
    batch_size = int(settings["batch-size"])
    num_steps = int(settings["local-epochs"]) * math.ceil((options.samples or batch_size) / batch_size)
    return dict(_strategy(settings).steps_setting(num_steps))


def _defaults_of(*sections: str) -> dict[str, Scalar]:
    """Return the defaults of all settings of some sections, with which they have no effect."""
    return {key: value for key, value in with_defaults({}).items() if key.partition(".")[0] in sections}


def _strategy(settings: Mapping[str, Scalar]) -> type[BaseStrategy]:
    """Return the strategy class of the settings' method; raises ConfigError if the method is unknown."""
    return strategy_of(RunConfig.from_flat(with_defaults({"method": settings["method"]})).method)


def _numbers_of(trained: Path, settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the values of `auto` in a trained run; the attacked round's local steps could resolve it differently."""
    numbers = resolved(RunConfig.from_flat(settings_of(trained))).flat()
    return {key: numbers[key] for key in training_autos(str(settings["method"])) if settings[key] == "auto"}
