"""Separating a sum of HyperFL's uploads, compared with what each client's own upload reveals."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attacked import digits, fedrep, hyperfl, relative_error, samples
from scipy.optimize import linear_sum_assignment

from hyperfl_flwr.attacks.base import AttackSettings
from hyperfl_flwr.attacks.channels import head_rows, separate_ica, separate_known
from hyperfl_flwr.attacks.optimisation import Optimisation
from hyperfl_flwr.attacks.readout import mean_gradients, read_out
from hyperfl_flwr.attacks.registry import ATTACKS, attacks_on
from hyperfl_flwr.attacks.scoring import CLEAR_MARGIN, compare, verdict
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.runs.observation import mean_observation
from hyperfl_flwr.training.local_sgd import Epochs

STEP = Epochs(epochs=1, batch_size=1, momentum=0.5, weight_decay=5e-4)
QUICK = Optimisation(iterations=200, learning_rate=1.0, signed=True, total_variation=3e-3)


class Crowd:
    """Clients with one digit each, what their own uploads reveal, and the sum of these uploads."""

    def __init__(self, num_clients, *, width=16, side=12, own=True, frozen=False):
        parts = [samples(*digits(1, side=side, first=client)) for client in range(num_clients)]
        clients = [
            hyperfl(part, STEP, frozen=frozen, hidden_width=width, own_embedding=client if own else None)
            for client, part in enumerate(parts)
        ]
        readings = [read_out(client.observation, client.knowledge) for client in clients]
        self.hidden = [reading.hidden for reading in readings]
        self.gradients = torch.stack([torch.cat([g.flatten() for g in r.gradient.values()]) for r in readings]).double()
        self.knowledge = replace(clients[0].knowledge, summed_clients=num_clients)
        self.sum = mean_observation(client.observation for client in clients)
        self.rows = head_rows(self.sum, self.knowledge)

    def separated(self):
        return separate_known(self.rows, torch.stack(self.hidden).double())

    def cosines(self, others):
        """Return |cos| of each client's gradient with each of the others [r, P]."""
        ours, theirs = (torch.nn.functional.normalize(each, dim=1) for each in (self.gradients, others))
        return (ours @ theirs.T).abs()

    def plain(self):
        """Return |cos| of each client's gradient with the plain sum, which a FedAvg server would see."""
        return self.cosines(self.rows[-1:])[:, 0]


def test_the_sum_is_a_reply_with_the_mean_gradient():
    """After one step, the mean reply gives the mean of the clients' mean gradients."""
    clients = [fedrep(samples(*digits(4, first=4 * client)), replace(STEP, batch_size=4)) for client in range(3)]
    known = replace(clients[0].knowledge, summed_clients=3)
    observation = mean_observation(client.observation for client in clients)
    assert observation.num_examples == 12
    assert known.num_steps(12) == clients[0].knowledge.num_steps(4) == 1
    single = [mean_gradients(client.observation, client.knowledge) for client in clients]
    for key, value in mean_gradients(observation, known).items():
        assert relative_error(value, sum(each[key] for each in single) / 3) < 1e-4


def test_what_is_no_sum_is_refused():
    clients = [hyperfl(samples(*digits(num)), STEP, hidden_width=4).observation for num in (1, 2)]
    with pytest.raises(ValueError, match="equally many samples"):
        mean_observation(clients)
    moved = replace(clients[0], received={key: value + 1 for key, value in clients[0].received.items()})
    with pytest.raises(ValueError, match="received the same parameters"):
        mean_observation([clients[0], moved])
    with pytest.raises(ValueError, match="at least one reply"):
        mean_observation([])
    shared = fedrep(samples(*digits(1)), STEP)
    with pytest.raises(ValueError, match="heads of a hypernetwork"):
        head_rows(shared.observation, shared.knowledge)
    crowd = Crowd(2, width=4)
    with pytest.raises(ValueError, match="activations of all 2 clients"):
        ATTACKS["channels-known"].run([crowd.sum], crowd.knowledge, AttackSettings())


