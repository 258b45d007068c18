"""An audit's controls: unrelated images, the mean image, and the mean image of each class."""

from typing import Any

import numpy as np
import pytest
import torch

from hyperfl_flwr.attacks.base import Reconstruction
from hyperfl_flwr.attacks.registry import ATTACKS
from hyperfl_flwr.audit.audit import AttackResult, _class_means, _compared, controls, images_of
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import AttackedRound
from hyperfl_flwr.audit.report import measure
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import SMALL, Federate
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.data.augmentation import Augmentation
from hyperfl_flwr.runs.run_directory import settings_of


def settings(**changes: object) -> Settings:
    own = {"batch-size": 1, "local-epochs": 1, "num-clients": 20}
    return default_settings() | SMALL | own | {key.replace("_", "-"): value for key, value in changes.items()}


def test_unrelated_images_are_no_training_images_where_clients_hold_samples_back(federate: Federate) -> None:
    """Such samples take the place of test data in a run, and are of the data set's training part."""
    held_back: dict[str, Any] = {"data.validation-fraction": 0.2}
    run = federate("fedavg", num_rounds=1, **held_back)
    options = Options(num_images=2, samples=1)
    fresh, plain = (make_attacked_round(settings(method="fedavg", **more), options) for more in (held_back, {}))
    dataset = fresh.data().dataset
    trained = {image.tobytes() for image in dataset.train.scaled(np.arange(len(dataset.train)))}
    expected, _ = controls(plain, len(dataset.test))
    assert not trained & {image.tobytes() for image in expected}
    for target in (fresh, make_attacked_round(settings_of(run), options, run)):
        np.testing.assert_array_equal(controls(target, len(dataset.test))[0], expected)


def test_the_mean_images_of_the_classes_are_a_control_of_their_own() -> None:
    """They are nearer than the mean of all by more than a verdict's margin."""
    target = make_attacked_round(settings(method="fedavg"), Options(num_images=8, samples=8))
    private, labels = images_of(target, 0)
    test = target.data().dataset.test
    means = [test.scaled(np.flatnonzero(test.labels == label)).mean(axis=0) for label in labels]
    scores = _class_means(target, [(private[:3], labels[:3]), (private[3:], labels[3:])])
    for image, mean, score in zip(private, means, scores, strict=True):
        assert score == pytest.approx(-10 * np.log10(np.square(image - mean).mean()), abs=0.02)
    (compared,) = _compared(target, [np.stack(means)], [private])
    assert np.median(scores) > np.median(compared.mean_image) + 1


def test_moved_and_flipped_images_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """What clients trained on is found exactly, where the run augments; a control gains by it, too."""
    target = make_attacked_round(settings(method="fedavg"), Options(num_images=5, samples=5))
    assert not target.augmented  # a round that is run for the attack
    private, labels = images_of(target, 0)
    augmentation = Augmentation(pad_value=(0.0,))
    drawn = augmentation.draw([5], np.random.default_rng(1))
    assert bool((drawn[:, :2] != 4).any())
    seen = augmentation(torch.from_numpy(private), drawn).numpy()[::-1].copy()
    (plain,) = _compared(target, [seen], [private])
    plain_means = _class_means(target, [(private, labels)])
    monkeypatch.setattr(AttackedRound, "augmented", True)
    (found,) = _compared(target, [seen], [private])
    assert np.isinf(found.matched.psnr).all()
    np.testing.assert_array_equal(found.matched.private, seen[::-1])
    assert np.median(plain.matched.psnr) < 20
    for part in ("unrelated", "mean_image"):
        before, after = (getattr(each, part) for each in (plain, found))
        gain = after - before if part == "mean_image" else after.psnr - before.psnr
        assert gain.mean() > 0.1
    means = _class_means(target, [(private, labels)])
    assert (means - plain_means).mean() > 0.1
    document = measure(target, {"ig": AttackResult(
        attack=ATTACKS["ig"], results=[Reconstruction(images=seen)], comparisons=[found], class_means=means, crossed=[],
        labels_found=None,
    )})  # fmt: skip
    assert document["augmented"]
    assert document["attacks"]["ig"]["ssim"]["mean"] == pytest.approx(1.0)
