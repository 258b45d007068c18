"""PRIV-HFL's compact dual updates against the printed algorithm, exact optima, and stability formulas."""

import numpy as np
import pytest
import torch
from dense import Dense

from experiments.dual.cost import computed_cost
from experiments.dual.toy_problems import DIM, NUM_CLIENTS, LeastSquares, Logistic, ToyFederation, distance, incidence
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.methods.priv_hfl import PrivHFLConfig
from hyperfl_flwr.training.dual_averaging import DualRule
from hyperfl_flwr.training.dual_stability import (
    default_step,
    dual_rule,
    effective_rate,
    is_stable,
    sampled_growth,
    smallest_stable_curvature,
    stability_warnings,
)

FORMS = [("mean", False), ("chain", False), ("chain", True)]
ORDERS = ["alternating", "published"]
STEPS = {"mean": 0.4, "chain": 0.1}
"""Dual steps with the same kappa l_max beta = 0.8."""


class Disturbed(ToyFederation):
    """A federation with visible multipliers; `fault` switches off one of the rules for absent clients."""

    def __init__(self, *args, fault="", **settings):
        super().__init__(*args, **settings)
        self.fault = fault
        self.naive = np.zeros_like(self.theta)

    def multipliers(self):
        """Return the multipliers [N, m] that the clients would add to their gradients now."""
        if self.fault == "no catch-up":
            return self.naive
        kept = [(client.change, client.total) for client in self.clients]
        found = np.stack([self.force(i).numpy() for i in range(self.num_clients)])
        for client, (change, total) in zip(self.clients, kept, strict=True):
            client.change, client.total = change, total
        return found

    def force(self, client):
        if self.fault != "no catch-up":
            return super().force(client)
        residual = self.theta[client] - self.problem.start - self.server.consensus.numpy()
        self.naive[client] += 2 * self.rule.step * residual  # mu_i moves in the client's own rounds only
        return torch.from_numpy(self.naive[client])

    def restore(self, client, theta, kept):
        if self.fault == "unacknowledged":
            self.last[client] = self.rounds + 1
        else:
            super().restore(client, theta, kept)


