"""Properties of the partitions on arbitrary pools; expected numbers follow from the paper's settings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.partition import registry as partitions
from hyperfl_flwr.data.partition.allocation import class_counts, largest_remainder, reuse_report, round_fairly

QUICK = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32)


@st.composite
def pools(draw):
    """Return labels in random order of 2..12 classes, each with 8..60 samples."""
    sizes = draw(st.lists(st.integers(8, 60), min_size=2, max_size=12))
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.default_rng(draw(SEEDS)).permutation(labels)


def generator(seed):
    return np.random.default_rng(seed)


def assert_disjoint(indices):
    together = np.concatenate(indices)
    assert len(np.unique(together)) == len(together)


def assert_even_reuse(indices, labels):
    """Check that uses within a class differ by at most 1, and that a client repeats a sample only if it must."""
    uses = np.bincount(np.concatenate(indices), minlength=len(labels))
    for label in np.unique(labels):
        assert np.ptp(uses[labels == label]) <= 1
        available = np.count_nonzero(labels == label)
        for mine in indices:
            own = np.bincount(mine, minlength=len(labels))[labels == label]
            assert own.max() <= -(-own.sum() // available)


def every_partition(labels, seed, num_clients, num_classes):
    """Return each partition by labels of a pool, with automatic sizes."""
    common = {"num_clients": num_clients}
    classes = {"num_classes": num_classes}
    return {
        "iid": partitions.iid(labels, generator(seed), **common),
        "similarity": partitions.similarity(labels, generator(seed), iid_fraction=0.2, **classes, **common),
        "dirichlet": partitions.dirichlet(labels, generator(seed), alpha=0.5, **classes, **common),
        "dirichlet-per-label": partitions.dirichlet_per_label(
            labels, generator(seed), alpha=0.5, min_samples=1, **common
        ),
        "shards": partitions.shards(labels, generator(seed), shards_per_client=2, **common),
    }


@QUICK
@given(labels=pools(), seed=SEEDS, num_clients=st.integers(1, 8))
def test_automatic_sizes_share_no_sample_and_are_deterministic(labels, seed, num_clients):
    num_classes = labels.max() + 1
    parts = every_partition(labels, seed, num_clients, num_classes)
    again = every_partition(labels, seed, num_clients, num_classes)
    for name, indices in parts.items():
        assert len(indices) == num_clients
        if name in ("similarity", "dirichlet") and min(map(len, indices)) == 1:
            continue  # every client gets one sample even if a class has too few
        assert_disjoint(indices)
        for mine, same in zip(indices, again[name], strict=True):
            assert len(mine) >= 1
            np.testing.assert_array_equal(mine, same)


@QUICK
@given(labels=pools(), seed=SEEDS, num_clients=st.integers(1, 8))
def test_iid_shards_and_dirichlet_per_label_share_out_all_data(labels, seed, num_clients):
    parts = every_partition(labels, seed, num_clients, labels.max() + 1)
    for name in ("iid", "shards", "dirichlet-per-label"):
        np.testing.assert_array_equal(np.sort(np.concatenate(parts[name])), np.arange(len(labels)))
    assert np.ptp([len(mine) for mine in parts["iid"]]) <= 1
    assert np.ptp([len(mine) for mine in parts["shards"]]) <= 2  # two shards, each at most one larger than others


@QUICK
@given(labels=pools(), seed=SEEDS, num_clients=st.integers(1, 8), samples=st.integers(1, 80))
def test_given_sizes_are_kept_with_even_reuse(labels, seed, num_clients, samples):
    common = {"num_classes": labels.max() + 1, "num_clients": num_clients, "samples": samples}
    for indices in (
        partitions.similarity(labels, generator(seed), iid_fraction=0.2, **common),
        partitions.dirichlet(labels, generator(seed), alpha=0.5, **common),
    ):
        assert [len(mine) for mine in indices] == [samples] * num_clients
        assert_even_reuse(indices, labels)


@QUICK
@given(labels=pools(), seed=SEEDS, num_clients=st.integers(1, 8), samples=st.integers(1, 80))
def test_uniform_sizes_are_kept_with_even_reuse_over_the_whole_pool(labels, seed, num_clients, samples):
    indices = partitions.iid(labels, generator(seed), num_clients=num_clients, samples=samples)
    assert [len(mine) for mine in indices] == [samples] * num_clients
    assert np.ptp(np.bincount(np.concatenate(indices), minlength=len(labels))) <= 1


@QUICK
@given(labels=pools(), seed=SEEDS, num_clients=st.integers(1, 8), samples=st.integers(1, 20))
def test_sizes_of_whole_pool_partitions_are_upper_limits(labels, seed, num_clients, samples):
    clients = np.arange(len(labels)) % num_clients
    common = {"num_clients": num_clients}
    for limited, whole in (
        (
            partitions.natural(clients, generator(seed), samples=samples, **common),
            partitions.natural(clients, generator(seed), **common),
        ),
        (
            partitions.shards(labels, generator(seed), shards_per_client=2, samples=samples, **common),
            partitions.shards(labels, generator(seed), shards_per_client=2, **common),
        ),
    ):
        for few, many in zip(limited, whole, strict=True):
            assert len(few) == min(samples, len(many))
            assert np.isin(few, many).all()


@QUICK
@given(labels=pools(), seed=SEEDS, num_clients=st.integers(1, 8), samples=st.one_of(st.none(), st.integers(1, 60)))
def test_test_data_follow_the_training_proportions(labels, seed, num_clients, samples):
    """Class counts of the test data differ by less than 1 from the exact shares of the training data."""
    num_classes = labels.max() + 1
    train = partitions.dirichlet_per_label(labels, generator(seed), num_clients=num_clients, alpha=0.5, min_samples=1)
    counts = class_counts(train, labels, num_classes)
    pool = generator(seed).permutation(np.repeat(np.arange(num_classes), 30))
    test = partitions.match_class_shares(counts, pool, generator(seed), samples=samples)
    shares = counts / counts.sum(axis=1, keepdims=True)
    sizes = np.array([len(mine) for mine in test])
    assert (np.abs(class_counts(test, pool, num_classes) - shares * sizes[:, None]) < 1).all()
    assert sizes.min() >= 1
    if samples is None and sizes.min() > 1:
        assert_disjoint(test)
    if samples is not None:
        assert (sizes == samples).all()
        assert_even_reuse(test, pool)


@QUICK
@given(
    fractions=st.lists(st.integers(0, 50), min_size=2, max_size=8).filter(any),
    size=st.integers(1, 40),
    num_rows=st.integers(1, 30),
    seed=SEEDS,
)
def test_rounding_keeps_rows_and_favours_no_class(fractions, size, num_rows, seed):
    """With equal rows, the sum of a class is its expected sum rounded up or down."""
    share = np.array(fractions) / sum(fractions)
    expected = np.tile(size * share, (num_rows, 1))
    for counts in (
        round_fairly(expected, generator(seed)),
        largest_remainder(np.tile(share, (num_rows, 1)), np.full(num_rows, size), generator(seed)),
    ):
        assert (counts.sum(axis=1) == size).all()
        assert (np.abs(counts - expected) < 1).all()
    columns = round_fairly(expected, generator(seed)).sum(axis=0)
    assert (np.abs(columns - num_rows * size * share) < 1 + 1e-6).all()


def test_similarity_of_the_paper_20_clients_600_samples():
    """Similarity 20 gives 600 * .2 / 10 = 12 of each class, and 600 * .8 / 3 = 160 more of each dominant class."""
    labels = np.repeat(np.arange(10), 6000)
    indices = partitions.similarity(labels, generator(0), num_classes=10, num_clients=20, iid_fraction=0.2, samples=600)
    counts = class_counts(indices, labels, 10)
    dominant = [{0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {6, 7, 8}, {8, 9, 0}]
    for client, row in enumerate(counts):
        assert row.tolist() == [172 if label in dominant[client % 5] else 12 for label in range(10)]
    assert_disjoint(indices)
    assert reuse_report(indices, labels, 10)["reused"] is False


def test_reuse_of_the_paper_100_clients_300_test_samples():
    """Class 0 is dominant for 40 clients: 40 * 300 * .8 / 3 + 100 * 300 * .2 / 10 = 3,800 of 1,000 test images.

    Class 1 is dominant for 20 clients: 20 * 80 + 100 * 6 = 2,200.
    """
    labels = np.repeat(np.arange(10), 1000)
    train = np.array([[172 if label in (client % 5 * 2, (client % 5 * 2 + 1), (client % 5 * 2 + 2) % 10) else 12
                       for label in range(10)] for client in range(100)])  # fmt: skip
    indices = partitions.match_class_shares(train, labels, generator(0), samples=300)
    report = reuse_report(indices, labels, 10)
    assert report["per_class"]["draws"] == [3800, 2200] * 5
    assert report["per_class"]["available"] == [1000] * 10
    assert report["per_class"]["max_uses"] == [4, 3] * 5
    assert (report["largest_ratio"], report["max_uses"], report["reused"]) == (3.8, 4, True)
    assert (report["draws"], report["distinct"], report["available"]) == (30_000, 10_000, 10_000)


def test_automatic_size_is_what_the_scarcest_class_allows():
    """10 classes of 100, 20 clients, s = 20, size n: class 0 needs 8 * .8 n / 3 + 20 * .02 n = 2.5333 n <= 100."""
    labels = np.repeat(np.arange(10), 100)
    common = {"num_classes": 10, "num_clients": 20, "iid_fraction": 0.2}
    indices = partitions.similarity(labels, generator(0), **common)
    assert {len(mine) for mine in indices} <= {38, 39}  # 100 / 2.5333 = 39.47; rounding may cost one
    assert_disjoint(indices)
    assert {len(mine) for mine in partitions.similarity(labels, generator(0), cap=7, **common)} == {7}


def test_uniform_share_alone_gives_every_client_every_class():
    """With similarity 100, 50 samples of 10 classes are 5 of each."""
    labels = np.repeat(np.arange(10), 100)
    indices = partitions.similarity(labels, generator(0), num_classes=10, num_clients=4, iid_fraction=1.0, samples=50)
    assert (class_counts(indices, labels, 10) == 5).all()


def test_dominant_classes():
    """For 10 and 62 classes they are the paper's, for other numbers those of the docstring's rule."""
    assert [group.tolist() for group in partitions.dominant_classes(10)] == [
        [0, 1, 2],
        [2, 3, 4],
        [4, 5, 6],
        [6, 7, 8],
        [8, 9, 0],
    ]
    assert [(group[0], group[-1], len(group)) for group in partitions.dominant_classes(62)] == [
        (0, 9, 10),
        (10, 35, 26),
        (36, 61, 26),
    ]
    hundred = partitions.dominant_classes(100)
    assert [len(group) for group in hundred] == [21] * 5
    assert hundred[4].tolist() == [*range(80, 100), 0]
    assert [group.tolist() for group in partitions.dominant_classes(3)] == [[0, 1], [1, 2], [2, 0]]
    assert [group.tolist() for group in partitions.dominant_classes(2)] == [[0], [1]]
    assert [group.tolist() for group in partitions.dominant_classes(1)] == [[0]]


def test_dirichlet_extremes():
    """A large alpha gives uniform classes, and a small one gives each client one class."""
    labels = np.repeat(np.arange(10), 1000)
    common = {"num_classes": 10, "num_clients": 30, "samples": 100}
    flat = class_counts(partitions.dirichlet(labels, generator(1), alpha=1e7, **common), labels, 10)
    assert (np.abs(flat - 10) <= 1).all()
    sharp = class_counts(partitions.dirichlet(labels, generator(1), alpha=1e-4, **common), labels, 10)
    assert (np.sort(sharp, axis=1)[:, -1] >= 99).mean() > 0.9


def test_shards_hold_few_classes():
    """Shards that divide the classes evenly have one class each, so two shards have at most two classes."""
    labels = generator(0).permutation(np.repeat(np.arange(10), 40))
    indices = partitions.shards(labels, generator(0), num_clients=20, shards_per_client=2)
    assert (np.count_nonzero(class_counts(indices, labels, 10), axis=1) <= 2).all()
    assert {len(mine) for mine in indices} == {20}


def test_dirichlet_per_label_tops_up_small_clients():
    """With 600 samples at alpha .05 chance leaves some of 100 clients without data; each still gets at least 5."""
    labels = np.repeat(np.arange(10), 60)
    indices = partitions.dirichlet_per_label(labels, generator(0), num_clients=100, alpha=0.05, min_samples=5)
    assert min(len(mine) for mine in indices) == 5
    np.testing.assert_array_equal(np.sort(np.concatenate(indices)), np.arange(600))


def test_a_class_without_samples_is_left_out():
    """Class 1 is missing: other classes replace it in the training and the test data."""
    labels = np.array([0, 2] * 50)
    indices = partitions.similarity(labels, generator(0), num_classes=3, num_clients=3, iid_fraction=0.2, samples=10)
    assert (class_counts(indices, labels, 3).sum(axis=0)[[1]] == 0).all()
    assert [len(mine) for mine in indices] == [10] * 3
    test = partitions.match_class_shares(np.array([[5, 5, 0]]), labels, generator(0), samples=4)
    assert class_counts(test, labels, 3).tolist() == [[4, 0, 0]]
    with pytest.raises(DataError, match=r"none of the classes \[1\] of client 0"):
        partitions.match_class_shares(np.array([[0, 5, 0]]), labels, generator(0), samples=4)


@pytest.mark.parametrize(
    "build",
    [
        lambda labels: partitions.iid(labels, generator(0), num_clients=21),
        lambda labels: partitions.similarity(labels, generator(0), num_classes=2, num_clients=21, iid_fraction=0.2),
        lambda labels: partitions.dirichlet(labels, generator(0), num_classes=2, num_clients=21, alpha=1.0),
        lambda labels: partitions.dirichlet_per_label(labels, generator(0), num_clients=21, alpha=1.0),
        lambda labels: partitions.shards(labels, generator(0), num_clients=7, shards_per_client=3),
    ],
)
def test_more_clients_than_samples_are_refused(build):
    with pytest.raises(DataError, match="20"):
        build(np.arange(20) % 2)
