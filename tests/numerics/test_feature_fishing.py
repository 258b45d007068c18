"""Feature fishing: one image among many of one class, against its gradient alone, and where that ends."""

from dataclasses import replace

import pytest
import torch
from attacked import MEAN, STD, digits, relative_error
from test_malicious_server import PUBLIC, knowledge_of, observed, psnr, sent_by, target_of
from torch import Tensor

from hyperfl_flwr.attacks.base import AttackSettings
from hyperfl_flwr.attacks.feature_fishing import forge_feature_fishing
from hyperfl_flwr.attacks.fishing import FISHED, forge_fishing
from hyperfl_flwr.attacks.nothing_to_read import NothingToReadError
from hyperfl_flwr.attacks.optimisation import Optimisation
from hyperfl_flwr.attacks.readout import read_out
from hyperfl_flwr.attacks.registry import ATTACKS
from hyperfl_flwr.runs.observation import mean_observation

NUMBER = 12
ZEROS = torch.full((NUMBER,), FISHED)
SEARCH = AttackSettings(optimisation=Optimisation(iterations=200, learning_rate=1.0, signed=True))


def zeros() -> Tensor:
    images, labels = digits(1000)
    return images[labels == FISHED]


def level(received, knowledge, images: Tensor) -> Tensor:
    """Return -z_c of images, which is above 0 for those above the threshold, up to log(K - 1)."""
    target = target_of(knowledge)
    target.load_state_dict({key.partition("/")[2]: torch.from_numpy(value.copy()) for key, value in received.items()})
    return -target((images - MEAN) / STD)[:, FISHED].detach()


def crowd(received, knowledge, above: int) -> Tensor:
    """Return twelve zeros, of which the first `above` are clearly above the threshold and the others below it."""
    images = zeros()
    height = level(received, knowledge, images)
    high, low = images[height > 8], images[height < -15]
    return torch.cat([high[:above], low[: NUMBER - above]])


def of_extractor(observation, knowledge) -> Tensor:
    gradient = read_out(observation, knowledge).gradient
    return torch.cat([value.flatten() for name, value in gradient.items() if name.startswith("extractor.")])


def fished(batch: int = NUMBER, epochs: int = 1, clients: int = 1):
    """Return what the server knows, and what it sends."""
    knowledge = replace(knowledge_of("cnn", batch=batch, epochs=epochs), summed_clients=clients)
    return knowledge, forge_feature_fishing(sent_by(knowledge), knowledge, PUBLIC, clients * NUMBER)


def test_the_only_image_above_the_threshold_is_the_gradient() -> None:
    """Of twelve zeros one is above: the mean gradient is a twelfth of its own; of two it is that of neither."""
    knowledge, received = fished()
    images = crowd(received, knowledge, 1)
    alone = of_extractor(observed(knowledge, received, images[:1], ZEROS[:1]), knowledge)
    together = of_extractor(observed(knowledge, received, images, ZEROS), knowledge)
    assert relative_error(NUMBER * together, alone) < 1e-3
    two = of_extractor(observed(knowledge, received, crowd(received, knowledge, 2), ZEROS), knowledge)
    assert relative_error(NUMBER * two, alone) > 0.3
    honest = sent_by(knowledge)
    of_all = of_extractor(observed(knowledge, honest, images, ZEROS), knowledge)
    of_one = of_extractor(observed(knowledge, honest, images[:1], ZEROS[:1]), knowledge)
    assert relative_error(NUMBER * of_all, of_one) > 0.5


def test_several_steps_leave_the_gradient_of_one_image() -> None:
    """Nine steps on batches of four: the first that meets the image silences all others."""
    knowledge, received = fished(batch=4, epochs=3)
    images = crowd(received, knowledge, 1)
    one_step = knowledge_of("cnn", batch=1)
    alone = of_extractor(observed(one_step, received, images[:1], ZEROS[:1]), one_step)
    found = of_extractor(observed(knowledge, received, images, ZEROS), knowledge)
    assert torch.cosine_similarity(found, alone, dim=0) > 0.999


