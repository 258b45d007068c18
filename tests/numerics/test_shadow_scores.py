"""Membership inference: the scores against formulas by hand, ROC curves against scikit-learn, and the draws."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from hyperfl_flwr.attacks.shadow_scores import likelihood_ratios, loss_scores, scaled_confidences
from hyperfl_flwr.audit.membership.results import (
    LEAST_FALSE_POSITIVES,
    Outcome,
    Scored,
    is_recognised,
    non_members_needed,
    outcome,
)
from hyperfl_flwr.audit.membership.shadow_data import draw
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.metrics import intervals, roc


def test_scaled_confidences_are_those_of_the_softmax() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.0, 0.0], [5.0, 1.0, 1.0]])
    labels = torch.tensor([2, 0, 1])
    shares = torch.softmax(logits.double(), dim=1)[range(3), labels].numpy()
    np.testing.assert_allclose(scaled_confidences(logits, labels), np.log(shares / (1 - shares)), rtol=1e-12)
    np.testing.assert_allclose(loss_scores(scaled_confidences(logits, labels)), np.log(shares), rtol=1e-12)


def test_the_loss_threshold_is_of_the_last_round() -> None:
    """The confidences of the first round, which say the opposite, do not count."""
    drawn = np.array([[1, 0], [0, 1], [1, 0], [0, 1]], bool)
    right, wrong = np.where(drawn, 1.0, -1.0), np.where(drawn, -1.0, 1.0)
    assert outcome("loss", [np.stack([wrong, right], axis=1)], [drawn]).whole.area() == 1
    assert outcome("loss", [np.stack([right, wrong], axis=1)], [drawn]).whole.area() == 0


@pytest.mark.parametrize(("lowest", "expected"), [(0.49, False), (0.51, True)])
def test_members_are_recognised_if_an_interval_lies_above_guessing(lowest: float, expected: bool) -> None:
    guessing = {"auc": {"value": 0.4, "interval": [0.3, 0.5]}}
    one = {"auc": {"value": 0.6, "interval": [lowest, 0.7]}}
    for attacks in ({"loss": one, "lira": guessing}, {"loss": guessing, "lira": one}):
        assert is_recognised({"views": {"server": attacks}}, "server") is expected


def test_a_confidence_of_almost_one_stays_finite() -> None:
    """The softmax of logits 500 and -500 is 1 in float64, and 1 - p is 0."""
    logits = torch.tensor([[500.0, -500.0]])
    assert scaled_confidences(logits, torch.tensor([0])) == pytest.approx([1000.0])
    assert scaled_confidences(logits, torch.tensor([1])) == pytest.approx([-1000.0])
    np.testing.assert_allclose(loss_scores(np.array([1000.0, -1000.0])), [0.0, -1000.0], atol=1e-12)


def test_the_likelihood_ratio_by_hand() -> None:
    """Two samples, four shadow models, two queries; variances are pooled over the samples, for each query."""
    trained_on = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], bool)
    shadows = np.array([[[3.0, 0.0], [1.0, 5.0]], [[5.0, 2.0], [2.0, 6.0]],
                        [[0.0, 4.0], [0.0, 9.0]], [[1.0, 8.0], [4.0, 9.5]]])  # fmt: skip
    observed = np.array([[4.5, 1.5], [1.0, 8.0]])
    expected = np.zeros(2)
    for query in range(2):
        found = shadows[:, query]
        values_in = [found[:2, 0], found[2:, 1]]  # of the first and of the second sample
        values_out = [found[2:, 0], found[:2, 1]]
        density = {}
        for name, values in {"in": values_in, "out": values_out}.items():
            deviation = np.sqrt(np.mean([np.var(each, ddof=1) for each in values]))
            means = [np.mean(each) for each in values]
            density[name] = stats.norm(means, deviation).logpdf(observed[query])
        expected += density["in"] - density["out"]
    np.testing.assert_allclose(likelihood_ratios(observed, shadows, trained_on), expected, rtol=1e-12)


def test_a_round_that_all_trainings_begin_with_has_no_say() -> None:
    """A second query with equal confidences everywhere, and variance 0, changes nothing."""
    rng = np.random.default_rng(0)
    trained_on = draw(0, "any", 10, 8)
    shadows = rng.normal(size=(8, 1, 10)) + trained_on[:, None]
    observed = rng.normal(size=(1, 10))
    constant = np.arange(10.0)[None]
    more = np.concatenate([shadows, np.tile(constant, (8, 1, 1))], axis=1)
    found = likelihood_ratios(np.concatenate([observed, constant]), more, trained_on)
    np.testing.assert_allclose(found, likelihood_ratios(observed, shadows, trained_on), atol=1e-9)


def test_a_sample_needs_two_models_on_either_side() -> None:
    trained_on = np.array([[True], [True], [True], [False]])
    with pytest.raises(ValueError, match="at least 2 of the 4 shadow models"):
        likelihood_ratios(np.zeros((1, 1)), np.zeros((4, 1, 1)), trained_on)


def test_the_roc_curve_is_that_of_scikit_learn() -> None:
    """With ties, which count half in the area."""
    rng = np.random.default_rng(1)
    members, others = np.round(rng.normal(0.5, 1, 90), 1), np.round(rng.normal(0, 1, 70), 1)
    truth, scores = np.repeat([1, 0], [90, 70]), np.concatenate([members, others])
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    np.testing.assert_allclose(roc.curve(members, others), (false, true))
    assert roc.area(members, others) == pytest.approx(roc_auc_score(truth, scores), rel=1e-12)
    for rate in (0.05, 0.1, 0.5):
        found = Scored(members=members, others=others).true_positives(rate)
        assert found == pytest.approx(true[false <= rate].max())


def test_a_rate_below_the_resolution_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 1 of the negatives"):
        roc.threshold_at(np.arange(99.0), 0.01)
    assert roc.threshold_at(np.arange(100.0), 0.01) == 98.0
    with pytest.raises(ValueError, match="positives and negatives, got 0 and 2"):
        roc.area(np.zeros(0), np.zeros(2))


def test_true_positives_need_enough_non_members() -> None:
    """Five false positives at 1 % are those of 500 non-members; with 499 nothing is said."""
    assert non_members_needed(0.01) == LEAST_FALSE_POSITIVES / 0.01 == 500
    scores = np.linspace(0, 1, 500)
    enough = Scored(members=scores, others=scores)
    assert Outcome(whole=enough, without=[enough] * 3).true_positives(0.01) == {"value": 0.01, "interval": [0.01, 0.01]}
    fewer = Scored(members=scores, others=scores[1:])
    assert Outcome(whole=fewer, without=[fewer] * 3).true_positives(0.01) is None


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    values = [0.2, 0.5, 0.4, 0.9]
    without = [np.mean(values[:k] + values[k + 1 :]) for k in range(4)]
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    assert intervals.of_jackknife(mean, without) == pytest.approx(intervals.of_mean(mean, deviation, 4))
    assert intervals.of_jackknife(0.5, [0.5]) is None


def test_each_sample_is_in_half_of_the_federations_and_of_every_attack_s_shadows() -> None:
    drawn = draw(3, "client-0", 30, 10)
    assert drawn.sum(axis=0).tolist() == [5] * 30
    assert drawn.sum(axis=1).tolist() == [15] * 10
    for pair in range(5):
        assert np.array_equal(drawn[2 * pair], ~drawn[2 * pair + 1])
        assert np.delete(drawn, [2 * pair, 2 * pair + 1], axis=0).sum(axis=0).tolist() == [4] * 30
    assert np.array_equal(drawn, draw(3, "client-0", 30, 10))
    assert not np.array_equal(drawn, draw(3, "client-1", 30, 10))
    assert not np.array_equal(drawn, draw(4, "client-0", 30, 10))


@pytest.mark.parametrize(("size", "federations"), [(10, 6), (10, 9), (9, 8)])
def test_odd_numbers_and_few_federations_are_refused(size: int, federations: int) -> None:
    with pytest.raises(ConfigError, match="come in pairs, at least 8"):
        draw(0, "any", size, federations)


def confidences(rng: np.random.Generator, drawn: np.ndarray, shift: float) -> np.ndarray:
    """Return confidences of one query in which samples differ by nature, and members by `shift` standard deviations."""
    noise = rng.normal(size=drawn.shape) + 2 * rng.normal(size=drawn.shape[1])
    return (noise + shift * drawn)[:, None]


def test_members_are_recognised_where_they_differ() -> None:
    """At 3 standard deviations the best possible area is Phi(3 / sqrt 2) = 0.983; the loss threshold is far below it.

    The spread of the samples, 2, widens the difference of two scores to sqrt(2 (1 + 4)): Phi(3 / 3.16) = 0.83.
    """
    drawn = draw(0, "any", 400, 16)
    values = confidences(np.random.default_rng(0), drawn, 3.0)
    by_ratio, by_loss = (outcome(name, [values], [drawn]).area() for name in ("lira", "loss"))
    assert 0.95 < by_ratio["value"] < stats.norm.cdf(3 / np.sqrt(2)) + 0.01
    assert by_loss["value"] == pytest.approx(stats.norm.cdf(3 / np.sqrt(10)), abs=0.02)
    assert by_ratio["interval"][0] > by_loss["interval"][1]


def test_the_interval_of_a_game_without_members_holds_guessing_as_often_as_stated() -> None:
    """60 games with nothing to find: an interval of 95 % misses 0.5 in more than 9 with a probability below 1e-3."""
    missed, areas = 0, []
    for seed in range(60):
        drawn = draw(seed, "any", 40, 8)
        found = outcome("lira", [confidences(np.random.default_rng(seed), drawn, 0.0)], [drawn]).area()
        low, high = found["interval"]
        missed += not low <= 0.5 <= high
        areas.append(found["value"])
    assert stats.binom.sf(9, 60, 0.05) < 1e-3
    assert missed <= 9
    assert abs(np.mean(areas) - 0.5) < 4 * np.std(areas) / np.sqrt(60)
