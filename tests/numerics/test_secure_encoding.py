"""Fixed-point sums: exact in any grouping, close to means in float64, without overflow, and silent about clients."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares
from scipy.stats import binom

from hyperfl_flwr.metrics.classification import ClassScores
from hyperfl_flwr.node.array_sums import EncodedSum
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.protocol.secure_sums.encoding import Encoding
from hyperfl_flwr.protocol.secure_sums.numbers import (
    LARGEST_METRIC,
    LEAST_VARIANCE,
    METRIC_BITS,
    SQUARE_BITS,
    SQUARES_FROM,
    NumbersEncoding,
)

MOST_CLIENTS = 2**23 - 1
MEANS = [Reduction.MEAN, Reduction.MEAN_BY_EXAMPLES]
REDUCTIONS = [*MEANS, Reduction.SUM]


def encoding_of(received, reduction=Reduction.MEAN, *, num_clients=3, max_examples=1000, scale=10.0):
    return Encoding(
        received=received,
        reductions={"net": reduction},
        num_clients=num_clients,
        max_examples=max_examples,
        range=scale,
    )


def sum_of(encoding, clients):
    """Return the sum over clients, each (arrays, number of samples), and the number of saturated elements."""
    total = encoding.new_sum()
    saturated = sum(encoding.add(total, arrays, num_examples) for arrays, num_examples in clients)
    return total, saturated


def network(rng, num_clients):
    """Return a network's arrays as received and after each client's training, with changes as FedRep's."""
    shapes = {"net/conv.weight": (16, 1, 5, 5), "net/conv.bias": (16,), "net/linear.weight": (300, 128)}
    received = {key: rng.uniform(-0.15, 0.15, shape).astype(np.float32) for key, shape in shapes.items()}
    common = {key: rng.laplace(0, 0.003, shape) for key, shape in shapes.items()}
    clients = []
    for _ in range(num_clients):
        own = {key: common[key] + rng.laplace(0, 0.002, shape) for key, shape in shapes.items()}
        clients.append({key: (received[key] + own[key]).astype(np.float32) for key in shapes})
    return received, clients


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reduction", MEANS)
def test_relative_error_of_a_mean_update(reduction, dtype):
    """20 clients of 200 to 1000 samples: the mean update differs from float64's by less than 3e-6 of its norm."""
    rng = np.random.default_rng(0)
    received, clients = network(rng, 20)
    received = {key: value.astype(dtype) for key, value in received.items()}
    counts = rng.integers(200, 1000, 20).tolist()
    encoding = encoding_of(received, reduction, num_clients=20)
    total, saturated = sum_of(encoding, zip(clients, counts, strict=True))
    found = encoding.decode(total, 20, sum(counts))
    weights = [reduction.weight(count) for count in counts]
    error = norm = 0.0
    for key, value in received.items():
        changes = [client[key].astype(np.float64) - value for client in clients]
        update = sum(weight * change for weight, change in zip(weights, changes, strict=True)) / sum(weights)
        error += float(np.sum((found[key] - value.astype(np.float64) - update) ** 2))
        norm += float(np.sum(update**2))
        assert found[key].dtype == dtype
        assert found[key].shape == value.shape
    assert saturated == 0
    assert math.sqrt(error / norm) < 3e-6


