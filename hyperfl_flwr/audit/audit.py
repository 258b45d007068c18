"""Audit a round: record real messages, attack them with the server's knowledge, and score the result.

The attacks get observations and public knowledge. The private images are used only afterwards, for scoring.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.app.methods import strategy_of
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.attacks.base import AttackSettings, IntArray, Reconstruction
from hyperfl_flwr.attacks.optimiser_loop import Progress
from hyperfl_flwr.attacks.registry import ATTACKS, Attack
from hyperfl_flwr.attacks.scoring import Comparison, compare
from hyperfl_flwr.audit.by_network import check_knowledge, run_by_network
from hyperfl_flwr.audit.chosen import chosen_attacks
from hyperfl_flwr.audit.forged_round import forging, public_images
from hyperfl_flwr.audit.history import ObservationHistory, require_history
from hyperfl_flwr.audit.neighbour_view import attackable_clients
from hyperfl_flwr.audit.observation_files import ObservationFiles
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.prior import prior_of
from hyperfl_flwr.audit.record_round import AttackedRound, View, leaked_activations, record_round, view
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import training_autos, with_defaults
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.metrics.distributions import rank_correlation
from hyperfl_flwr.models.provenance import find_sources, use_weights
from hyperfl_flwr.runs.run_directory import settings_of
from hyperfl_flwr.runs.run_sources import find_sources_of
from strategies.engine.base import BaseStrategy

Images = NDArray[np.float32]

TEST_SAMPLES = 10
"""Number of test samples of each client; few, since the audit does not use accuracies."""


def make_target(settings: Mapping[str, Scalar], options: Options, trained: Path | None = None) -> AttackedRound:
    """Return the round to attack, in which every audited client holds `samples` images.

    With `secagg.enabled`, the server of a round with fresh parameters opens the sum of all clients' uploads.

    Args:
        settings: All settings of the round; the clients' data, and without `trained` their number, are replaced.
        options: Options of the audit, with the number of images.
        trained: See `AttackedRound`; if given, `settings` are those of the run, except for the local training.

    Raises:
        ConfigError: If the images cannot be divided in this way, or the settings are wrong.
        DataError: If the data set cannot be loaded, or is too small.
    """
    if trained is None:
        find_sources(settings)
    else:
        find_sources_of(trained)
    number, samples = _clients_and_samples(settings, options)
    if trained is not None and number > int(settings["num-clients"]):
        raise ConfigError(f"{number} clients would be attacked, but the trained run has {settings['num-clients']} only")
    opened = trained is None and bool(settings["secagg.enabled"])
    if opened:
        _refuse_small_sum(int(settings["secagg.min-cohort"]), number, samples)
        options = replace(options, summed=True)
    records = METHODS[str(settings["method"])].uploads and not opened
    # The noise on records is that of the whole run: the more rounds, the more noise each step needs.
    length = {} if settings["dp.epsilon"] else {"num-rounds": 1}
    fresh = {"num-clients": number, "data.partition": "iid", **length, **_strategy(settings).only_round()}
    attacked: dict[str, Scalar] = {
        **settings,
        **(fresh if trained is None else _numbers_of(trained, settings)),
        "output": "",
        "resume": "",
        "fraction-train": 1.0,
        "data.train-samples": samples,
        "data.test-samples": TEST_SAMPLES,
        "data.augmentation": "none",
        "data.global-test": False,
        "early-stopping": 0,
        "keep": "last",
        "audit.clients": ",".join(map(str, range(number))) if records else "",
        "audit.rounds": "all",
        "secagg.enabled": opened,  # else single uploads are recorded, and for `summed` added up for the attacks
        **_without("robust", "adversary"),  # what an honest client uploads does not depend on them
    }
    config = resolved(RunConfig.from_flat(attacked))
    use_weights(config.lpm.weights)
    clients = attackable_clients(config) if options.by_neighbours else range(number)
    target = AttackedRound(
        config=config,
        clients=clients,
        trained=trained,
        summed=options.summed,
        opened=opened,
        by_neighbours=options.by_neighbours,
        prior=options.prior,
        cheating=options.cheating,
        labels_known=options.labels_known,
    )
    check_knowledge(target)  # loads the data, so that missing data are reported before anything starts
    return target


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


def _without(*sections: str) -> dict[str, Scalar]:
    """Return the defaults of all settings of some sections, with which they have no effect."""
    return {key: value for key, value in with_defaults({}).items() if key.partition(".")[0] in sections}


def _strategy(settings: Mapping[str, Scalar]) -> type[BaseStrategy]:
    """Return the strategy class of the settings' method; raises ConfigError if the method is unknown."""
    return strategy_of(RunConfig.from_flat(with_defaults({"method": settings["method"]})).method)


