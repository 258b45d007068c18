"""Replies that have the right layout, but impossible values."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hyperfl_flwr.protocol.arrays import BLOCK
from hyperfl_flwr.protocol.messages import LABEL_COUNTS, ClientResult, Reduction, Report
from strategies.engine.replies import TrainingReply
from strategies.engine.reply_bounds import Bounds, refuse_impossible_numbers

RATIO = 2.0
SENT = {"net/a": np.full(3, 1.0, np.float32), "net/b": np.full(1, 1.0, np.float32)}
"""Arrays of norm 2, so that the norm of an update may be 4."""


def reply(change: float, *, reduction: Reduction = Reduction.MEAN_BY_EXAMPLES, **metrics: float) -> TrainingReply:
    """Return the reply of two clients with 10 and 30 samples; its mean is `SENT` with a change of `net/b`.

    A sum is of changes: its mean is the change alone.
    """
    numbers = {"personalized-accuracy": 0.5} | {name.replace("_", "-"): value for name, value in metrics.items()}
    results = [ClientResult(client=client, num_examples=10 + 20 * client, metrics=numbers) for client in (0, 1)]
    weight = np.float64(40.0 if reduction is Reduction.MEAN_BY_EXAMPLES else 2.0)
    start = {key: value * np.float32(reduction is not Reduction.SUM) for key, value in SENT.items()}
    mean = {**start, "net/b": start["net/b"] + np.float32(change)}
    return TrainingReply(report=Report(results=results), arrays={key: value * weight for key, value in mean.items()})


def bounds_of(reductions: dict[str, Reduction], **changes: Any) -> Bounds:
    values = {"max_ratio": RATIO, "num_examples": {}, "shared": SENT, "per_client": {}, "reductions": reductions}
    return Bounds(**values | changes)


def check(answer: TrainingReply, reduction: Reduction = Reduction.MEAN_BY_EXAMPLES, **told: int) -> None:
    counts = {int(client.removeprefix("client_")): count for client, count in told.items()}
    bounds_of({"net": reduction}, num_examples=counts).check(answer)


@pytest.mark.parametrize("reduction", [Reduction.MEAN_BY_EXAMPLES, Reduction.MEAN, Reduction.SUM])
def test_an_update_may_be_so_long_and_no_longer(reduction: Reduction) -> None:
    """An update of norm 3.9 is accepted and one of 4.1 refused; the mean over both clients counts, also for a sum."""
    check(reply(3.9, reduction=reduction), reduction)
    with pytest.raises(ValueError, match=r"update of net has 2\.05 times the norm .*max-update-ratio = 2"):
        check(reply(4.1, reduction=reduction), reduction)


def test_a_ratio_of_zero_allows_any_update() -> None:
    bounds_of({"net": Reduction.MEAN_BY_EXAMPLES}, max_ratio=0.0).check(reply(1e9))


def test_what_was_sent_may_be_zero() -> None:
    """For 4 zeros, 0.05 each counts, a norm of 0.1: an update of 0.19 is accepted and one of 0.21 refused."""
    sent = {"net/a": np.zeros(4, np.float32)}
    reductions = {"net": Reduction.MEAN, "own": Reduction.EACH}
    bounds = bounds_of(reductions, shared=sent, per_client={0: {"own/a": sent["net/a"]}})
    results = [ClientResult(client=0, num_examples=1, metrics={"personalized-accuracy": 0.0})]
    for length, fits in ((0.19, True), (0.21, False)):
        arrays = {"net/a": np.array([length, 0, 0, 0], np.float32)}
        for shared, per_client in ((arrays, {}), ({}, {0: {"own/a": arrays["net/a"]}})):
            one = TrainingReply(report=Report(results=results), arrays=shared, per_client=per_client)
            if fits:
                bounds.check(one)
            else:
                with pytest.raises(ValueError, match=r"2\.1 times the norm"):
                    bounds.check(one)


def alone(value: float) -> TrainingReply:
    """Return the reply of a client that sends arrays alone, `own/a` with four equal elements."""
    results = [ClientResult(client=0, num_examples=1, metrics={"personalized-accuracy": 0.0})]
    arrays = {"own/a": np.full(4, value, np.float32)}
    return TrainingReply(report=Report(results=results), arrays={}, per_client={0: arrays})


def test_changes_are_measured_from_zero() -> None:
    """A client of pFedHN sends the change of its network: none is 0, and what wipes the network 1, not the reverse."""
    sent = {0: {"own/a": np.full(4, 1.0, np.float32)}}
    changes, values = (
        bounds_of({"own": reduction}, max_ratio=0.9, per_client=sent)
        for reduction in (Reduction.PER_CLIENT, Reduction.EACH)
    )
    for bounds, harmless, wiped in ((changes, 0.0, -1.0), (values, 1.0, 0.0)):
        bounds.check(alone(harmless))
        with pytest.raises(ValueError, match=r"update of own has 1 times the norm"):
            bounds.check(alone(wiped))


def test_gradients_of_which_the_mean_is_taken_are_measured_from_zero() -> None:
    """PRIV-HFL's clients send gradients of the generator that the server trains."""
    sent = {"generator/a": np.full(4, 1.0, np.float32)}
    bounds = bounds_of({"generator": Reduction.MEAN}, shared=sent, max_ratio=0.9)
    results = [ClientResult(client=0, num_examples=1, metrics={"personalized-accuracy": 0.0})]
    small, large = (
        TrainingReply(report=Report(results=results), arrays={"generator/a": np.full(4, size, np.float32)})
        for size in (0.01, 1.0)
    )
    bounds.check(small)
    with pytest.raises(ValueError, match="update of generator has 1 times the norm"):
        bounds.check(large)