ELEMENTS = st.floats(-3, 3, width=32)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_sum_does_not_depend_on_the_nodes(data):
    """Clients summed on one node, or on several whose sums are added in another order: the same integers."""
    num_clients, reduction = data.draw(st.integers(1, 9)), data.draw(st.sampled_from(REDUCTIONS))
    array = st.lists(ELEMENTS, min_size=3, max_size=3).map(lambda row: {"net/x": np.array(row, np.float32)})
    clients = data.draw(st.lists(st.tuples(array, st.integers(1, 2000)), min_size=num_clients, max_size=num_clients))
    encoding = encoding_of(data.draw(array), reduction, num_clients=num_clients, scale=0.5)
    whole, saturated = sum_of(encoding, clients)
    parts = {}
    for client in data.draw(st.permutations(clients)):
        parts.setdefault(data.draw(st.integers(0, 3)), []).append(client)
    sums = [sum_of(encoding, part) for part in parts.values()]
    assert np.array_equal(whole, np.add.reduce([total for total, _ in sums], dtype=np.uint32))
    assert saturated == sum(count for _, count in sums)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_each_reduction_is_that_of_numpy_up_to_rounding(data):
    """The decoded value is numpy's in float64, up to half a unit per client and the rounding to float32."""
    reduction = data.draw(st.sampled_from(REDUCTIONS))
    rows = st.lists(ELEMENTS, min_size=4, max_size=4).map(lambda row: np.array(row, np.float32).reshape(2, 2))
    received = data.draw(rows)
    clients = data.draw(st.lists(st.tuples(rows, st.integers(1, 1000)), min_size=1, max_size=6))
    encoding = encoding_of({"net/x": received}, reduction, num_clients=len(clients), scale=200.0)
    total, saturated = sum_of(encoding, [({"net/x": value}, count) for value, count in clients])
    found = encoding.decode(total, len(clients), sum(count for _, count in clients))["net/x"]
    values, counts = np.array([value for value, _ in clients], np.float64), [count for _, count in clients]
    if reduction is Reduction.SUM:
        expected = values.sum(axis=0)
    else:
        expected = np.average(values, axis=0, weights=counts if reduction is Reduction.MEAN_BY_EXAMPLES else None)
    unit = 200 * max(float(np.abs(received).max()), 0.05) / 2**encoding.bits
    if reduction is Reduction.MEAN_BY_EXAMPLES:
        unit *= 1000 * len(clients) / sum(counts)
    assert saturated == 0
    assert np.abs(found - expected).max() <= unit * len(clients) / 2 + 1e-6 * np.abs(expected).max()


def test_a_client_is_taken_out_of_a_sum_again():
    """Every bit of the sum before, also of elements that were cut off and of sums that wrapped around."""
    rng = np.random.default_rng(0)
    received = {"net/x": rng.normal(0, 1, 300).astype(np.float32)}
    encoding = encoding_of(received, scale=1.0)
    client = {"net/x": (received["net/x"] + rng.normal(0, 9, 300)).astype(np.float32)}
    total = rng.integers(2**32, size=300, dtype=np.uint32)
    before = total.copy()
    assert encoding.add(total, client, 7) > 0
    assert (total != before).all()
    encoding.remove(total, client, 7)
    np.testing.assert_array_equal(total, before)


@pytest.mark.parametrize(
    ("key", "size", "outside", "cuts_off", "accepted"),
    [
        ("net/weight", 2000, 2, True, True),
        ("net/weight", 2000, 3, True, False),
        ("net/bias", 10, 1, True, False),  # a tenth of a small array, and not a thousandth of the whole upload
        ("net/running_var", 10, 3, True, True),
        ("net/weight", 2000, 1, False, False),
    ],
)
def test_a_share_of_each_array_may_be_cut_off(key, size, outside, cuts_off, accepted):
    """A client with more is refused, and every bit of the sum is as before. A change counts, not what it leads to."""
    received = {"net/other": np.full(5000, -1.0, np.float32), key: np.full(size, -1.0, np.float32)}
    client = {name: np.full_like(value, -10.5) for name, value in received.items()}
    client[key][:outside] = -1e6
    total = EncodedSum(encoding_of(received), 0.0, cuts_off=cuts_off)
    if accepted:
        total.add(client, 10)
        assert (total.saturated, total.num_examples) == (outside, 10)
        return
    with pytest.raises(ValueError, match=rf"{outside} elements of its upload are beyond the range"):
        total.add(client, 10)
    assert not total.vector.any()
    assert (total.saturated, total.num_examples) == (0, 0)