def _numbers_of(trained: Path, settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the values of `auto` in a trained run; the attacked round's local steps could resolve it differently."""
    numbers = resolved(RunConfig.from_flat(settings_of(trained))).flat()
    return {key: numbers[key] for key in training_autos(str(settings["method"])) if settings[key] == "auto"}


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """Result of one attack.

    Attributes:
        attack: Row of the attack in the table of attacks.
        results: One result per client; of a sum, one per client that the attack separated.
        comparisons: Scores by client, of a sum one over all clients; empty for an attack that finds no images.
        crossed: Scores of the next client's results against each client's images, a control of an attack that finds the
            same kind of image in every client; empty for a single client or a sum, and if `comparisons` is.
        labels_found: Share of the labels that were found; None if the attack does not look for labels or got them.
        label_correlation: Rank correlation between the estimated and true class counts of each client; NaN if one of
            them is constant. Empty for an attack that does not estimate counts.
    """

    attack: Attack
    results: Sequence[Reconstruction]
    comparisons: Sequence[Comparison]
    crossed: Sequence[Comparison]
    labels_found: float | None
    label_correlation: Sequence[float] = ()


def audit(
    target: AttackedRound,
    options: Options,
    observed: ObservationFiles | None = None,
    *,
    on_finding: Callable[[str, AttackResult], None] = lambda name, finding: None,
    progress: Callable[[str], Progress | None] = lambda name: None,
) -> Mapping[str, AttackResult]:
    """Attack a round: one that a run has recorded, or one that is run now in a temporary folder.

    A server that cheats sends something else for each attack, so that each attack has a round of its own.

    Args:
        target: Round to attack.
        options: Options of the audit.
        observed: Recorded observations of the target's clients; None runs the round.
        on_finding: Called with each attack's name and result as it finishes.
        progress: Returns the progress callback for an attack's name.
    """
    names = chosen_attacks(options.attacks, target)
    if needs_history := any(ATTACKS[name].needs_history for name in names):
        require_history(target)
    labels = [images_of(target, client)[1] for client in target.clients] if options.labels_known else None
    prior = prior_of(target, progress("prior")) if any(ATTACKS[name].needs_prior for name in names) else None
    public = public_images(target) if target.cheating else None
    findings = {}
    with tempfile.TemporaryDirectory() as folder:
        recorded = observed
        for number, name in enumerate(names):
            if recorded is None or public is not None:
                own = Path(folder) / str(number)
                own.mkdir()
                recorded = record_round(target, own, None if public is None else forging(target, ATTACKS[name], public))
            seen = view(target, _with_history(recorded, target) if needs_history else recorded)
            settings = AttackSettings(
                labels=labels,
                hidden=leaked_activations(target, recorded) if ATTACKS[name].gets_hidden else None,
                public_images=None if public is None else public.images,
                optimisation=options.optimisation(ATTACKS[name]),
                space=prior if ATTACKS[name].needs_prior else None,
                seed=target.config.seed,
                device=resolve_device(target.config.device),
                progress=progress(name),
            )
            findings[name] = attack(target, ATTACKS[name], settings, seen)
            if public is not None:  # no other attack reads this round: one client's hypernetwork takes 120 MB
                shutil.rmtree(own)
            on_finding(name, findings[name])
    return findings


def _with_history(recorded: ObservationFiles, target: AttackedRound) -> ObservationHistory:
    return ObservationHistory(recorded.paths, target.trained or recorded.paths[0].parents[1])


def attack(target: AttackedRound, row: Attack, settings: AttackSettings, seen: View) -> AttackResult:
    """Run one attack on what the server sees, and score its result against the clients' images."""
    truth = [images_of(target, client) for client in target.clients]
    results = run_by_network(target, row, settings, seen)
    found, private = [result.images for result in results], [images for images, _ in truth]
    if target.summed:  # results of a sum come in any order: score all clients together
        found, private = [np.concatenate(found)], [np.concatenate(private)]
    finds_images = row.finds_images and all(map(len, found))
    comparisons = _compared(target, found, private) if finds_images else []
    crossed = _compared(target, found[1:] + found[:1], private) if finds_images and len(found) > 1 else []
    labels_given = settings.labels is not None and row.finds_images
    labels_found = None if labels_given else _labels_found(results, [labels for _, labels in truth])
    return AttackResult(
        attack=row,
        results=results,
        comparisons=comparisons,
        crossed=crossed,
        labels_found=labels_found,
        label_correlation=[
            rank_correlation(result.label_counts, np.bincount(labels, minlength=len(result.label_counts)))
            for result, (_, labels) in zip(results, truth, strict=False)
            if result.label_counts is not None
        ],
    )


def _compared(target: AttackedRound, found: Sequence[Images], private: Sequence[Images]) -> list[Comparison]:
    """Compare with equally many unrelated images; repeat reconstructions if a client has more images than them."""
    found = [
        images[np.arange(max(len(images), len(own))) % len(images)] for images, own in zip(found, private, strict=True)
    ]
    unrelated, mean_image = controls(target, sum(map(len, found)))
    parts = np.split(unrelated, np.cumsum([len(images) for images in found])[:-1])
    return [compare(*pair, mean_image) for pair in zip(found, private, parts, strict=True)]


def images_of(target: AttackedRound, client: int) -> tuple[Images, IntArray]:
    """Return a client's private training images [n, C, H, W] in [0, 1], without augmentation, and their labels [n]."""
    data = target.data()
    indices = data.train_indices(client)
    return data.dataset.train.scaled(indices), data.dataset.train.labels[indices]


def controls(target: AttackedRound, number: int) -> tuple[Images, Images]:
    """Return unrelated images [number, C, H, W] and the mean image [C, H, W], both of the data set's test images."""
    test = target.data().dataset.test
    rng = numpy_generator(target.config.seed, "audit", "unrelated")
    chosen = rng.choice(len(test), min(number, len(test)), replace=False)
    while len(chosen) < number:  # each image once more, so that neighbours stay distinct
        chosen = np.concatenate([chosen, rng.permutation(len(test))])[:number]
    sample = test.scaled(np.sort(rng.choice(len(test), min(len(test), 2000), replace=False)))
    return test.scaled(chosen), sample.mean(axis=0)


def _labels_found(results: Sequence[Reconstruction], truth: Sequence[IntArray]) -> float | None:
    """Return the share of labels that were found, comparing multisets per client; None if an attack finds none."""
    if any(result.labels is None for result in results):
        return None
    hits = 0
    for result, labels in zip(results, truth, strict=True):
        found = np.zeros(0, dtype=np.int64) if result.labels is None else result.labels
        size = int(max(labels.max(), found.max(initial=0))) + 1
        hits += int(np.minimum(np.bincount(found, minlength=size), np.bincount(labels, minlength=size)).sum())
    return hits / sum(len(labels) for labels in truth)