def test_noise_of_a_client_alone_does_not_count() -> None:
    """Of a change of 3 in each element, noise with a standard deviation of 1 explains 1.1."""
    sent = {0: {"own/a": np.full(4, 1.0, np.float32)}}
    bounds = bounds_of({"own": Reduction.EACH}, per_client=sent)
    with pytest.raises(ValueError, match=r"has 3 times the norm"):
        bounds.check(alone(4.0))
    replace(bounds, noise=1.0).check(alone(4.0))
    with pytest.raises(ValueError, match=r"has 2\.9 times the norm"):
        replace(bounds, noise=1.0).check(alone(5.0))


def test_control_variates_are_as_large_as_gradients() -> None:
    """SCAFFOLD's begin at 0; their reference is 0.2 for each element, not the size of a network's parameters."""
    sent = {"control/a": np.zeros(4, np.float32)}
    bounds = bounds_of({"control": Reduction.SUM}, shared=sent)
    results = [ClientResult(client=0, num_examples=1, metrics={"personalized-accuracy": 0.0})]
    for size, fits in ((0.39, True), (0.42, False)):
        one = TrainingReply(report=Report(results=results), arrays={"control/a": np.full(4, size, np.float32)})
        if fits:
            bounds.check(one)
        else:
            with pytest.raises(ValueError, match=r"update of control has 2\.1 times the norm"):
                bounds.check(one)


def test_numbers_that_overflow_are_refused() -> None:
    """The largest float32 is refused without an overflow, because squares are added in float64."""
    results = [ClientResult(client=0, num_examples=1, metrics={"personalized-accuracy": 0.0})]
    arrays = {**SENT, "net/b": np.array([np.finfo(np.float32).max])}
    with pytest.raises(ValueError, match=r"1\.7e\+38 times the norm"):
        check(TrainingReply(report=Report(results=results), arrays=arrays))


def test_one_client_s_arrays_are_not_divided() -> None:
    """With one client of 40 samples, an update of 1 + 3.9 is accepted and one of 1 + 4.1 is refused."""
    results = [ClientResult(client=0, num_examples=40, metrics={"personalized-accuracy": 0.0})]
    for change, fits in ((3.9, True), (4.1, False)):
        one = TrainingReply(
            report=Report(results=results), arrays={**SENT, "net/b": SENT["net/b"] + np.float32(change)}
        )
        if fits:
            check(one)
        else:
            with pytest.raises(ValueError, match=r"2\.05 times the norm"):
                check(one)


def test_outliers_count_in_the_norm() -> None:
    """Sums without a change are accepted with 156 / 40 = 3.9 in a higher level, and refused with 164 / 40 = 4.1."""
    for outlier, fits in ((156.0, True), (164.0, False)):
        answer = replace(reply(0.0), outliers={2: {"net/b": np.array([outlier])}})
        if fits:
            check(answer)
        else:
            with pytest.raises(ValueError, match=r"2\.05 times the norm"):
                check(answer)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_arrays_of_several_blocks(dtype: type, size: int) -> None:
    """For a sent norm of 0.2 sqrt(size), an update of 0.3 (1.5 times) is accepted and one of 0.41 (2.05) is refused."""
    rng = np.random.default_rng(0)
    signs = rng.choice([-1, 1], size)
    shared = {"net/a": (0.2 * signs).astype(dtype)}
    results = [ClientResult(client=c, num_examples=3 + c, metrics={"personalized-accuracy": 0.0}) for c in (0, 1)]
    bounds = bounds_of({"net": Reduction.MEAN_BY_EXAMPLES}, shared=shared)
    for change, fits in ((0.3, True), (0.41, False)):
        sums = {"net/a": 7.0 * (shared["net/a"] + rng.permutation(signs) * change)}
        one = TrainingReply(report=Report(results=results), arrays=sums)
        if fits:
            bounds.check(one)
        else:
            with pytest.raises(ValueError, match=r"2\.05 times the norm"):
                bounds.check(one)