def test_the_range_of_an_array_is_at_least_the_given_one():
    """Wide enough for the noise that a client adds; an element at its end is not cut off."""
    received = {"net/small": np.zeros(3, np.float32), "net/large": np.full(3, 4.0, np.float32)}
    encoding = replace(encoding_of(received, scale=1.0), least_range=2.0)
    assert {key: encoding.unit(key) * 2**encoding.bits for key in received} == {"net/small": 2.0, "net/large": 4.0}
    client = {"net/small": np.array([2.0, -2.0, 2.125]), "net/large": np.array([8.0, 0.0, -0.125])}
    assert encoding.cut_off(client) == {"net/small": 1, "net/large": 1}
    assert encoding.add(encoding.new_sum(), client, 1) == 2


def test_the_order_in_which_arrays_come_has_no_effect():
    received = {"net/b": np.full(2, 1.0, np.float32), "net/a": np.full(3, 1.0, np.float32)}
    client = {"net/b": np.array([1.0, 2.0]), "net/a": np.array([3.0, 4.0, 5.0])}
    one, other = (encoding_of(dict(arrays)) for arrays in (received.items(), sorted(received.items())))
    total, _ = sum_of(one, [(client, 1)])
    np.testing.assert_array_equal(total, sum_of(other, [(client, 1)])[0])
    for key, value in other.decode(total, 1, 1).items():
        np.testing.assert_allclose(value, client[key], rtol=1e-6)


def test_saturated_elements_are_cut_off_and_counted():
    """The range is 10 times the largest received parameter, 0.2 here, so changes reach 2."""
    received = {"net/x": np.array([0.2, -0.1, 0, 0, 0], np.float32)}
    encoding = encoding_of(received, num_clients=2)
    client = {"net/x": np.array([0.2 + 1.9, -0.1 - 2.1, 7, -1e30, 1.5], np.float32)}
    total, saturated = sum_of(encoding, [(client, 10), (received, 10)])
    assert saturated == 3
    found = encoding.decode(total, 2, 20)["net/x"] - received["net/x"]
    assert found == pytest.approx([0.95, -1, 1, -1, 0.75], abs=1e-6)


def test_weights_scale_the_range():
    """A client of a tenth of `max_examples` counts as a tenth, saturated or not."""
    received = {"net/x": np.full(2, 1.0)}
    encoding = encoding_of(received, Reduction.MEAN_BY_EXAMPLES, num_clients=2)
    total, saturated = sum_of(encoding, [({"net/x": np.array([1e9, 2.0])}, 100), (received, 900)])
    assert saturated == 1
    assert encoding.decode(total, 2, 1000)["net/x"] == pytest.approx([1 + 10 * 0.1, 1 + 1 * 0.1], rel=1e-6)


def test_clients_beyond_max_examples_weigh_the_same():
    received = {"net/x": np.zeros(1)}
    encoding = encoding_of(received, Reduction.MEAN_BY_EXAMPLES, num_clients=2, max_examples=100)
    assert encoding.weight(Reduction.MEAN_BY_EXAMPLES, 10**12) == encoding.weight(Reduction.MEAN, 1) == 1
    clients = [({"net/x": np.full(1, 0.3)}, 10**6), ({"net/x": np.full(1, 0.1)}, 50)]
    total, _ = sum_of(encoding, clients)
    assert encoding.decode(total, 2, 150)["net/x"] == pytest.approx([(0.3 * 100 + 0.1 * 50) / 150], rel=1e-6)
    node = EncodedSum(encoding, 0.0)
    for arrays, examples in clients:
        node.add(arrays, examples)
    assert (node.num_examples, node.vector.tolist()) == (150, total.tolist())


def test_running_statistics_of_batch_norm():
    """They begin at 0 and move by about 1, far beyond 0.5, the range of other arrays of zeros."""
    names = ["net/bn.running_mean", "net/bn.running_var", "net/bn.bias"]
    received = {name: np.zeros(2, np.float32) for name in names}
    encoding = encoding_of(received, num_clients=1)
    total, saturated = sum_of(encoding, [({name: np.full(2, 4.0, np.float32) for name in names}, 1)])
    found = encoding.decode(total, 1, 1)
    assert saturated == 2
    assert found["net/bn.running_mean"] == pytest.approx([4, 4])
    assert found["net/bn.running_var"] == pytest.approx([4, 4])
    assert found["net/bn.bias"] == pytest.approx([0.5, 0.5])


