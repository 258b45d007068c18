"""Robust rules against closed forms, formulas written out, the bounds of their papers, and Flower's strategies."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedMedian, FedTrimmedAvg, Krum, MultiKrum, Strategy

from hyperfl_flwr.flower.messages import identify_process
from hyperfl_flwr.training.robust_rules import (
    BLOCK,
    inner_products,
    nearest_nodes,
    robust_mean,
    squared_distances,
    trimmed_mean,
    weiszfeld_weights,
)

Arrays = Mapping[str, np.ndarray]

RULES = ("median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-bound")


def single(*values: float) -> list[Arrays]:
    """Return nodes of which each has one number."""
    return [{"g/a": np.array([value], np.float32)} for value in values]


def drawn(number: int, seed: int = 0, around: float = 0.0) -> tuple[Arrays, list[Arrays]]:
    """Return what was sent, of three arrays, and nodes that differ from it by standard normal changes."""
    rng = np.random.default_rng(seed)
    shapes = {"g/a": (3, 2), "g/b": (), "h/a": (4,)}
    sent = {key: np.float32(around + rng.standard_normal(shape)).reshape(shape) for key, shape in shapes.items()}
    nodes = [
        {key: np.float32(value + rng.standard_normal(value.shape)).reshape(value.shape) for key, value in sent.items()}
        for _ in range(number)
    ]
    return sent, nodes


def vector(arrays: Arrays) -> np.ndarray:
    return np.concatenate([value.ravel() for value in arrays.values()]).astype(np.float64)


def reduced(rule: str, sent: Arrays, nodes: Sequence[Arrays], byzantine: int = 1, **more: Any) -> np.ndarray:
    return vector(robust_mean(rule, sent, nodes, byzantine, **more).arrays)


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ("median", (3, 0, 100, 1, 2), 2),
        ("median", (10, 1, 3, 2), 2.5),
        ("trimmed-mean", (3, 0, 100, 1, 2), 2),
        ("trimmed-mean", (3, 0, 100, 1, 2, 4), 2.5),
        ("krum", (0, 1, 2, 3, 100), 1),  # the scores are 5, 2, 2, 5: the first of two equal ones
        ("krum", (100, 0, 7, 2, 2.5), 2),  # 10.25, 4.25, 8.5: 2 is nearest to 0 and 2.5
        ("multi-krum", (0, 1, 2, 3, 100), 1.5),
        ("geometric-median", (3, 0, 100, 1, 2), 2),
        ("geometric-median", (-5, 5, 0), 0),
        ("norm-bound", (1, -2, 4, 100), 1.25),  # the norms' median is 3: 1 - 2 + 3 + 3
        ("norm-bound", (1, -2, 100), 1 / 3),
    ],
)  # fmt: skip
def test_closed_forms(rule: str, values: Sequence[float], expected: float) -> None:
    """One parameter, of which 0 was sent, with f = 1."""
    (result,) = reduced(rule, single(0)[0], single(*values))
    assert result == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_given_norm_bound() -> None:
    """Changes of the norms 5 and 0.5 from (1, 1), of which 2.5 is the bound; two nodes suffice."""
    sent = {"g/a": np.ones(1, np.float32), "g/b": np.ones(1, np.float32)}
    long = {"g/a": np.array([4], np.float32), "g/b": np.array([5], np.float32)}
    short = {"g/a": np.array([1.3], np.float32), "g/b": np.array([0.6], np.float32)}
    found = robust_mean("norm-bound", sent, [long, short], 3, norm_bound=2.5)
    np.testing.assert_allclose(vector(found.arrays), [1 + (1.5 + 0.3) / 2, 1 + (2 - 0.4) / 2], rtol=1e-6)
    assert found.shares is not None
    np.testing.assert_allclose(found.shares, [0.5, 1])


def krum_scores(points: np.ndarray, byzantine: int) -> list[float]:
    """Return the scores as the paper writes them, with loops."""
    scores = []
    for i, one in enumerate(points):
        distances = sorted(float(np.sum((one - other) ** 2)) for j, other in enumerate(points) if j != i)
        scores.append(sum(distances[: len(points) - byzantine - 2]))
    return scores


@pytest.mark.parametrize(("number", "byzantine"), [(7, 2), (8, 2), (5, 1), (6, 0)])
def test_formulas_written_out(number: int, byzantine: int) -> None:
    sent, nodes = drawn(number, seed=number)
    points = np.stack([vector(node) for node in nodes])
    ordered = np.sort(points, axis=0)
    assert np.array_equal(reduced("median", sent, nodes, byzantine), np.float32(np.median(points, axis=0)))
    cut = ordered[byzantine : number - byzantine].mean(axis=0)
    np.testing.assert_allclose(reduced("trimmed-mean", sent, nodes, byzantine), cut, rtol=1e-6)
    scores = krum_scores(points, byzantine)
    assert np.array_equal(reduced("krum", sent, nodes, byzantine), points[np.argmin(scores)])
    nearest = points[np.argsort(scores)[: number - byzantine]]
    np.testing.assert_allclose(
        reduced("multi-krum", sent, nodes, byzantine), nearest.mean(axis=0), rtol=1e-5, atol=1e-7
    )
    changes = points - vector(sent)
    norms = np.linalg.norm(changes, axis=1)
    bounded = vector(sent) + (changes * np.minimum(1, np.median(norms) / norms)[:, None]).mean(axis=0)
    np.testing.assert_allclose(reduced("norm-bound", sent, nodes, byzantine), bounded, rtol=1e-5, atol=1e-7)
    # At the geometric median, the unit vectors to the nodes add up to zero.
    weights = weiszfeld_weights(inner_products(sent, nodes))
    away = weights @ points - points
    np.testing.assert_allclose((away / np.linalg.norm(away, axis=1)[:, None]).sum(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(reduced("geometric-median", sent, nodes, byzantine), weights @ points, rtol=1e-5)


@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("rule", ["trimmed-mean", "multi-krum", "norm-bound"])
def test_without_malicious_nodes_it_is_the_mean_of_the_nodes(rule: str, number: int) -> None:
    """Bit by bit, with f = 0 and a bound that no node reaches; every share is 1."""
    sent, nodes = drawn(number)
    more = {"norm_bound": 1e3} if rule == "norm-bound" else {}
    mean = sum(vector(node) for node in nodes) / number
    assert np.array_equal(reduced(rule, sent, nodes, 0, **more), np.float32(mean))
    shares = robust_mean(rule, sent, nodes, 0, **more).shares
    assert shares is None or shares.tolist() == [1.0] * number


def test_krum_returns_a_node_bit_by_bit() -> None:
    """Also where its numbers are tiny beside those that were sent."""
    sent = {"g/a": np.full(3, 1e8, np.float32)}
    nodes = [{"g/a": np.array([1e-30 * k, k, 3], np.float32)} for k in range(5)]
    found = robust_mean("krum", sent, nodes, 1)
    assert any(np.array_equal(found.arrays["g/a"], node["g/a"]) for node in nodes)
    assert found.shares is not None
    assert sorted(found.shares.tolist()) == [0, 0, 0, 0, 5]


@pytest.mark.parametrize("size", [1e3, 1e30])
@pytest.mark.parametrize("number", [7, 8])
@pytest.mark.parametrize("rule", RULES)
def test_one_malicious_node_cannot_leave_the_honest(rule: str, number: int, size: float) -> None:
    """A node of any size moves no rule beyond the honest nodes, as each of them bounds it.

    The rules for single parameters stay between the smallest and the largest honest value, Krum and Multi-Krum choose
    honest nodes, the geometric median is within 2 (1 - a) / (1 - 2 a) radii of the honest nodes' mean for a share a of
    malicious nodes, and a mean of bounded changes is no longer than the bound, the median of the norms.
    """
    sent, honest = drawn(number - 1, seed=3)
    forger = {key: np.full_like(value, size) for key, value in sent.items()}
    found = robust_mean(rule, sent, [*honest[:2], forger, *honest[2:]], 1)
    result, points = vector(found.arrays), np.stack([vector(node) for node in honest])
    if rule in ("median", "trimmed-mean", "krum", "multi-krum"):
        assert np.all(result >= points.min(axis=0))
        assert np.all(result <= points.max(axis=0))
    elif rule == "geometric-median":
        center, share = points.mean(axis=0), 1 / number
        radius = np.linalg.norm(points - center, axis=1).max()
        assert np.linalg.norm(result - center) <= 2 * (1 - share) / (1 - 2 * share) * radius
    else:
        norms = np.sort(np.linalg.norm(points - vector(sent), axis=1))
        assert np.linalg.norm(result - vector(sent)) <= norms[number // 2] * (1 + 1e-6)
    if found.shares is not None:
        assert found.shares[2] == found.shares.min()
        assert found.shares[2] < (0.05 if size > 1e20 else 0.5)


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_the_distance_of_a_malicious_node_hardly_matters_to_the_geometric_median(direction: float) -> None:
    """At a distance of 1e4 or 1e30 it pulls with the same force, so that rounding at 1e60 must not show."""
    sent, honest = drawn(6, seed=5)
    results = [
        reduced(
            "geometric-median", sent, [*honest, {key: np.full_like(v, direction * size) for key, v in sent.items()}]
        )
        for size in (1e4, 1e30)
    ]
    np.testing.assert_allclose(*results, atol=2e-3)


@pytest.mark.parametrize("rule", RULES)
def test_the_mean_moves_with_a_malicious_node_and_no_rule_does(rule: str) -> None:
    """The control: what all rules bound, the mean does not."""
    sent, honest = drawn(6, seed=3)
    forger = {key: np.full_like(value, 1e30) for key, value in sent.items()}
    assert np.linalg.norm(sum(vector(node) for node in (*honest, forger)) / 7) > 1e29
    assert np.linalg.norm(reduced(rule, sent, [*honest, forger])) < 10


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_the_nodes_has_no_effect(rule: str) -> None:
    sent, nodes = drawn(5, seed=1)
    results = [reduced(rule, sent, [nodes[i] for i in order]) for order in itertools.permutations(range(5))]
    for result in results:
        np.testing.assert_allclose(result, results[0], rtol=1e-6, atol=1e-7)
    if rule in ("median", "trimmed-mean", "krum"):
        assert all(np.array_equal(result, results[0]) for result in results)


def test_close_nodes_far_from_what_was_sent() -> None:
    """Changes of 1e8 that differ by 1e-3: |a|^2 + |b|^2 - 2 ab alone would have an error of 1."""
    rng = np.random.default_rng(0)
    sent = {"g/a": np.zeros(50)}
    nodes = [{"g/a": 1e8 + 1e-3 * rng.standard_normal(50)} for _ in range(6)]
    exact = [[float(np.sum((a["g/a"] - b["g/a"]) ** 2)) for b in nodes] for a in nodes]
    products = inner_products(sent, nodes)
    np.testing.assert_allclose(squared_distances(products, sent, nodes), exact, rtol=1e-12)
    squares = np.diag(products)
    naive = squares[:, None] + squares[None, :] - 2 * products
    assert np.abs(naive - exact).max() > 0.1
    scores = krum_scores(np.stack([node["g/a"] for node in nodes]), 1)
    assert nearest_nodes(np.array(exact), 1).tolist() == np.argsort(scores).tolist()


def test_equal_nodes_are_reduced_to_what_they_sent() -> None:
    """All distances are zero: nothing is divided by them."""
    sent, (node,) = drawn(1)
    for rule in RULES:
        np.testing.assert_allclose(reduced(rule, sent, [node] * 5), vector(node), rtol=1e-6)
        assert np.array_equal(reduced(rule, sent, [sent] * 5), vector(sent))


def test_of_nodes_with_equal_scores_the_first_ones_are_taken() -> None:
    """Forty nodes, of which every other one is farther from all nodes."""
    far = np.arange(40) % 2
    distances = 1 + far[:, None] + far[None, :] - np.diag(1 + 2 * far)
    assert nearest_nodes(distances.astype(float), 3).tolist() == [*range(0, 40, 2), *range(1, 40, 2)]


def test_the_smoothing_of_the_geometric_median() -> None:
    """Two nodes at 0 and one at 1: the weights 1 / nu, 1 / nu and 1 / (1 - v) have their mean v at nu / 2."""
    sent, *nodes = ({"g/a": np.array([value])} for value in (0.0, 0.0, 0.0, 1.0))
    assert reduced("geometric-median", sent, nodes)[0] == pytest.approx(0.5e-6, rel=1e-5)


def test_arrays_of_several_blocks_and_empty_ones() -> None:
    """The parts of a large array, and an array without elements, do not change a rule."""
    rng = np.random.default_rng(2)
    sent = {"g/a": np.zeros((3, BLOCK // 2), np.float32), "g/b": np.zeros((0, 4), np.float32)}
    nodes = [{key: np.float32(rng.standard_normal(value.shape)) for key, value in sent.items()} for _ in range(3)]
    found = trimmed_mean(nodes, 1)
    assert np.array_equal(found["g/a"], np.median([node["g/a"] for node in nodes], axis=0))
    assert found["g/b"].shape == (0, 4)
    points = np.stack([vector(node) for node in nodes])
    np.testing.assert_allclose(inner_products(sent, nodes), points @ points.T, rtol=1e-6, atol=1e-3)
    mean = robust_mean("norm-bound", sent, nodes, 1, norm_bound=1e9).arrays["g/a"]
    np.testing.assert_allclose(mean, np.mean([node["g/a"] for node in nodes], axis=0), atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "byzantine", "least"), [("median", 2, 5), ("trimmed-mean", 1, 3), ("krum", 1, 5), ("multi-krum", 2, 7)]
)
def test_too_few_nodes_are_refused(rule: str, byzantine: int, least: int) -> None:
    robust_mean(rule, *drawn(least), byzantine)
    with pytest.raises(ValueError, match=f"{rule} with {byzantine} malicious nodes needs {least} nodes at least"):
        robust_mean(rule, *drawn(least - 1), byzantine)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown rule 'bulyan'"):
        robust_mean("bulyan", *drawn(3), 1)


def by_flower(strategy: Strategy, nodes: Sequence[np.ndarray]) -> np.ndarray:
    """Return what a strategy of Flower makes of the replies of nodes, each with one array."""
    identify_process()
    replies = []
    for number, array in enumerate(nodes):
        asked = Message(RecordDict(), dst_node_id=number + 1, message_type=MessageType.TRAIN)
        metrics = MetricRecord({"num-examples": 1})
        replies.append(Message(RecordDict({"a": ArrayRecord({"g/a": Array(array)}), "m": metrics}), reply_to=asked))
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    return arrays["g/a"].numpy()


@pytest.mark.parametrize(
    ("rule", "byzantine", "strategy"),
    [
        ("median", 1, FedMedian()),
        ("trimmed-mean", 2, FedTrimmedAvg(beta=0.3)),
        ("krum", 2, Krum(num_malicious_nodes=2)),
        ("multi-krum", 2, MultiKrum(num_malicious_nodes=2, num_nodes_to_select=5)),
    ],
)
def test_the_same_as_flower_s_strategies(rule: str, byzantine: int, strategy: Strategy) -> None:
    """Seven nodes with 20 parameters each."""
    nodes = list(np.random.default_rng(4).standard_normal((7, 20)).astype(np.float32))
    sent = {"g/a": np.zeros(20, np.float32)}
    result = reduced(rule, sent, [{"g/a": node} for node in nodes], byzantine)
    np.testing.assert_allclose(result, by_flower(strategy, nodes), atol=1e-6)


def test_krum_of_small_changes() -> None:
    """Changes a thousandth of the parameters' size: Krum's choice is that of the formula in float64.

    Flower's Krum computes the distances of the parameters in float32, where little is left of such changes;
    `pytest tests/numerics/test_robust_rules.py -k small -s` prints how often it takes another node.
    """
    others = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        sent = rng.standard_normal(1000).astype(np.float32)
        nodes = [np.float32(sent + 1e-3 * rng.standard_normal(1000)) for _ in range(7)]
        exact = nodes[int(np.argmin(krum_scores(np.stack(nodes).astype(np.float64), 1)))]
        assert np.array_equal(reduced("krum", {"g/a": sent}, [{"g/a": node} for node in nodes]), exact)
        others += not np.array_equal(by_flower(Krum(num_malicious_nodes=1), nodes), exact)
    print({"rounds": 100, "other nodes": others})  # noqa: T201 - the figures of this command
