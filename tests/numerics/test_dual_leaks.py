"""What PRIV-HFL's dual variables reveal, in float64: as printed, and in the compact form with a rotation."""

import numpy as np
import pytest
from dense import Dense
from test_dual import STEPS

from experiments.dual.toy_problems import DIM, NUM_CLIENTS, LeastSquares, Logistic, ToyFederation, distance, incidence
from hyperfl_flwr.privacy.secret_rotation import Mixing
from hyperfl_flwr.training.dual_averaging import ChainServer, DualRule

RATE = 0.05
PROBLEMS = [LeastSquares.random(), Logistic()]


class Watched(Dense):
    """The dense algorithm, keeping the nu_i that every client sends."""

    def round(self, clients=None):
        before, mean = self.theta.copy(), self.nu
        super().round(clients)
        self.sent = [mean + self.num_clients * block @ change
                     for block, change in zip(self.blocks, self.theta - before, strict=True)]  # fmt: skip


def chain_rule(**changes):
    return DualRule(realisation="chain", order="alternating", step=STEPS["chain"], **changes)


@pytest.mark.parametrize("problem", PROBLEMS, ids=["least squares", "logistic"])
@pytest.mark.parametrize("projection", [False, True])
def test_as_printed_any_client_rebuilds_every_model(problem, projection):
    """nu_bar has all theta_b - theta_(b+1), so a client can follow the chain from its own model in both directions."""
    printed = Dense(problem, chain_rule(projection=projection), incidence("chain"), rate=RATE, steps=3)
    for _ in range(7):
        printed.round()
    differences = printed.nu[: (NUM_CLIENTS - 1) * DIM].reshape(NUM_CLIENTS - 1, DIM)
    assert np.abs(differences).max() > 0.1
    for me in range(NUM_CLIENTS):
        up = [printed.theta[me] - differences[me:b].sum(axis=0) for b in range(me, NUM_CLIENTS)]
        down = [printed.theta[me] + differences[b:me].sum(axis=0) for b in range(me)]
        np.testing.assert_allclose(np.stack(down + up), printed.theta, rtol=0, atol=5e-15)


@pytest.mark.parametrize("problem", PROBLEMS, ids=["least squares", "logistic"])
def test_as_printed_the_server_rebuilds_every_model_and_gradient(problem):
    """theta_i(0) = (nu_i(0))_i / N, the change is (nu_i - nu_bar)_i / N, and after one step grad f_i = -change/a - r_i.

    (nu_i)_i is the block of client i's own first constraint, which has its model with a sign.
    """
    printed = Watched(problem, chain_rule(), incidence("chain"), rate=RATE, steps=1)
    place = [(min(i, NUM_CLIENTS - 2), 1 if i < NUM_CLIENTS - 1 else -1) for i in range(NUM_CLIENTS)]

    def own_block(vector, client):
        block, sign = place[client]
        return sign * vector[block * DIM : (block + 1) * DIM]

    first = [NUM_CLIENTS * block @ theta for block, theta in zip(printed.blocks, printed.theta, strict=True)]
    models = np.stack([own_block(nu, i) / NUM_CLIENTS for i, nu in enumerate(first)])
    for _ in range(7):
        broadcast, truth = printed.nu, printed.theta.copy()
        np.testing.assert_allclose(models, truth, rtol=0, atol=1e-14)
        printed.round()
        changes = [own_block(nu - broadcast, i) / NUM_CLIENTS for i, nu in enumerate(printed.sent)]
        for i, change in enumerate(changes):
            force = printed.blocks[i].T @ printed.multiplier  # of this round, as lambda is updated first
            np.testing.assert_allclose(-change / RATE - force, problem.gradient(i, truth[i]), rtol=0, atol=2e-13)
        models = models + np.stack(changes)


class Behind:
    """A server that sees only rotated vectors; clients rotate what it sends back."""

    def __init__(self, server, mixing):
        self.server, self.mixing, self.seen = server, mixing, []

    @property
    def total(self):
        return self.mixing.unmix(self.server.total)

    def force(self, client):
        return self.mixing.unmix(self.server.force(client))

    def advance(self, increments, *rest):
        if isinstance(increments, dict):
            mixed = {client: self.mixing.mix(each) for client, each in increments.items()}
            self.seen.append((increments[0], mixed[0]))
        else:
            mixed = self.mixing.mix(increments)
            self.seen.append((increments, mixed))
        self.server.advance(mixed, *rest)


class BehindChain(Behind, ChainServer):
    """Like `Behind`, for a chain."""


@pytest.mark.parametrize("order", ["alternating", "published"])
@pytest.mark.parametrize(("realisation", "projection"), [("mean", False), ("chain", False), ("chain", True)])
def test_a_rotation_changes_no_model(order, realisation, projection):
    """After 60 rounds the models are equal up to rounding, but not with the projection, which acts on numbers."""
    problem = LeastSquares.random()
    rule = DualRule(realisation=realisation, order=order, step=STEPS[realisation], sigma=0.3, projection=projection)
    plain, mixed = (ToyFederation(problem, rule, rate=0.03, steps=3) for _ in range(2))
    behind = Behind if realisation == "mean" else BehindChain
    mixed.server = behind(mixed.server, Mixing(b"a key of sixteen", DIM))
    for _ in range(60):
        plain.round()
        mixed.round()
    apart = float(np.abs(mixed.theta - plain.theta).max())
    assert apart > 1e-3 if projection else apart < 1e-12
    change, travelled = mixed.server.seen[0]
    assert float((change - travelled).norm()) > 0.1 * float(change.norm())


def test_a_rotated_chain_with_projection_has_the_same_optimum():
    problem = LeastSquares.random()
    mixed = ToyFederation(problem, chain_rule(projection=True))
    mixed.server = BehindChain(mixed.server, Mixing(b"a key of sixteen", DIM))
    for _ in range(400):
        mixed.round()
    assert distance(mixed.theta, problem.optimum()) < 1e-3