def test_arrays_larger_than_a_block():
    """Arrays are encoded in blocks; the result has no borders."""
    rng = np.random.default_rng(1)
    received, client = ({"net/x": rng.normal(0, 0.1, (70_000, 2)).astype(np.float32)} for _ in range(2))
    encoding = encoding_of(received, num_clients=1)
    total, _ = sum_of(encoding, [(client, 1)])
    assert np.abs(encoding.decode(total, 1, 1)["net/x"] - client["net/x"]).max() < 1e-6


@settings(deadline=None)
@given(st.integers(1, MOST_CLIENTS), st.sampled_from([1e30, -1e30]), st.sampled_from(REDUCTIONS))
def test_vectors_do_not_overflow(num_clients, value, reduction):
    """All clients at the end of the range, up to the largest number of clients."""
    encoding = encoding_of({"net/x": np.ones(1)}, reduction, num_clients=num_clients)
    total, saturated = sum_of(encoding, [({"net/x": np.full(1, value)}, 1000)])
    one = int(total.view(np.int32)[0])
    assert saturated == 1
    assert abs(one) == 2**encoding.bits
    assert abs(num_clients * one) < 2**31
    everyone = np.array([num_clients * one % 2**32], np.uint32)
    found = encoding.decode(everyone, num_clients, 1000 * num_clients)["net/x"]
    end = math.copysign(10, value)
    assert found == pytest.approx([{Reduction.SUM: num_clients * end}.get(reduction, 1 + end)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_clients": 0}, "1 to 8388607 clients, got 0"),
        ({"num_clients": MOST_CLIENTS + 1}, "1 to 8388607 clients, got 8388608"),
        ({"reduction": Reduction.PER_CLIENT}, "for each client alone"),
        ({"received": {"net/x": np.zeros(2, np.int64)}}, "only floating point arrays"),
        ({"received": {"net/x": np.array([0, np.nan])}}, "not finite"),
        ({"received": {"net/x": np.array([0, -np.inf])}}, "not finite"),
    ],
)
def test_what_cannot_be_encoded_is_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        encoding_of(**{"received": {"net/x": np.zeros(2)}} | changes)


@pytest.mark.parametrize("examples", [0, -5, 2001])
def test_impossible_numbers_of_samples_are_refused(examples):
    """A malicious node can make the opened count anything; it must not end the server."""
    encoding = encoding_of({"net/x": np.zeros(2)}, Reduction.MEAN_BY_EXAMPLES)
    with pytest.raises(ValueError, match="number of samples in the opened sum is impossible"):
        encoding.decode(encoding.new_sum(), 2, examples)


def numbers_of(encoding, clients, **counts):
    return encoding.encode(clients, **{"num_examples": 0, "saturated": 0} | counts)


def test_counts_and_metrics_of_two_nodes():
    encoding = NumbersEncoding(metrics=["accuracy", "loss"], num_clients=5, squares=False)
    nodes = [
        numbers_of(encoding, [{"accuracy": 0.5, "loss": 2.0}, {"accuracy": 1.0, "loss": -1.5}], num_examples=300),
        numbers_of(encoding, [{"loss": 0.25, "accuracy": 0.75, "other": 9.0}], num_examples=50, saturated=7),
    ]
    tally = encoding.decode(nodes[0] + nodes[1])
    assert (tally.nodes, tally.clients, tally.examples, tally.saturated) == (2, 3, 350, 7)
    assert tally.means == {"accuracy": 0.75, "loss": 0.25}
    assert tally.stds == {}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=SQUARES_FROM, max_size=15))
