"""The spread of a score over the clients of a run: its worst tenth and its interval."""

import numpy as np
import pytest
from scipy.stats import sem, t

from hyperfl_flwr.runs.score_spread import Spread


@pytest.mark.parametrize(("clients", "lowest"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_tenth_is_rounded_up(clients: int, lowest: int) -> None:
    """Of 11 clients it has two; clients without a score do not count."""
    scores = np.random.default_rng(clients).random(clients)
    found = Spread.of([None, *scores.tolist(), None])
    assert found.worst == scores.min()
    assert found.worst_decile == pytest.approx(np.sort(scores)[:lowest].mean())
    assert (found.num_clients, found.std) == (clients, pytest.approx(scores.std()))


def test_the_interval_is_students() -> None:
    """Of single clients, and of opened sums, of which the deviation is divided by the number of clients, too."""
    scores = np.random.default_rng(0).random(4)
    expected = pytest.approx(t.interval(0.95, 3, scores.mean(), sem(scores)))
    assert Spread.of(scores.tolist()).interval == expected
    opened = Spread.opened({"clients": 4, "score": scores.mean(), "score_std": scores.std()}, "score")
    assert opened.interval == expected
    assert Spread.of([0.5]).interval is None
