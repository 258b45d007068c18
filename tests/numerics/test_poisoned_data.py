"""The training data of malicious clients, and the images on which the success of a backdoor is measured."""

from pathlib import Path

import numpy as np
import torch
from federations import small_settings

from clients.engine.context import ClientContext
from clients.engine.poisoning import with_adversary
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.data.client_data import ClientData
from hyperfl_flwr.data.poisoning import Trigger, with_flipped_labels
from hyperfl_flwr.node.private_state import PrivateState

TRIGGER = Trigger.of(2, 2, mean=(0.25, 0.5), std=(0.5, 0.25))


def data() -> ClientData:
    """Return eight training images and four test images of two channels, with classes 0 to 3."""
    return ClientData(
        train_images=torch.randn(8, 2, 5, 4, generator=torch.Generator().manual_seed(0)),
        train_labels=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]),
        test_images=torch.zeros(4, 2, 5, 4),
        test_labels=torch.tensor([2, 0, 2, 3]),
        augmentation=None,
        num_classes=4,
    )


def test_a_class_is_taken_for_its_opposite() -> None:
    found = with_flipped_labels(data())
    assert found.train_labels.tolist() == [3, 2, 1, 0, 3, 2, 1, 0]
    assert found.train_images.equal(data().train_images)
    assert found.test_labels.equal(data().test_labels)


def test_the_trigger_is_white_before_normalisation() -> None:
    """White is 1 in [0, 1]: (1 - 0.25)/0.5 = 1.5 and (1 - 0.5)/0.25 = 2."""
    images = torch.zeros(1, 2, 5, 4)
    stamped = TRIGGER.stamped(images)
    assert stamped[0, 0].tolist() == [[0, 0, 0, 0]] * 3 + [[0, 0, 1.5, 1.5]] * 2
    assert stamped[0, 1, 3:, 2:].tolist() == [[2.0, 2.0]] * 2
    assert int(stamped.count_nonzero()) == 8
    assert not images.any()


def test_a_share_of_the_samples_is_poisoned() -> None:
    """Of eight samples, a quarter is two; they have the trigger and the target class, all others are unchanged."""
    clean = data()
    found = TRIGGER.poisoned(clean, 0.25, np.random.default_rng(0))
    changed = [row for row in range(8) if not found.train_images[row].equal(clean.train_images[row])]
    assert len(changed) == 2
    for row in range(8):
        if row in changed:
            assert found.train_images[row].equal(TRIGGER.stamped(clean.train_images[row : row + 1])[0])
        assert found.train_labels[row] == (2 if row in changed else clean.train_labels[row])
    assert found.test_images.equal(clean.test_images)


def test_at_least_one_sample_is_poisoned() -> None:
    found = TRIGGER.poisoned(data(), 0.01, np.random.default_rng(0))
    assert int((found.train_images != data().train_images).any(dim=(1, 2, 3)).sum()) == 1


def test_each_client_poisons_its_own_choice_of_samples(tmp_path: Path) -> None:
    """Two clients with equal samples poison other ones; a client poisons the same ones whenever it is built."""
    config = RunConfig.from_flat(small_settings(**{"adversary.attack": "backdoor", "adversary.poisoned-share": 0.5}))

    def images(client: int) -> torch.Tensor:
        state, device = PrivateState(tmp_path, "experiment", client), torch.device("cpu")
        context = ClientContext(
            config=config, client=client, data=data(), device=device, state=state, mean=(0.25, 0.5), std=(0.5, 0.25)
        )
        return with_adversary(context, is_malicious=True).data.train_images

    assert images(0).equal(images(0))
    assert not images(0).equal(images(1))


def test_success_is_measured_on_other_classes() -> None:
    """Two of the four test images are of the target class already."""
    images, targets = TRIGGER.test_samples(data())
    assert images.equal(TRIGGER.stamped(torch.zeros(2, 2, 5, 4)))
    assert targets.tolist() == [2, 2]