def test_a_number_of_samples_may_not_change() -> None:
    """Client 1 has 30 samples, not 29; counts that the handshake did not give are not compared."""
    check(reply(0.0), client_1=30)
    with pytest.raises(ValueError, match="client 1 reports 30 training samples but announced 29"):
        check(reply(0.0), client_0=10, client_1=29)


@pytest.mark.parametrize(("value", "fits"), [(0.0, True), (1.0, True), (1.01, False), (-0.01, False)])
@pytest.mark.parametrize("name", ["personalized_accuracy", "aggregate_accuracy", "personalized_global_accuracy"])
def test_an_accuracy_is_a_share(name: str, value: float, fits: bool) -> None:
    if fits:
        check(reply(0.0, **{name: value}))
    else:
        with pytest.raises(ValueError, match=f"{name.replace('_', '-')} of client 0 must be between 0 and 1, got"):
            check(reply(0.0, **{name: value}))


@pytest.mark.parametrize(("value", "fits"), [(0.0, True), (float("inf"), True), (-1e-9, False)])
@pytest.mark.parametrize("name", ["personalized_validation_mse", "personalized_rmse", "kept_mae", "aggregate_loss"])
def test_an_error_is_not_negative(name: str, value: float, fits: bool) -> None:
    """The smallest mean squared error on validation data decides about the best round; it may be infinite."""
    if fits:
        check(reply(0.0, **{name: value}))
    else:
        with pytest.raises(ValueError, match=f"{name.replace('_', '-')} of client 0 must be at least 0, got -1e-09"):
            check(reply(0.0, **{name: value}))


def test_a_loss_in_training_may_be_negative() -> None:
    """FedDyn's has a linear term."""
    check(reply(0.0, train_loss=-3.0))


def test_an_accuracy_that_is_missing() -> None:
    """It is refused like one that is not a number, since a report's columns hold NaN for a missing metric."""
    results = [ClientResult(client=4, num_examples=1, metrics={"personalized-accuracy": float("nan"), "seconds": 1.0})]
    report = Report.from_record(Report(results=results, process="p").to_record())
    with pytest.raises(ValueError, match="client 4 reports no personalized-accuracy, or one that is not a number"):
        refuse_impossible_numbers(report, {}, required="personalized-accuracy")


def test_a_client_of_a_node_that_sends_no_metrics() -> None:
    report = Report(results=[ClientResult(client=4, num_examples=1, metrics={})], process="p")
    refuse_impossible_numbers(Report.from_record(report.to_record()), {}, required="personalized-accuracy")


@pytest.mark.parametrize(
    ("counts", "fits"),
    [([30, 0, 10], True), ([40, 0, 0], True), ([30, 0, 9], False), ([30.5, 0, 9.5], False), ([50, -10, 0], False)],
)
@pytest.mark.parametrize("max_ratio", [0.0, RATIO])
def test_label_counts_add_up_to_the_number_of_samples(counts: list[float], fits: bool, max_ratio: float) -> None:
    """They are whole numbers from 0 on; `max-update-ratio`, which is about parameters, does not bound them."""
    sent = {LABEL_COUNTS: np.zeros(3, np.float32)}
    bounds = bounds_of({"labels": Reduction.EACH}, max_ratio=max_ratio, shared={}, per_client={0: sent})
    results = [ClientResult(client=0, num_examples=40, metrics={"personalized-accuracy": 0.5})]
    arrays = {0: {LABEL_COUNTS: np.array(counts, np.float32)}}
    answer = TrainingReply(report=Report(results=results), arrays={}, per_client=arrays)
    if fits:
        bounds.check(answer)
    else:
        with pytest.raises(ValueError, match=r"the label counts of client 0 must be whole numbers .* 40 training"):
            bounds.check(answer)
