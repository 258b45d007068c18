"""PRIV-HFL's clients against a written-out optimiser and multipliers: what they train, send and keep."""

import numpy as np
import pytest
import torch
from plain import Sgd, cross_entropy, digits_cnn, leaves, random_samples

from clients.engine.context import ClientContext
from clients.priv_hfl import PrivHFLClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.node.private_state import PrivateState

STEPS, BETA, SIGMA = 4, 0.3, 0.5
DECAY = 1 - SIGMA * BETA**2


class OneClient:
    """A client with 13 random images, private state on disk, and the initial values for the reference."""

    def __init__(self, folder, realisation, more=()):
        self.samples = random_samples(13, (1, 8, 8), 10)
        self.samples.train_images = self.samples.train_images.float()
        images, labels = self.samples.train_images, self.samples.train_labels
        changes = {
            "method": "priv-hfl", "learning-rate": 0.05, "batch-size": 5,
            "momentum": 0.5, "weight-decay": 0.03, "priv-hfl.sigma": SIGMA,
            "priv-hfl.dual-step": BETA, "priv-hfl.local-steps": STEPS, "priv-hfl.realisation": realisation,
            "priv-hfl.clip-norm": 0.0,
        } | dict(more)  # fmt: skip
        self.context = ClientContext(
            config=RunConfig.from_flat(default_settings() | changes), client=0, device=torch.device("cpu"),
            data=ClientData(
                train_images=images, train_labels=labels, test_images=images, test_labels=labels,
                augmentation=self.samples.augmentation, num_classes=10,
            ),
            state=PrivateState(folder, "experiment", 0),
        )  # fmt: skip
        self.values = ordinary_parameters(build_target("cnn", (1, 8, 8), 10), torch_generator(0, "model"))

    def fit(self, received, number, version):
        """Return the reply and the stored model of one round."""
        client = PrivHFLClient(self.context)
        self.samples.seen.clear()
        config = {"round": number, "version": version, "kept-version": version}
        (reply,), num_examples, _ = client.fit([received.numpy().copy()], config)
        assert (num_examples, len(self.samples.seen)) == (13, STEPS)
        stored = self.context.state.load(number)
        return torch.from_numpy(reply), {name: torch.from_numpy(stored[f"model/{name}"]) for name in self.values}

    def reference(self, values, force):
        """Return the model after SGD on cross-entropy + <force, theta>, on the batches that the client used."""
        names, optimiser = list(values), Sgd(0.05, 0.5, 0.03)
        for images, labels in self.samples.batches(self.samples.seen):
            values = leaves(values, names)
            short = {name.removeprefix("extractor."): value for name, value in values.items()}
            logits = digits_cnn(images, short) @ values["classifier.weight"].T + values["classifier.bias"]
            loss = cross_entropy(logits, labels) + vector(values) @ force
            values = optimiser.step(values, loss, names)
        return values


def vector(values):
    return torch.cat([value.flatten() for value in values.values()])


def assert_equal(got, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_chains_client_follows_the_force_that_it_is_sent(tmp_path):
    """Four SGD steps with momentum and decay on the loss plus a linear term; the reply is after minus before."""
    one = OneClient(tmp_path, "chain")
    force = 0.1 * torch.from_numpy(np.random.default_rng(1).standard_normal(len(vector(one.values)))).float()
    reply, stored = one.fit(force, 1, 0)
    wanted = one.reference(one.values, force)
    assert_equal(stored, wanted)
    torch.testing.assert_close(reply, vector(wanted) - vector(one.values), rtol=1e-4, atol=1e-6)
    without = one.reference(one.values, 0 * force)
    assert (vector(wanted) - vector(without)).norm() > 0.1 * reply.norm()


def test_a_client_continues_from_what_it_has_sent(tmp_path):
    """With clipping its model is the start plus the clipped change, which is what the server counts."""
    one = OneClient(tmp_path, "chain", {"privacy.clip-norm": 0.01})
    start = vector(one.values)
    reply, stored = one.fit(torch.zeros(len(start)), 1, 0)
    assert float(reply.norm()) == pytest.approx(0.01, rel=1e-4)
    torch.testing.assert_close(vector(stored), start + reply, rtol=0, atol=1e-7)


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("second", [4, 6])
def test_a_clients_multiplier_is_that_of_all_rounds(tmp_path, first, second):
    """A client absent in most rounds has mu <- D mu + 2 beta (x_i - mean x) of every round, with x = theta - theta_0.

    Here S consists of random mean changes. In round 7 the client starts from its first version, as the second reply was
    lost; the second version then has no effect.
    """
    one, rng = OneClient(tmp_path, "mean"), np.random.default_rng(2)
    start = vector(one.values)
    means = [0.05 * torch.from_numpy(rng.standard_normal(len(start))) for _ in range(7)]  # after rounds 1, 2, ...
    models = {0: one.values}

    def expected(number, versions):
        """Return mu in a round, and S as the server sends it; `versions` holds the model's version after each round."""
        multiplier = total = torch.zeros(len(start), dtype=torch.float64)
        for done in range(1, number):
            change = (vector(models[versions(done)]) - start).double()
            multiplier = DECAY * multiplier + 2 * BETA * (change - means[done - 1])
            total = DECAY * total + means[done - 1]
        return multiplier.float(), total.float()

    plan = [
        (first, 0, lambda done: 0),
        (second, first, lambda done: 0 if done < first else first),
        (7, first, lambda done: 0 if done < first else first),
    ]
    for number, version, versions in plan:
        multiplier, total = expected(number, versions)
        reply, models[number] = one.fit(total, number, version)
        wanted = one.reference(models[version], multiplier)
        assert_equal(models[number], wanted)
        torch.testing.assert_close(reply, vector(wanted) - vector(models[version]), rtol=1e-4, atol=1e-5)