@pytest.mark.parametrize("problem", [LeastSquares.random(), Logistic()], ids=["least squares", "logistic"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("realisation", "projection"), FORMS)
@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_the_compact_forms_are_the_printed_algorithm(problem, order, realisation, projection, sigma):
    """60 rounds of 3 local steps, with some clients absent in every third, equal the dense algorithm."""
    rule = DualRule(realisation=realisation, order=order, step=STEPS[realisation], sigma=sigma, projection=projection)
    ours = ToyFederation(problem, rule, rate=0.03, steps=3)
    printed = Dense(problem, rule, incidence(realisation), rate=0.03, steps=3)
    rng = np.random.default_rng(1)
    for number in range(60):
        present = sorted(rng.choice(NUM_CLIENTS, 3, replace=False)) if number % 3 == 2 else range(NUM_CLIENTS)
        ours.round(present)
        printed.round(present)
        np.testing.assert_allclose(ours.theta, printed.theta, rtol=0, atol=1e-12)
    assert distance(ours.theta, problem.start) > 0.1


@pytest.mark.parametrize("problem", [LeastSquares.random(), Logistic()], ids=["least squares", "logistic"])
@pytest.mark.parametrize(("realisation", "projection"), FORMS)
def test_without_sigma_all_clients_reach_the_common_optimum(problem, realisation, projection):
    """In the alternating order all clients reach the optimum, found by a linear system or by Newton's method."""
    federation = ToyFederation(
        problem, DualRule(realisation=realisation, order="alternating", step=STEPS[realisation], projection=projection)
    )
    for _ in range(1500):
        federation.round()
    assert distance(federation.theta, problem.optimum()) < 1e-9


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize(
    ("realisation", "projection", "kappa"), [("mean", False, 2), ("chain", False, 2), ("chain", True, 1)]
)
def test_with_sigma_clients_end_where_the_fixed_point_is(realisation, projection, kappa, steps):
    """Clients end at min sum f_i + kappa / (2 sigma beta) |C theta|^2, a linear system; kappa is 1 with the projection.

    The result does not depend on the number of local steps. The projected run converges slowly.
    """
    problem = LeastSquares.random()
    step = STEPS[realisation] if steps == 1 else default_step(realisation, 0.1, steps)
    rule = DualRule(realisation=realisation, order="alternating", step=step, sigma=0.03 / step, projection=projection)
    federation = ToyFederation(problem, rule, steps=steps)
    for _ in range(2500 if projection else 1500):
        federation.round()
    wanted = problem.biased(incidence(realisation), kappa / (rule.sigma * rule.step))
    assert distance(federation.theta, wanted) < (1e-3 if projection else 1e-8)
    assert distance(federation.theta, problem.optimum()) > 0.01


@pytest.mark.parametrize(("realisation", "projection"), FORMS)
def test_the_published_order_diverges_where_the_alternating_one_converges(realisation, projection):
    """With rate 0.1 and curvatures from 0.14, the formula gives instability below 0.8, or nowhere.

    The first holds for the published order and the second for the alternating one. A tenth of the dual step makes the
    published order converge as well.
    """
    problem, errors = LeastSquares.random(), {}
    for order in ORDERS:
        rule = DualRule(realisation=realisation, order=order, step=STEPS[realisation], projection=projection)
        wanted = 0.0 if order == "alternating" else 0.8
        assert smallest_stable_curvature(rule, 0.1, 1) == pytest.approx(wanted, rel=0.1)
        federation = ToyFederation(problem, rule, steps=1)
        for _ in range(800):
            federation.round()
        errors[order] = distance(federation.theta, problem.optimum())
    assert errors["alternating"] < 1e-2
    assert errors["published"] > 10
    small = DualRule(realisation=realisation, order="published", step=STEPS[realisation] / 10, projection=projection)
    assert is_stable(small, 0.1, 1, curvature=0.14)
    federation = ToyFederation(problem, small, steps=1)
    for _ in range(3000):
        federation.round()
    assert distance(federation.theta, problem.optimum()) < 0.02


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("realisation", ["mean", "chain"])
@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_the_limits_are_those_of_the_spectral_radius(order, realisation, steps, sigma):
    """`is_stable` agrees with numpy's eigenvalues of a round's 2x2 matrix on (theta, mu), on both sides of 1."""
    rate = 0.05
    eigenvalue = {"mean": 1, "chain": 4}[realisation]

    def radius(step, curvature):
        rho = (1 - rate * curvature) ** steps
        reach = (1 - rho) / curvature if curvature else rate * steps
        decay, gain = 1 - sigma * step**2, 2 * step * eigenvalue
        if order == "alternating":  # mu' = D mu + gain theta, theta' = rho theta - reach mu'
            matrix = [[rho - reach * gain, -reach * decay], [gain, decay]]
        else:  # theta' = rho theta - reach mu, mu' = D mu + gain theta
            matrix = [[rho, -reach], [gain, decay]]
        return max(abs(np.linalg.eigvals(matrix)))

    seen = set()
    for step in np.geomspace(1e-3, 100, 80):
        rule = DualRule(realisation=realisation, order=order, step=step, sigma=sigma)
        for curvature in (0.0, 0.01, 0.1, 1.0):
            found = radius(step, curvature)
            if abs(found - 1) > 1e-9:  # flat directions without sigma stay on the unit circle
                assert is_stable(rule, rate, steps, curvature) == (found < 1), (step, curvature)
                seen.add(found < 1)
    assert seen == {True, False}


def disturbed(rule, fault="", rounds=1500, lossy=True):
    """Return a federation after rounds with 60 % of the clients and, if `lossy`, with 30 % of their replies lost."""
    federation, rng = Disturbed(LeastSquares.random(), rule, fault=fault), np.random.default_rng(2)
    for _ in range(rounds):
        present = sorted(rng.choice(NUM_CLIENTS, 3, replace=False).tolist())
        federation.round(present, [i for i in present if lossy and rng.random() < 0.3])
    return federation


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("realisation", "projection"), FORMS)
def test_sampling_and_lost_replies_change_neither_the_sum_nor_the_optimum(order, realisation, projection):
    """sum_i mu_i stays 0, and the clients reach the optimum of a linear system."""
    rule = DualRule(realisation=realisation, order=order, step=STEPS[realisation] / 10, projection=projection)
    federation = disturbed(rule)
    assert np.abs(federation.multipliers().sum(axis=0)).max() < 1e-9
    assert np.abs(federation.multipliers()).max() > 0.1
    assert distance(federation.theta, LeastSquares.random().optimum()) < (
        1e-6 if rule.order == "alternating" and realisation == "mean" else 1e-2
    )