def test_means_and_deviations(values):
    """Means are within half of 2^-12. Squares are summed in units of 2^-8, so variances differ by less than that.

    What is smaller than the error of a mean square is left out.
    """
    encoding = NumbersEncoding(metrics=["loss"], num_clients=len(values), squares=True)
    parts = [numbers_of(encoding, [{"loss": value} for value in part]) for part in (values[:4], values[4:])]
    tally = encoding.decode(parts[0] + parts[1])
    assert tally.means["loss"] == pytest.approx(np.mean(values), abs=2**-13)
    error = 2**-8 + 4 * 100 * 2**-13
    if np.var(values) >= LEAST_VARIANCE + error:
        assert "loss" in tally.stds
    assert tally.stds.get("loss", LEAST_VARIANCE) ** 2 == pytest.approx(np.var(values), abs=error)


def test_a_deviation_that_is_not_resolved_is_not_told():
    """Twelve accuracies of 66, 67 or 68 right answers of 69 have a deviation of 1.2 points, four with 60 one of 5.2."""
    encoding = NumbersEncoding(metrics=["accuracy"], num_clients=12, squares=True)
    for right, shown in ([66, 67, 68] * 4, {}), ([60, 67, 68] * 4, {"accuracy": pytest.approx(0.0516, abs=0.01)}):
        assert np.std(np.divide(right, 69)) == pytest.approx(0.0516 if shown else 0.0118, abs=1e-4)
        total = numbers_of(encoding, [{"accuracy": number / 69} for number in right])
        assert encoding.decode(total).stds == shown


def known(unit: int) -> float:
    """Return how often a server knows a client's accuracy from a sum, with squares in units of 2^-unit (0: without).

    Of five clients that answer each of their test samples with probability 0.95, it is the one with the fewest samples;
    known is a posterior probability above 0.95. Numbers of answers below a 10,000th of the likeliest are left out.
    """
    keys, weights, own = np.zeros(1, np.int64), np.ones(1), np.zeros(1, np.int64)
    for samples in (20, 47, 89, 131, 173):
        right = np.arange(samples + 1)
        share = binom.pmf(right, samples, 0.95)
        right, share = right[share > 1e-4 * share.max()], share[share > 1e-4 * share.max()]
        metric = np.round(2**METRIC_BITS * right / samples)
        square = np.round((metric / 2**METRIC_BITS) ** 2 * 2**unit) if unit else np.zeros(len(right))
        own = right if len(own) == 1 else np.repeat(own, len(right))
        keys = np.add.outer(keys, (metric * 2**32 + square).astype(np.int64)).ravel()
        weights = np.multiply.outer(weights, share).ravel()
    sums, place = np.unique(keys, return_inverse=True)
    table = np.zeros((len(sums), 21))
    np.add.at(table, (place, own), weights)
    likeliest, total = table.max(axis=1), table.sum(axis=1)
    return float(total[likeliest > 0.95 * total].sum() / total.sum())


def opened(rows):
    """Return the sums that a server opens of three and more nodes, of metrics [N, M]."""
    names = [f"metric-{number}" for number in range(len(rows[0]))]
    encoding = NumbersEncoding(metrics=names, num_clients=len(rows), squares=False)
    tally = encoding.decode(sum(numbers_of(encoding, [dict(zip(names, row, strict=True))]) for row in rows))
    return np.array([tally.means[name] for name in names]) * len(rows)


def test_several_metrics_of_constant_models_tell_few_clients():
    """Stated on the page on secure sums: a server that evaluates models that always answer the same.

    With the share p of class 1, always saying 1 has the accuracy p and the macro F1 p / (1 + p).
    """
    shares = np.array([0.05, 0.2, 0.6])
    labels = [(np.arange(200) < 200 * share).astype(np.int64) for share in shares]
    found = []
    for answer in (0, 1):
        scores = [
            ClassScores(labels=each, predicted=np.full(200, answer), probabilities=np.full((200, 2), 0.5), loss=1.0)
            for each in labels
        ]
        found.extend(opened([(each.accuracy, each.macro_f1) for each in scores]))

    def missing(guess):
        pairs = [(1 - guess, (1 - guess) / (2 - guess)), (guess, guess / (1 + guess))]
        return np.array([part.sum() for pair in pairs for part in pair]) - found

    starts = np.random.default_rng(0).random((20, 3))
    tolerances = dict.fromkeys(("xtol", "ftol", "gtol"), 1e-14)
    best = min(
        (least_squares(missing, start, bounds=(0, 1), **tolerances) for start in starts), key=lambda fit: fit.cost
    )
    assert np.sort(best.x) == pytest.approx(shares, abs=0.01)


