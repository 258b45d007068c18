"""The membership game: its theorem by simulation and by hand, and the game on the real noisy steps."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

from hyperfl_flwr.audit.membership.client_game import ClientGame
from hyperfl_flwr.audit.membership.dp_games import GUESSED, Guesses, chance, lower_bound
from hyperfl_flwr.audit.membership.record_game import RecordGame
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.privacy.accounting import Noise, client_noise, record_noise

EPSILON, DELTA, CONFIDENCE = 4.0, 1e-5, 0.95


def by_hand(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Theorem 5.2, written with scipy's binomial distribution and a loop."""
    correct = stats.binom(guesses.made, math.exp(epsilon) / (1 + math.exp(epsilon)))

    def f(v: int) -> float:
        return float(correct.sf(v - 1))

    v = guesses.correct
    most = max((f(v - i) - f(v)) / i for i in range(1, guesses.canaries + 1))
    return min(1.0, f(v) + 2 * guesses.canaries * delta * most)


@pytest.mark.parametrize(("canaries", "made", "correct"), [(50, 10, 9), (50, 50, 31), (200, 40, 40), (30, 6, 1)])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
def test_the_chance_is_that_of_the_theorem(
    canaries: int, made: int, correct: int, epsilon: float, delta: float
) -> None:
    guesses = Guesses(canaries=canaries, made=made, correct=correct)
    assert chance(guesses, epsilon, delta) == pytest.approx(by_hand(guesses, epsilon, delta), rel=1e-9)


def test_the_published_bound() -> None:
    """600 correct guesses of 600 among 1000 canaries: (1 + e^-epsilon)^-600 = 0.05 without delta; less with it."""
    guesses = Guesses(canaries=1000, made=600, correct=600)
    expected = -math.log(0.05 ** (-1 / 600) - 1)
    assert lower_bound(guesses, 0.0, 0.95) == pytest.approx(expected, abs=1e-6)
    assert expected - 0.1 < lower_bound(guesses, 1e-5, 0.95) < expected


def test_randomised_response_is_not_refuted_more_often_than_stated() -> None:
    """The mechanism that attains the bound: each bit is reported rightly with probability e^eps / (1 + e^eps)."""
    rng, made, wrong = np.random.default_rng(0), 200, 0
    for correct in rng.binomial(made, math.e / (1 + math.e), 400):
        wrong += lower_bound(Guesses(canaries=made, made=made, correct=int(correct)), 0.0, 0.9) > 1.0
    assert stats.binom.cdf(wrong, 400, 0.1) > 1e-3  # at least not clearly less often than the confidence allows
    assert stats.binom.sf(wrong - 1, 400, 0.1) > 1e-6


def test_few_or_wrong_guesses_refute_nothing() -> None:
    assert lower_bound(Guesses(canaries=10, made=4, correct=0), DELTA, 0.95) == 0
    assert lower_bound(Guesses(canaries=100, made=100, correct=50), DELTA, 0.95) == 0
    assert lower_bound(Guesses(canaries=100, made=4, correct=4), DELTA, 0.95) == 0


@pytest.mark.parametrize(
    ("guesses", "delta", "confidence", "reason"),
    [((10, 4, 5), 0.0, 0.9, "must not fall"), ((4, 10, 4), 0.0, 0.9, "must not fall"),
     ((10, 4, 4), 1.0, 0.9, "delta must be in"), ((10, 4, 4), 0.0, 1.0, "confidence in")],
)  # fmt: skip
def test_wrong_arguments_are_refused(guesses, delta, confidence, reason):
    canaries, made, correct = guesses
    with pytest.raises(ValueError, match=reason):
        lower_bound(Guesses(canaries=canaries, made=made, correct=correct), delta, confidence)
    with pytest.raises(ConfigError, match="at least 10 canaries"):
        RecordGame(canaries=9, batch_size=1, steps=1, noise_multiplier=1.0)


def test_the_noise_as_stated_is_not_refuted_and_a_tenth_of_it_is() -> None:
    """One game each on the steps that clients train with; a bound above 4 allows at most 2 wrong guesses of 400.

    Honest: the signal is 0.88 standard deviations of the noise (and less of the sampled steps), so that a guess is
    wrong with a probability above 0.14, and at most 2 of 400 are with one below 1e-20. Broken: the signal is 5.5
    standard deviations, and the outer tenths of the scores do not overlap.
    """
    canaries, batch, steps = 2000, 400, 200
    noise = record_noise(EPSILON, DELTA, batch / canaries, steps)
    made, signal = int(canaries * GUESSED), batch / canaries * math.sqrt(steps) / noise
    # The threshold of the largest tenth of all scores, and the share of its canaries that did not take part.
    tenth = brentq(lambda score: stats.norm.sf(score) + stats.norm.sf(score - signal) - 2 * GUESSED / 2, 0, 5)
    wrong = stats.norm.sf(tenth) / GUESSED
    assert wrong > 0.14
    assert stats.binom.cdf(2, made, wrong) < 1e-20
    two, three = (Guesses(canaries=canaries, made=made, correct=made - errors) for errors in (2, 3))
    assert lower_bound(two, DELTA, CONFIDENCE) > EPSILON > lower_bound(three, DELTA, CONFIDENCE)
    honest = RecordGame(canaries=canaries, batch_size=batch, steps=steps, noise_multiplier=noise).play()
    broken = RecordGame(canaries=canaries, batch_size=batch, steps=steps, noise_multiplier=noise, broken=True).play()
    assert honest.made == broken.made == made
    assert 0.5 < lower_bound(honest, DELTA, CONFIDENCE) < EPSILON < lower_bound(broken, DELTA, CONFIDENCE)


@pytest.mark.parametrize("noise", ["local", "server", "sum"])
def test_the_game_of_clients(noise: Noise) -> None:
    """400 canaries, 80 guesses: fewer than 5 wrong ones refute an epsilon of 2.

    Honest: the signal is half a standard deviation of the noise, so that 29 % are wrong, fewer than 5 with a
    probability below 1e-7. Broken: 5 standard deviations, and none is.
    """
    epsilon, rounds = 2.0, 4
    multiplier = client_noise(epsilon, DELTA, rounds, noise)
    assert 0.4 < math.sqrt(rounds) / multiplier < 0.6
    bounds = []
    for broken in (False, True):
        game = ClientGame(canaries=400, rounds=rounds, noise_from=noise, noise_multiplier=multiplier, broken=broken)
        bounds.append(lower_bound(game.play(), DELTA, CONFIDENCE))
    honest, tenth = bounds
    assert honest < epsilon < 2.5 < tenth


@pytest.mark.parametrize("noise", ["local", "server", "sum"])
def test_the_scores_of_clients_are_their_clipped_changes(noise: Noise) -> None:
    """With almost no noise, a canary that takes part has the score C in each round, of the mean its share."""
    takes_part = np.arange(12) % 3 == 0
    game = ClientGame(canaries=12, rounds=2, noise_from=noise, noise_multiplier=1e-4)
    shares = 1 if noise == "local" else 12
    assert game.scores(takes_part) == pytest.approx(2 * 0.5 * takes_part / shares, abs=1e-3)


def test_a_game_of_clients_without_rounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 round, got 0"):
        ClientGame(canaries=10, rounds=0, noise_from="sum", noise_multiplier=1.0)