@pytest.mark.parametrize("fault", ["no catch-up", "unacknowledged"])
def test_without_either_rule_clients_end_elsewhere(fault):
    """The same run fails without catching up, and when starting from a model that the server has not counted."""
    rule = DualRule(realisation="mean", order="alternating", step=0.04)
    federation = disturbed(rule, fault, lossy=fault == "unacknowledged")
    assert np.abs(federation.multipliers().sum(axis=0)).max() > 0.1
    assert distance(federation.theta, LeastSquares.random().optimum()) > 0.1


@pytest.mark.parametrize("realisation", ["mean", "chain"])
@pytest.mark.parametrize("leaver", [0, 2, NUM_CLIENTS - 1])
def test_a_late_client_and_one_that_leaves(realisation, leaver):
    """Client 1 joins in round 40, another leaves after round 100: the rest reach their own optimum."""
    problem = LeastSquares.random()
    federation = Disturbed(problem, DualRule(realisation=realisation, order="alternating", step=STEPS[realisation]))
    for number in range(100):
        federation.round([i for i in range(NUM_CLIENTS) if i != 1 or number >= 40])
    if realisation == "chain":
        federation.server.remove_client(leaver)
    else:
        gone = federation.clients.pop(leaver)
        federation.server.remove_client(gone.change, gone.total, NUM_CLIENTS)
    stay = [i for i in range(NUM_CLIENTS) if i != leaver]
    problem.hessians, problem.slopes = ([kept[i] for i in stay] for kept in (problem.hessians, problem.slopes))
    federation.theta, federation.num_clients = federation.theta[stay], NUM_CLIENTS - 1
    federation.last.pop(leaver)
    for _ in range(1500):
        federation.round(range(NUM_CLIENTS - 1))
    assert np.abs(federation.multipliers().sum(axis=0)).max() < 1e-9
    assert distance(federation.theta, problem.optimum(range(NUM_CLIENTS - 1))) < 1e-8


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_sampled_growth_is_that_of_a_random_product(fraction):
    """The growth rate equals that of simulating x' = x - alpha K mu', mu' = mu + 2 beta k x with random gaps k.

    This is a flat direction with the mean far away from this client.
    """
    rng = np.random.default_rng(0)
    rule = DualRule(realisation="mean", order="alternating", step=0.5)
    rate, steps, pull = 0.02, 5, 2 * 0.5 * 0.1
    state, growth, gaps = np.array([1.0, 0.0]), 0.0, rng.geometric(fraction, 20000)
    for gap in gaps:
        multiplier = state[1] + 2 * rule.step * gap * state[0]
        state = np.array([state[0] - rate * steps * multiplier, multiplier])
        size = float(np.hypot(state[0], state[1] * rate * steps / pull**0.5))
        state, growth = state / size, growth + np.log(size)
    assert growth / gaps.sum() == pytest.approx(sampled_growth(rule, rate, steps, fraction), rel=0.3)


def read(**changes):
    """Return the config of a run with numbers instead of `auto`."""
    changes = {"method": "priv-hfl"} | {key.replace("_", "-"): value for key, value in changes.items()}
    return resolved(RunConfig.from_flat(default_settings() | changes))


def warnings(config):
    rate = effective_rate(config.learning_rate, config.momentum)
    return stability_warnings(config.section(PrivHFLConfig), rate, config.fraction_train, config.num_rounds)