def test_finer_squares_would_tell_a_client():
    """The numbers are those of the page on secure sums and of `SQUARE_BITS`."""
    assert known(0) == pytest.approx(0.04, abs=0.005)
    assert known(SQUARE_BITS) == pytest.approx(0.14, abs=0.005)
    assert known(12) > 4.9 * known(SQUARE_BITS)


@pytest.mark.parametrize(("squares", "stds"), [(False, {}), (True, {"loss": 1.0})])
def test_squares_only_where_the_step_has_them(squares, stds):
    encoding = NumbersEncoding(metrics=["loss"], num_clients=10, squares=squares)
    total = numbers_of(encoding, [{"loss": 3.0}] * 5 + [{"loss": 5.0}] * 5)
    assert total.size == encoding.size == 5 + squares
    assert encoding.decode(total).stds == stds


@pytest.mark.parametrize(
    ("value", "counted"),
    [(math.nan, 1), (math.inf, 1), (-math.inf, -1), (1e300, 1), (-40_000.0, -1), (None, 1), (32_768.0, 1)],
)
def test_unusual_metrics_count_as_the_bound(value, counted):
    """Every client adds every metric, so that a mean is over a known number of clients."""
    encoding = NumbersEncoding(metrics=["loss"], num_clients=2, squares=False)
    unusual = {} if value is None else {"loss": value}
    tally = encoding.decode(numbers_of(encoding, [unusual, {"loss": 0.0}]))
    assert tally.means == {"loss": counted * LARGEST_METRIC / 2}


@pytest.mark.parametrize("value", [LARGEST_METRIC, -LARGEST_METRIC])
def test_numbers_do_not_overflow(value):
    """2^20 clients with the largest metrics."""
    most = 2**20
    encoding = NumbersEncoding(metrics=["loss"], num_clients=most, squares=True)
    one = numbers_of(encoding, [{"loss": value}], num_examples=2**40, saturated=2**31)
    tally = encoding.decode(one * np.uint64(most))
    assert tally.means == {"loss": value}
    assert tally.stds == {}
    assert (tally.clients, tally.examples, tally.saturated) == (most, most * 2**40, most * 2**31)


@pytest.mark.parametrize(
    "counts", [(0, 0), (0, 2), (3, 2), (1, 5), (-1, 2), (1, -2), (2**63, 1), (1, 1, -1), (1, 1, 0, -1)]
)
def test_impossible_counts_are_refused(counts):
    encoding = NumbersEncoding(metrics=["loss"], num_clients=4, squares=False)
    total = np.array([count % 2**64 for count in (*counts, 0, 0, 0)[:5]], np.uint64)
    with pytest.raises(ValueError, match="counts of the opened sum are impossible"):
        encoding.decode(total)


def test_a_sum_of_accuracies_does_not_tell_the_summands():
    """Three clients with 97, 101 and 113 test samples: many accuracies have the opened sum, and one the exact sum."""
    sizes, right = (97, 101, 113), (88, 79, 105)
    encoding = NumbersEncoding(metrics=["accuracy"], num_clients=3, squares=False)
    clients = [{"accuracy": count / size} for count, size in zip(right, sizes, strict=True)]
    opened = int(numbers_of(encoding, clients)[4])
    counts = np.meshgrid(*(np.arange(size + 1) for size in sizes), indexing="ij")

    def solutions(bits, total):
        sums = sum(np.rint(count / size * 2**bits) for count, size in zip(counts, sizes, strict=True))
        return int(np.count_nonzero(sums == total))

    exact = sum(round(client["accuracy"] * 2**32) for client in clients)
    assert solutions(METRIC_BITS, opened) > 10
    assert solutions(32, exact) == 1