def test_feature_fishing_finds_the_image_where_class_fishing_does_not() -> None:
    """Both search for one image in a batch of twelve zeros; another zero is the control."""
    knowledge, received = fished()
    images = crowd(received, knowledge, 1)
    caught, others = images[:1], images[1:]
    (result,) = ATTACKS["feature-fishing"].run([observed(knowledge, received, images, ZEROS)], knowledge, SEARCH)
    assert result.findings["caught"] == pytest.approx(1, abs=0.01)
    control = psnr(others, caught).max()
    assert psnr(result.images, caught).min() > control + 3
    by_class = forge_fishing(sent_by(knowledge), knowledge, PUBLIC, NUMBER)
    (other,) = ATTACKS["fishing"].run([observed(knowledge, by_class, images, ZEROS)], knowledge, SEARCH)
    assert other.findings["caught"] == pytest.approx(NUMBER, abs=0.01)
    assert psnr(other.images, images).max() < psnr(result.images, caught).min()


def test_one_image_of_a_sum_is_the_gradient() -> None:
    """Of two clients with twelve zeros each, one image is above the threshold: the mean upload is its gradient."""
    knowledge, received = fished(clients=2)
    images = crowd(received, knowledge, 1)
    single = replace(knowledge, summed_clients=1)
    parts = [
        observed(single, received, part, ZEROS) for part in (images, images.flip(0)[:1].expand(NUMBER, -1, -1, -1))
    ]
    alone = of_extractor(observed(single, received, images[:1], ZEROS[:1]), single)
    together = of_extractor(mean_observation(parts), knowledge)
    assert relative_error(2 * NUMBER * together, alone) < 1e-3


def test_images_of_other_classes_hide_the_image() -> None:
    """Of the same twelve images six are labelled as other classes: their gradients do not vanish."""
    knowledge, received = fished()
    images = crowd(received, knowledge, 1)
    labels = torch.cat([ZEROS[:6], torch.arange(1, 7)])
    alone = of_extractor(observed(knowledge, received, images[:1], ZEROS[:1]), knowledge)
    together = of_extractor(observed(knowledge, received, images, labels), knowledge)
    assert relative_error(NUMBER * together, alone) > 0.5


def test_without_public_images_of_the_class_those_of_others_set_the_threshold() -> None:
    """The classifier still has one row, and the private classifier of other methods is refused."""
    knowledge = knowledge_of("cnn")
    few = replace(PUBLIC, labels=PUBLIC.labels + 1)
    received = forge_feature_fishing(sent_by(knowledge), knowledge, few, NUMBER)
    rows = received["model/classifier.weight"].any(axis=1)
    assert rows.tolist() == [True] + 9 * [False]
    with pytest.raises(ValueError, match="keeps it private"):
        forge_feature_fishing(sent_by(knowledge, "extractor"), knowledge, PUBLIC, NUMBER)


def test_data_of_one_class_in_all_are_refused() -> None:
    """No class can be improbable that is the only one of the data set."""
    ATTACKS["feature-fishing"].check(knowledge_of("cnn"))
    with pytest.raises(ValueError, match="only one class"):
        ATTACKS["feature-fishing"].check(replace(knowledge_of("cnn"), num_classes=1))
    with pytest.raises(ValueError, match="last layer with parameters is linear"):
        ATTACKS["feature-fishing"].check(knowledge_of("resnet18"))


def test_fishing_has_nothing_to_read_without_an_image_of_the_class():
    (images, labels), knowledge = digits(8), knowledge_of("cnn", batch=7)
    received = forge_fishing(sent_by(knowledge), knowledge, PUBLIC, 7)
    others = observed(knowledge, received, images[labels != FISHED], labels[labels != FISHED])
    with pytest.raises(NothingToReadError, match="no image of class 0"):
        ATTACKS["fishing"].run([others], knowledge, AttackSettings())
