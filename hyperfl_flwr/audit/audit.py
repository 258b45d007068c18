"""Audit a round: record real messages, attack them with the server's knowledge, and score the result.

The attacks get observations and public knowledge. The private images are used only afterwards, for scoring.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hyperfl_flwr.attacks.base import AttackSettings, IntArray, Reconstruction
from hyperfl_flwr.attacks.optimiser_loop import Progress
from hyperfl_flwr.attacks.registry import ATTACKS, Attack
from hyperfl_flwr.attacks.scoring import Comparison, Forms, compare, psnr_in_order
from hyperfl_flwr.audit.by_network import run_by_network
from hyperfl_flwr.audit.chosen import chosen_attacks
from hyperfl_flwr.audit.forged_round import forging, public_images
from hyperfl_flwr.audit.history import ObservationHistory, require_history
from hyperfl_flwr.audit.observation_files import ObservationFiles
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.prior import prior_of
from hyperfl_flwr.audit.record_round import AttackedRound, View, leaked_activations, record_round, view
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.augmentation import Augmentation
from hyperfl_flwr.data.dataset import Split
from hyperfl_flwr.metrics.distributions import rank_correlation

Images = NDArray[np.float32]

MOST_SAMPLED = 2000
"""Number of test images of which mean images are made, at most."""


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """Result of one attack.

    Attributes:
        attack: Row of the attack in the table of attacks.
        results: One result per client; of a sum, one per client that the attack separated.
        comparisons: Scores by client, of a sum one over all clients; empty for an attack that finds no images.
        class_means: PSNR in dB of the mean image of each private image's class, in the order of `comparisons`: what an
            attack can have that finds nothing but labels. Empty if `comparisons` is.
        crossed: Scores of the next client's results against each client's images, a control of an attack that finds the
            same kind of image in every client; empty for a single client or a sum, and if `comparisons` is.
        labels_found: Share of the labels that were found; None if the attack does not look for labels or got them.
        label_correlation: Rank correlation between the estimated and true class counts of each client; NaN if one of
            them is constant, or there was nothing to read. Empty for an attack that does not estimate counts.
    """

    attack: Attack
    results: Sequence[Reconstruction]
    comparisons: Sequence[Comparison]
    class_means: NDArray[np.float64]
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

    A malicious server sends something else for each attack, so that each attack has a round of its own.

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
    public = public_images(target) if target.malicious_server else None
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
    readable = [result for result in results if not result.nothing_to_read]
    finds_images = row.finds_images and bool(readable) and all(len(result.images) for result in readable)
    found, private = [result.images for result in results], [images for images, _ in truth]
    if target.summed:  # results of a sum come in any order: score all clients together
        found, private = [np.concatenate(found)], [np.concatenate(private)]
    elif finds_images and len(readable) < len(results):
        found = _with_mean_images(target, found, private)
    comparisons = _compared(target, found, private) if finds_images else []
    crossed = _compared(target, found[1:] + found[:1], private) if finds_images and len(found) > 1 else []
    labels_given = settings.labels is not None and row.finds_images
    labels_found = None if labels_given else _labels_found(results, [labels for _, labels in truth])
    return AttackResult(
        attack=row,
        results=results,
        comparisons=comparisons,
        class_means=_class_means(target, truth) if finds_images else np.zeros(0),
        crossed=crossed,
        labels_found=labels_found,
        label_correlation=[
            rank_correlation(result.label_counts, np.bincount(labels, minlength=len(result.label_counts)))
            if result.label_counts is not None
            else math.nan
            for result, (_, labels) in zip(results, truth, strict=False)
            if any(result.label_counts is not None for result in results)
        ],
    )


def _with_mean_images(target: AttackedRound, found: Sequence[Images], private: Sequence[Images]) -> list[Images]:
    """Return the images found of each client, and the control's mean image for those without anything to read."""
    _, mean_image = controls(target, 1)
    return [
        images if len(images) else np.repeat(mean_image[None], len(own), axis=0)
        for images, own in zip(found, private, strict=True)
    ]


def _compared(target: AttackedRound, found: Sequence[Images], private: Sequence[Images]) -> list[Comparison]:
    """Compare with equally many unrelated images; repeat reconstructions if a client has more images than them."""
    found = [
        images[np.arange(max(len(images), len(own))) % len(images)] for images, own in zip(found, private, strict=True)
    ]
    unrelated, mean_image = controls(target, sum(map(len, found)))
    parts = np.split(unrelated, np.cumsum([len(images) for images in found])[:-1])
    return [compare(*pair, mean_image, _forms_of(target)) for pair in zip(found, private, parts, strict=True)]


def _class_means(target: AttackedRound, truth: Sequence[tuple[Images, IntArray]]) -> NDArray[np.float64]:
    """Return the PSNR in dB of the mean image of each private image's class, for all clients one after another."""
    private, labels = (np.concatenate(part) for part in zip(*truth, strict=True))
    test = target.data().dataset.test
    chosen = _sample(numpy_generator(target.config.seed, "audit", "class means"), test)
    sample, found = test.scaled(chosen), test.labels[chosen]
    means = {label: sample[found == label].mean(axis=0) for label in np.unique(found)}
    images = np.stack([means.get(label, sample.mean(axis=0)) for label in labels])
    return psnr_in_order(images, private, _forms_of(target))


def _forms_of(target: AttackedRound) -> Forms | None:
    return _forms if target.augmented else None


def _forms(image: Images) -> Images:
    """Return all forms [v, C, H, W] of an image [C, H, W] that the clients' augmentation makes."""
    augmentation = Augmentation(pad_value=(0.0,) * len(image))  # black, of pixels in [0, 1]
    changes = augmentation.all_changes()
    forms: Images = augmentation(torch.from_numpy(image).expand(len(changes), -1, -1, -1), changes).numpy()
    return forms


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
    return test.scaled(chosen), test.scaled(_sample(rng, test)).mean(axis=0)


def _sample(rng: np.random.Generator, test: Split) -> IntArray:
    """Return the positions of up to `MOST_SAMPLED` test images, of which mean images are made."""
    return np.sort(rng.choice(len(test), min(len(test), MOST_SAMPLED), replace=False))


def _labels_found(results: Sequence[Reconstruction], truth: Sequence[IntArray]) -> float | None:
    """Return the share of labels that were found, comparing multisets per client; None if an attack finds none.

    Of a client without anything to read none are found.
    """
    readable = [result for result in results if not result.nothing_to_read]
    if not readable or any(result.labels is None for result in readable):
        return None
    hits = 0
    for result, labels in zip(results, truth, strict=True):
        found = np.zeros(0, dtype=np.int64) if result.labels is None else result.labels
        size = int(max(labels.max(), found.max(initial=0))) + 1
        hits += int(np.minimum(np.bincount(found, minlength=size), np.bincount(labels, minlength=size)).sum())
    return hits / sum(len(labels) for labels in truth)
