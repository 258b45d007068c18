"""Sums of clipped changes: whatever other nodes send, one client moves the sum by no more than is stated."""

import numpy as np
import pytest

from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import ClientResult, Reduction, Report
from hyperfl_flwr.protocol.reproducible_sum import STEP_BITS, Levels, ReproducibleSum
from strategies.engine.replies import TrainingReply

N, SIZE = 6, 5


def new_sum(received: SharedArrays) -> ReproducibleSum:
    return ReproducibleSum(received, {"model": Reduction.MEAN}, num_clients=N, max_num_examples=1)


def sent(base: float) -> SharedArrays:
    return {"model/a": np.full(SIZE, base, np.float32)}


def trained(received: SharedArrays, change: float) -> SharedArrays:
    """Return arrays after a change of one element."""
    value = received["model/a"].copy()
    value[0] += np.float32(change)
    return {"model/a": value}


def reply(arrays: SharedArrays, clients: int = 1, outliers: Levels | None = None) -> TrainingReply:
    results = [ClientResult(client=client, num_examples=1, metrics={}) for client in range(clients)]
    report = Report(results=results, failures=[], process="p", peak_memory=0, seconds=0.0)
    return TrainingReply(report=report, arrays=arrays, outliers=outliers or {})


@pytest.mark.parametrize("change", [-0.99, 0.0, 1e-30, 0.99])
@pytest.mark.parametrize(("base", "clip_norm"), [(0.0, 1.0), (0.05, 1.0), (0.0, 1e4), (300.0, 1e-3), (1e-20, 1e-9)])
def test_clipped_changes_are_accepted(base: float, clip_norm: float, change: float) -> None:
    """Alone and in sums, also where the clipping norm needs a level of its own."""
    received, total = sent(base), new_sum(sent(base))
    one = trained(received, change * clip_norm)
    exact = abs(float(one["model/a"][0]) - float(received["model/a"][0]))
    norm = max(clip_norm, exact)
    reply(one).refuse_large(total, norm)
    total.add(one, 1)
    total.add(one, 1)
    levels = {level: total.sums(level) for level in total.levels}
    reply(levels.pop(0), 2, levels).refuse_large(new_sum(received), norm)


@pytest.mark.parametrize("base", [0.0, 0.05])
@pytest.mark.parametrize("change", [1.1, -1e3, 8191.55, 2.0**42, 2.0**66, 1e38])
def test_a_client_with_a_long_change_is_refused(base: float, change: float) -> None:
    received = sent(base)
    with pytest.raises(ValueError, match=r"more than 1 times privacy\.clip-norm = 1|terms that clipped changes cannot"):
        reply(trained(received, change)).refuse_large(new_sum(received), 1.0)


def sums(value: float, level: int | None = None) -> tuple[SharedArrays, Levels]:
    """Return sums of two clients that have not changed, with a value in one element, or in one of a higher level."""
    received = sent(0.05)
    total = new_sum(received)
    total.add(received, 1)
    total.add(received, 1)
    first, other = total.sums(0), np.zeros(SIZE)
    (first["model/a"] if level is None else other)[0] += value
    return first, {} if level is None else {level: {"model/a": other}}


@pytest.mark.parametrize(
    ("value", "level", "problem"),
    [
        (2.125, None, "2 clients have changed by a norm of 2.12 in sum, more than 2 times"),
        (1e30, None, "too large for level 0 of 2 clients"),
        (1.0, 1, "terms that clipped changes cannot have"),
        (0.0, 3, "terms that clipped changes cannot have"),
        (-1.5, None, ""),
        (1.5, None, ""),
    ],
)
def test_sums_of_a_node_are_bounded(value: float, level: int | None, problem: str) -> None:
    """The level-0 sums of k clients may have changed by k C; higher levels must be possible."""
    arrays, outliers = sums(value, level)
    answer, total = reply(arrays, 2, outliers), new_sum(sent(0.05))
    if not problem:
        answer.refuse_large(total, 1.0)
        return
    with pytest.raises(ValueError, match=problem):
        answer.refuse_large(total, 1.0)


def test_sums_between_the_points_of_the_grid_are_refused() -> None:
    """They would make additions round, and so carry other clients' changes over to a larger unit."""
    arrays, _ = sums(0.0)
    arrays["model/a"][0] = np.nextafter(0.0, 1.0)
    with pytest.raises(ValueError, match="not on the grid of level 0"):
        reply(arrays, 2).refuse_large(new_sum(sent(0.05)), 1.0)


@pytest.mark.parametrize(("base", "clip_norm"), [(0.0, 1.0), (0.05, 1.0), (0.0, 1e4), (300.0, 0.5)])
def test_one_client_moves_the_sum_by_its_change(base: float, clip_norm: float) -> None:
    """Whatever the accepted replies of the others are, the sum with the client and without differs as stated."""
    rng = np.random.default_rng(0)
    received, accepted = sent(base), 0
    scale = max(abs(base), 2.0**-5)
    for _ in range(300):
        others = []
        for _ in range(N - 1):
            size = rng.choice([clip_norm, 10.0 * clip_norm, scale * 2.0 ** rng.integers(0, 60), scale * 2.0**STEP_BITS])
            others.append(trained(received, rng.uniform(-1, 1) * size))
        victim = trained(received, rng.uniform(-1, 1) * clip_norm)
        moved = float(victim["model/a"][0]) - float(received["model/a"][0])
        results = []
        for client in (victim, received):
            total, count = new_sum(received), 0
            for arrays in [*others, client]:
                answer = reply(arrays)
                try:
                    answer.refuse_large(total, clip_norm * (1 + 2.0**-10))
                except ValueError:
                    continue
                count += 1
                answer.add_to(total)
            accepted += count
            results.append((total.take_changes(count)["model/a"][0], total.rounding("model/a", clip_norm)))
        (with_it, bound), (without, _) = results
        assert abs(with_it - without - moved) <= bound
    assert accepted > 1000