def test_known_activations_separate_up_to_one_client_more_than_units():
    """R = [Z | 1]^T W G determines G while N <= p + 1; then it equals the gradients of the single uploads."""
    five = Crowd(5)
    for found, expected in zip(five.separated(), five.gradients, strict=True):
        assert relative_error(found, expected) < 1e-4
    unequal = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    hidden = torch.stack(five.hidden).double()
    rows = torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1).T @ (unequal[:, None] * five.gradients)
    torch.testing.assert_close(separate_known(rows, hidden, unequal), five.gradients, rtol=1e-6, atol=1e-9)
    many = Crowd(24)
    errors = [relative_error(*pair) for pair in zip(many.separated(), many.gradients, strict=True)]
    assert min(errors) > 1e-2
    assert np.median(errors) > 0.3


def test_a_narrow_hypernetwork_narrows_the_channels_and_does_not_close_them():
    """With 24 clients and p = 4 or 16 units, the cosines are about sqrt((p + 1) / N), still above the plain sum's."""
    crowds = {width: Crowd(24, width=width) for width in (4, 16)}
    medians = {width: float(crowd.cosines(crowd.separated()).diagonal().median()) for width, crowd in crowds.items()}
    for width, median in medians.items():
        assert median == pytest.approx(math.sqrt((width + 1) / 24), abs=0.15)
        assert median > float(crowds[width].plain().median())


@pytest.mark.parametrize("frozen", [False, True])
def test_one_activation_for_all_closes_the_channels(frozen):
    """With equal z, R has rank one, and either separation gives no more than the plain sum's cosine."""
    crowd = Crowd(5, own=False, frozen=frozen)
    torch.testing.assert_close(crowd.cosines(crowd.separated()).diagonal(), crowd.plain(), rtol=0, atol=0.02)
    hidden, gradients = separate_ica(crowd.rows, 5)
    assert len(hidden) == 1
    torch.testing.assert_close(crowd.cosines(gradients)[:, 0], crowd.plain(), rtol=0, atol=0.15)


def test_a_method_without_heads_has_no_channels():
    """`hyperfl-frozen` sends theta as FedRep sends its extractor: only the plain sum is attacked; pFedHN has no sum."""
    assert attacks_on(METHODS["hyperfl"].uploads, summed=True) == ["head-gradient", "channels-known", "channels-ica"]
    assert (
        attacks_on(METHODS["hyperfl-frozen"].uploads, summed=True)
        == attacks_on(METHODS["fedrep"].uploads, summed=True)
        == ["head-gradient"]
    )
    assert attacks_on(METHODS["pfedhn"].uploads, summed=True) == []
    assert "channels-ica" not in attacks_on(METHODS["hyperfl"].uploads)


def test_unknown_activations_are_found_as_independent_components():
    """From the sum alone, at least four of five clients' gradients and their z are found; the plain sum is far away."""
    crowd = Crowd(5, side=28)
    hidden, gradients = separate_ica(crowd.rows, 5)
    cosines = crowd.cosines(gradients).numpy()
    clients, components = linear_sum_assignment(-cosines)
    assert np.sum(cosines[clients, components] > 0.9) >= 4
    assert float(crowd.plain().median()) < 0.8
    errors = [relative_error(hidden[c], crowd.hidden[i]) for i, c in zip(clients, components, strict=True)]
    assert np.median(errors) < 0.5


def test_images_are_found_in_the_sum():
    """Known activations recover five clients' digits from the sum; independent components recover some."""
    crowd = Crowd(5)
    private, unrelated = digits(5, side=12)[0].numpy(), digits(5, side=12, first=500)[0].numpy()
    mean_image = digits(200, side=12, first=1000)[0].mean(dim=0).numpy()
    comparisons = {}
    for name in ("channels-known", "channels-ica"):
        settings = AttackSettings(optimisation=QUICK, hidden=crowd.hidden if ATTACKS[name].gets_hidden else None)
        results = ATTACKS[name].run([crowd.sum], crowd.knowledge, settings)
        assert [result.images.shape for result in results] == [(1, 1, 12, 12)] * 5
        found = np.concatenate([result.images for result in results])
        comparisons[name] = compare(found, private, unrelated, mean_image)
    assert verdict([comparisons["channels-known"]]) == "recovered"
    assert np.median(comparisons["channels-known"].advantage) > CLEAR_MARGIN
    assert list(comparisons["channels-known"].matched.order) == [0, 1, 2, 3, 4]
    assert verdict([comparisons["channels-ica"]]) != "recovered nothing"
