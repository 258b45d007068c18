"""Losses and scores of several labels and of numbers, beside scikit-learn's and torch's."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import sem, t
from sklearn.metrics import (
    balanced_accuracy_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from torch.nn import functional

from hyperfl_flwr.core.tasks import MULTI_LABEL, REGRESSION, TASKS, task_of
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.metrics.multi_label import LabelScores
from hyperfl_flwr.metrics.regression import NumberScores
from hyperfl_flwr.models.losses import loss_of, task_of_labels

RNG = np.random.default_rng(5)
LABELS = torch.tensor(RNG.random((403, 4)) < np.array([0.5, 0.1, 0.9, 0.3]))
NUMBERS = torch.tensor(RNG.normal(size=(403, 3)) * np.array([1, 10, 0.1]) + 5)
OUTPUTS = torch.tensor(RNG.normal(size=(403, 4)), dtype=torch.float64)


def of_labels() -> LabelScores:
    logits = OUTPUTS + 2 * (LABELS.double() - 0.5)
    found = evaluate(lambda batch: batch, logits, LABELS)
    assert isinstance(found, LabelScores)
    return found


def of_numbers() -> NumberScores:
    found = evaluate(lambda batch: batch, NUMBERS + 0.5 * OUTPUTS[:, :3], NUMBERS)
    assert isinstance(found, NumberScores)
    return found


@pytest.mark.parametrize("labels", [LABELS, NUMBERS, torch.arange(403) % 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_are_of_the_losses_of_single_samples(labels: torch.Tensor, reduction: str) -> None:
    outputs = OUTPUTS[:, : labels.shape[1] if labels.ndim == 2 else 4]
    each = loss_of(outputs, labels, "none")
    assert each.shape == (403,)
    torch.testing.assert_close(loss_of(outputs, labels, reduction), getattr(each, reduction)())  # type: ignore[arg-type]
    alone = torch.stack([loss_of(outputs[i : i + 1], labels[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(alone, each[:5])


def test_losses_are_those_of_torch() -> None:
    torch.testing.assert_close(
        loss_of(OUTPUTS, LABELS), functional.binary_cross_entropy_with_logits(OUTPUTS, LABELS.double())
    )
    torch.testing.assert_close(loss_of(OUTPUTS[:, :3], NUMBERS), functional.mse_loss(OUTPUTS[:, :3], NUMBERS))
    classes = torch.arange(403) % 4
    assert torch.equal(loss_of(OUTPUTS, classes), functional.cross_entropy(OUTPUTS, classes))


def test_the_type_of_labels_says_the_task() -> None:
    tasks = [task_of_labels(torch.zeros(2, dtype=kind)).name for kind in (torch.int64, torch.bool, torch.float32)]
    assert tasks == list(TASKS)
    assert task_of({}).name == "classification"  # of runs of earlier versions
    assert task_of({"task": "regression"}) is REGRESSION


def test_label_scores_are_those_of_scikit_learn() -> None:
    found = of_labels()
    truth, predicted, shares = LABELS.numpy(), found.predicted, found.probabilities
    assert found.accuracy == pytest.approx((truth == predicted).mean())
    columns = range(truth.shape[1])
    balanced = np.mean([balanced_accuracy_score(truth[:, i], predicted[:, i]) for i in columns])
    assert found.balanced_accuracy == pytest.approx(balanced)
    assert found.macro_f1 == pytest.approx(f1_score(truth, predicted, average="macro"))
    assert found.auc == pytest.approx(roc_auc_score(truth, shares, average="macro"))
    assert found.majority_share == pytest.approx(np.maximum(truth.mean(axis=0), 1 - truth.mean(axis=0)).mean())
    assert found.mean_loss == pytest.approx(float(loss_of(OUTPUTS + 2 * (LABELS.double() - 0.5), LABELS)))
    of_samples = (truth == predicted).mean(axis=1)
    assert found.interval == pytest.approx(t.interval(0.95, 402, found.accuracy, sem(of_samples)), rel=1e-9)
    assert [row[0] for row in found.details()] == truth.sum(axis=0).tolist()


def test_a_label_that_all_samples_have_leaves_the_others() -> None:
    labels = LABELS.clone()
    labels[:, 2] = True
    found = evaluate(lambda batch: batch, OUTPUTS, labels)
    kept = evaluate(lambda batch: batch, OUTPUTS[:, [0, 1, 3]], labels[:, [0, 1, 3]])
    assert isinstance(found, LabelScores)
    assert found.value("auc") == pytest.approx(kept.value("auc"))
    assert math.isnan(found.areas[2])
    assert math.isnan(found.specificities[2])


def test_labels_of_which_the_outputs_are_not_numbers_are_wrong() -> None:
    """Those that a sample does not have, too."""
    found = evaluate(lambda batch: batch, torch.full((4, 2), math.nan), LABELS[:4, :2])
    assert isinstance(found, LabelScores)
    assert found.accuracy == 0
    assert set(found.specificities[~np.isnan(found.specificities)]) == {0}


def test_number_scores_are_those_of_scikit_learn() -> None:
    found = of_numbers()
    truth, predicted = NUMBERS.numpy(), found.predicted
    each = r2_score(truth, predicted, multioutput="raw_values")
    np.testing.assert_allclose(found.determinations, each)
    assert found.score == pytest.approx(max(-1.0, each.mean()))
    assert found.rmse == pytest.approx(root_mean_squared_error(truth, predicted))
    assert found.mae == pytest.approx(mean_absolute_error(truth, predicted))
    assert found.mean_loss == pytest.approx(((truth - predicted) ** 2).mean())


def test_errors_of_single_targets_are_in_their_own_units() -> None:
    rows = np.array(of_numbers().details((1.0, 10.0, 0.5)))
    plain = np.array(of_numbers().details())
    np.testing.assert_allclose(rows[:, 0], plain[:, 0])
    np.testing.assert_allclose(rows[:, 1:], plain[:, 1:] * np.array([[1.0], [10.0], [0.5]]))


@pytest.mark.parametrize(
    ("truth", "predicted", "expected"),
    [
        ([1.0, 1.0], [1.0, 1.0], 1.0),  # as scikit-learn: the same number everywhere, predicted exactly
        ([1.0, 1.0], [1.0, 2.0], 0.0),
        ([4.0], [3.0], 0.0),
        ([0.0, 1.0], [100.0, -100.0], -1.0),  # the smallest that is reported
        ([0.0, 1.0], [math.nan, 1.0], -1.0),
        ([0.0, 1.0], [math.inf, 1.0], -1.0),
        ([0.0, 1.0], [0.5, 0.5], 0.0),
    ],
)
def test_r2_in_special_cases(truth: list[float], predicted: list[float], expected: float) -> None:
    found = evaluate(lambda batch: batch, torch.tensor(predicted)[:, None], torch.tensor(truth)[:, None])
    assert found.score == pytest.approx(expected)
    assert not math.isnan(found.value("rmse"))
    assert not math.isnan(found.value("mae"))


def test_batches_change_no_score() -> None:
    for outputs, labels in ((OUTPUTS, LABELS), (OUTPUTS[:, :3], NUMBERS)):
        one, many = (evaluate(lambda batch: batch, outputs, labels, batch_size=size) for size in (403, 10))
        for name in (one.task.score, *one.task.all_scores):
            assert one.value(name) == many.value(name)
        assert one.loss == pytest.approx(many.loss)


def test_titles_and_names_of_scores_belong_together() -> None:
    for task in TASKS.values():
        assert len(task.score_titles) == len(task.all_scores)
    assert [task.counted(number) for task in TASKS.values() for number in (1, 2)] == [
        "1 class", "2 classes", "1 label", "2 labels", "1 target", "2 targets",
    ]  # fmt: skip
    assert MULTI_LABEL.text(0.5) == "50.00 %"
    assert REGRESSION.text(0.5) == "0.5000"
    assert REGRESSION.key("test_accuracy_worst") == "test_r2_worst"
    assert MULTI_LABEL.key("test_accuracy_worst") == "test_accuracy_worst"


def test_a_target_with_one_value_has_no_spread() -> None:
    """The mean of thirty times 0.1 is rounded to another number, by which nothing is divided."""
    labels = np.full((30, 1), 0.1)
    assert labels.mean(axis=0) != 0.1
    found = NumberScores(labels=labels, predicted=labels + 0.01, loss=0.003)
    assert found.determinations.tolist() == [0.0]
    assert NumberScores(labels=labels, predicted=labels, loss=0.0).r2 == 1.0