def test_the_default_step_is_stable_and_others_are_warned_of():
    """The step is 1 / (kappa l alpha K), by hand: alpha K = 0.02 / (1 - 0.5) * 20 = 0.8, kappa = 2, l = 1 or 4."""
    base = {"learning-rate": 0.02, "momentum": 0.5, "priv-hfl.local-steps": 20}
    assert dual_rule(read(**base).priv_hfl).decay == pytest.approx(0.9)  # sigma = auto
    assert warnings(read(**base)) == []
    base |= {"priv-hfl.sigma": 0.0}
    for realisation, wanted in (("mean", 1 / 1.6), ("chain", 1 / 6.4)):
        config = read(**base, **{"priv-hfl.realisation": realisation})
        assert dual_rule(config.section(PrivHFLConfig)).step == pytest.approx(wanted)
        assert warnings(config) == []
        sampled = read(**base, **{"priv-hfl.realisation": realisation, "fraction-train": 0.5})
        assert dual_rule(sampled.priv_hfl).step == pytest.approx(wanted / 20)
    (text,) = warnings(read(**base, **{"priv-hfl.order": "published"}))
    assert "curvature below 1.25; set priv-hfl.order = alternating" in text  # 2 beta
    (text,) = warnings(read(**base, **{"priv-hfl.dual-step": 2.6}))
    assert "set priv-hfl.dual-step below 2.5" in text  # 4 / 1.6
    (text,) = warnings(read(**{**base, "priv-hfl.dual-step": 2.6, "priv-hfl.sigma": 0.1}))
    limit = float(text.rsplit(" ", 1)[1].removesuffix(";"))
    assert 1.6 * limit == pytest.approx(2 * (2 - 0.1 * limit**2), rel=0.01)
    (text,) = warnings(read(**base, **{"fraction-train": 0.5, "priv-hfl.dual-step": 0.625, "num-rounds": 17}))
    assert "factor e every 16 rounds" in text


def test_wrong_rules_are_refused():
    """Each error says what is wrong."""
    with pytest.raises(ValueError, match="step must be positive"):
        DualRule(realisation="mean", order="alternating", step=0.0)
    with pytest.raises(ValueError, match="chain"):
        DualRule(realisation="mean", order="alternating", step=0.1, projection=True)
    with pytest.raises(ConfigError, match=r"needs priv-hfl\.realisation = chain"):
        read(**{"priv-hfl.projection": True})


@pytest.mark.parametrize("alike", [True, False])
def test_the_problems_optima_are_optima(alike):
    """Gradients vanish there, and second derivatives equal differences of gradients; `alike` clients share these."""
    for problem in (LeastSquares.random(alike=alike), Logistic(alike=alike)):
        optimum = problem.optimum()
        assert np.abs(sum(problem.gradient(i, optimum) for i in range(NUM_CLIENTS))).max() < 1e-12
        matrix = incidence("chain")
        biased = problem.biased(matrix, 0.7)
        slopes = np.stack([problem.gradient(i, each) for i, each in enumerate(biased)])
        np.testing.assert_allclose(slopes, -0.7 * matrix.T @ matrix @ biased, atol=1e-12)
        hessians = [problem.hessian(i, optimum) for i in range(NUM_CLIENTS)]
        assert (np.ptp(hessians, axis=0).max() < 1e-12) == alike
        shift = 1e-6 * np.eye(len(optimum))
        moved = [problem.gradient(1, optimum + each) - problem.gradient(1, optimum - each) for each in shift]
        np.testing.assert_allclose(np.array(moved) / 2e-6, hessians[1], atol=1e-8)


def test_the_printed_algorithm_costs_what_is_computed():
    """Costs match the reference's vectors: lambda and nu each way, plus the model at a client; 4 bytes a number."""
    rule = DualRule(realisation="chain", order="published", step=0.01, projection=True)
    printed = Dense(LeastSquares.random(), rule, incidence("chain"), rate=0.1, steps=1)
    printed.round()
    sent = 4 * (printed.nu.size + printed.multiplier.size)
    cost = computed_cost("dense", NUM_CLIENTS, DIM)
    assert (cost.bytes_up_per_client_round, cost.bytes_down_per_client_round) == (sent, sent)
    assert (cost.server_state_bytes, cost.client_state_bytes) == (sent, sent + 4 * printed.theta[0].size)
