"""Labels inferred from the last layer's gradient, on real local rounds."""

from collections import Counter

import numpy as np
import pytest
import torch
from attacked import digits, fedavg, fedrep, samples

from hyperfl_flwr.attacks.base import AttackSettings
from hyperfl_flwr.attacks.registry import ATTACKS
from hyperfl_flwr.training.local_sgd import Epochs


def recovered(client):
    (result,) = ATTACKS["idlg"].run([client.observation], client.knowledge, AttackSettings())
    assert result.images.shape == (0, 1, 8, 8)
    return result.labels


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "pfedhn", "it-pfl"])
@pytest.mark.parametrize("epochs", [1, 5])
def test_the_label_of_one_image_is_certain(method, epochs):
    """The entries p - onehot(y) are negative at y only, in every step; tested with ten digits."""
    setting = Epochs(epochs=epochs, batch_size=1, momentum=0.5, weight_decay=5e-4)
    for first in range(10):
        images, labels = digits(1, first=first)
        assert recovered(fedavg(samples(images, labels), setting, method=method)).tolist() == labels.tolist()


def test_the_labels_of_a_batch_are_counted():
    """An untrained network gives all classes about 1/K, so the counts follow; 7 digits with repeated labels."""
    images, labels = digits(40)
    chosen = torch.tensor([0, 10, 20, 1, 11, 5, 7])
    data = samples(images[chosen], labels[chosen])
    assert max(Counter(labels[chosen].tolist()).values()) > 1
    found = recovered(fedavg(data, Epochs(epochs=1, batch_size=7)))
    assert found.tolist() == sorted(labels[chosen].tolist())


def test_a_private_classifier_tells_no_label():
    client = fedrep(samples(*digits(1)), Epochs(epochs=1, batch_size=1))
    with pytest.raises(ValueError, match="private"):
        recovered(client)


def test_labels_are_not_read_from_the_observation():
    """With another label the answer changes, so the attack uses the gradient."""
    images, labels = digits(1)
    other = (labels + 1) % 10
    assert recovered(fedavg(samples(images, other), Epochs(epochs=1, batch_size=1))).tolist() == other.tolist()
    assert np.all(other.numpy() != labels.numpy())
