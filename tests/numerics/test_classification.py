"""Numbers of a classifier, by hand and against scikit-learn and torchmetrics."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from torchmetrics.functional.classification import multiclass_auroc, multiclass_confusion_matrix, multiclass_recall

from hyperfl_flwr.core.tasks import class_name
from hyperfl_flwr.metrics.classification import ClassScores
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.metrics.intervals import of_mean, of_share


def scores(labels: list[int], predicted: list[int], classes: int = 3) -> ClassScores:
    """Return the scores of a model that is sure of its predictions."""
    probabilities = np.eye(classes)[predicted]
    return ClassScores(labels=np.array(labels), predicted=np.array(predicted), probabilities=probabilities, loss=0.0)


def drawn(number: int, classes: int, seed: int = 0) -> ClassScores:
    """Return the scores of random logits with ties, on labels of all classes but the last."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-3, 4, (number, classes)) / 2)
    labels = torch.from_numpy(rng.integers(0, classes - 1, number))
    return evaluate(lambda images: images.flatten(1), logits[:, :, None, None], labels)


def test_accuracy_and_loss_by_hand() -> None:
    """Logits (ln 3, 0), (0, 0), (0, ln 7), (ln 4, 0) with labels 0, 1, 1, 1.

    Probabilities of the labels: 3/4, 1/2, 7/8, 1/5. Correct are the first and the third; of equal logits argmax is the
    first, so the second is wrong. Loss ln(4/3) + ln 2 + ln(8/7) + ln 5.
    """
    logits = torch.tensor([[3.0, 1], [1, 1], [1, 7], [4, 1]], dtype=torch.float64).log()
    found = evaluate(lambda images: images.flatten(1), logits.reshape(4, 2, 1, 1), torch.tensor([0, 1, 1, 1]))
    assert (found.correct, found.total) == (2, 4)
    assert found.accuracy == 0.5
    assert found.loss == pytest.approx(math.log(4 / 3 * 2 * 8 / 7 * 5), rel=1e-14)
    assert found.mean_loss == pytest.approx(found.loss / 4)
    np.testing.assert_allclose(found.probabilities[:, 1], [1 / 4, 1 / 2, 7 / 8, 1 / 5])
    assert found.confusion.tolist() == [[0, 0, 1], [1, 0, 2], [1, 1, 1]]
    # Of class 1 against class 0 with 1/4: all of 1/2, 7/8 are above, 1/5 is below. Of class 0 it is the same.
    assert found.auc == pytest.approx(2 / 3)


@pytest.mark.parametrize("batch_size", [1, 7, 9, 50, 53, 54, 200])
def test_batch_size_does_not_change_the_predictions(batch_size: int) -> None:
    """53 samples against numpy on all at once; with batches of 7, 9 and 50 the last one has 4, 8 and 3 samples."""
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((53, 5)), rng.integers(0, 5, 53)
    sizes = []

    def predict(images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        return images.flatten(1)

    images = torch.from_numpy(logits).reshape(53, 5, 1, 1)
    found = evaluate(predict, images, torch.from_numpy(labels), batch_size=batch_size)
    assert sum(sizes) == 53
    assert max(sizes) <= batch_size
    assert found.labels.tolist() == labels.tolist()
    assert found.predicted.tolist() == logits.argmax(axis=1).tolist()
    expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(53), labels]
    assert found.loss == pytest.approx(expected.sum(), rel=1e-12)


def test_a_model_that_always_says_the_same() -> None:
    """15 samples of class 0 and 150 of class 1: an accuracy of 91 % says nothing, the other numbers say so.

    F1 of class 1 is 300 / (300 + 15), that of class 0 is 0; all areas are 1/2.
    """
    found = scores([0] * 15 + [1] * 150, [1] * 165, classes=2)
    assert found.accuracy == found.majority_share == 150 / 165
    assert found.recalls.tolist() == [0, 1]
    assert found.balanced_accuracy == 0.5
    assert found.macro_f1 == pytest.approx(300 / 315 / 2)
    assert found.auc == 0.5


def test_classes_without_samples() -> None:
    """Class 2 has no samples but one prediction: no recall, an F1 of 0; class 3 has neither, and counts nowhere."""
    found = scores([0, 0, 1, 1], [0, 2, 1, 1], classes=4)
    np.testing.assert_array_equal(found.recalls, [0.5, 1, np.nan, np.nan])
    assert found.balanced_accuracy == 0.75
    assert found.macro_f1 == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_very_many_classes_need_no_matrix() -> None:
    """A server may name any number of classes: the numbers of K of them fit, those of K x K would not."""
    labels = np.array([0, 1, 200_000])
    found = ClassScores(labels=labels, predicted=labels, probabilities=np.zeros((3, 200_001), np.float32), loss=0.0)
    assert found.confusion.tolist() == [[0, 0, 1], [1, 1, 1], [200_000, 200_000, 1]]
    assert found.balanced_accuracy == found.macro_f1 == 1


def test_one_class_has_no_auc() -> None:
    found = scores([1, 1, 1], [1, 1, 0])
    assert math.isnan(found.auc)
    assert found.balanced_accuracy == pytest.approx(2 / 3)


def test_a_diverged_model_has_no_auc() -> None:
    logits = torch.full((4, 3), torch.nan)
    found = evaluate(lambda images: images.flatten(1), logits[:, :, None, None], torch.tensor([0, 1, 2, 0]))
    assert math.isnan(found.auc)
    assert found.total == 4


def test_outputs_that_are_not_numbers_are_wrong() -> None:
    """Where any logit is NaN there is no class, not the first one; an infinite distance to a class is a number."""
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, nan], [5.0, nan], [1.0, -inf], [0.0, 1.0]])
    found = evaluate(lambda images: images.flatten(1), logits[:, :, None, None], torch.tensor([0, 0, 0, 1]))
    assert found.confusion.tolist() == [[0, -1, 2], [0, 0, 1], [1, 1, 1]]
    assert (found.accuracy, found.balanced_accuracy) == (0.5, pytest.approx(2 / 3))
    assert found.macro_f1 == pytest.approx((2 / 4 + 1) / 2)
    assert [class_name(number, ("a", "b")) for number in found.predicted] == ["no class", "no class", "a", "b"]


def test_nothing_has_no_numbers() -> None:
    found = evaluate(lambda images: images.flatten(1), torch.zeros(0, 3, 1, 1), torch.zeros(0, dtype=torch.int64))
    numbers = (found.accuracy, found.mean_loss, found.balanced_accuracy, found.macro_f1, found.auc)
    assert all(map(math.isnan, (*numbers, found.majority_share)))
    assert found.interval is None


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("classes", [3, 10, 62])
def test_numbers_are_those_of_scikit_learn(classes: int) -> None:
    """With ties, and a class without samples, which scikit-learn's area of several classes does not allow."""
    found = drawn(400, classes)
    assert found.balanced_accuracy == pytest.approx(balanced_accuracy_score(found.labels, found.predicted))
    assert found.macro_f1 == pytest.approx(f1_score(found.labels, found.predicted, average="macro"))
    areas = [
        roc_auc_score(found.labels == number, found.probabilities[:, number]) for number in np.unique(found.labels)
    ]
    assert found.auc == pytest.approx(np.mean(areas), rel=1e-12)


@pytest.mark.filterwarnings("ignore:No positive samples in targets")
def test_numbers_are_those_of_torchmetrics() -> None:
    found = drawn(400, 10)
    labels, predicted = torch.from_numpy(found.labels), torch.from_numpy(found.predicted)
    confusion = multiclass_confusion_matrix(predicted, labels, num_classes=10)
    matrix = np.zeros((10, 10), int)
    matrix[found.confusion[:, 0], found.confusion[:, 1]] = found.confusion[:, 2]
    assert matrix.tolist() == confusion.tolist()
    recalls = multiclass_recall(predicted, labels, num_classes=10, average=None)
    np.testing.assert_allclose(found.recalls[:-1], recalls[:-1], rtol=1e-6)
    areas = multiclass_auroc(torch.from_numpy(found.probabilities), labels, num_classes=10, average=None)
    assert found.auc == pytest.approx(float(areas[:-1].mean()), rel=1e-5)  # torchmetrics' last class has no samples


def test_evaluation_keeps_no_graph() -> None:
    """Logits do not require a gradient although the weights do."""
    weights = torch.eye(3, requires_grad=True)
    required = []

    def predict(images: torch.Tensor) -> torch.Tensor:
        logits = images.flatten(1) @ weights
        required.append(logits.requires_grad)
        return logits

    found = evaluate(predict, torch.eye(3).reshape(3, 3, 1, 1), torch.arange(3))
    assert required == [False]
    assert found.correct == 3


def test_classes_are_exact_in_low_precision() -> None:
    """bfloat16 has no 257; the class must not be rounded to 256."""
    logits = torch.zeros(1, 300, dtype=torch.bfloat16)
    logits[0, 257] = 1
    found = evaluate(lambda images: images.flatten(1), logits[:, :, None, None], torch.tensor([257]))
    assert found.correct == 1


def test_interval_of_a_share() -> None:
    """16 of 28 images are 39 to 74 % (Wilson by hand: z = 1.96); the ends are the shares that 1.96 errors reach."""
    low, high = of_share(16, 28) or (0, 0)
    assert (round(low, 3), round(high, 3)) == (0.391, 0.735)
    for end in (low, high):
        assert abs(16 / 28 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 28), rel=1e-6)
    assert of_share(0, 5) == pytest.approx((0, 1.959964**2 / (5 + 1.959964**2)), abs=1e-7)
    assert of_share(5, 5) == pytest.approx((5 / (5 + 1.959964**2), 1), abs=1e-7)


def test_interval_of_a_mean() -> None:
    """Table of Student's t: 2.262 for 9 degrees of freedom."""
    low, high = of_mean(0.8, 0.1, 10) or (0, 0)
    assert high - 0.8 == pytest.approx(0.8 - low)
    assert high - 0.8 == pytest.approx(2.2622 * 0.1 / math.sqrt(10), rel=1e-4)
    assert of_mean(0.8, 0.0, 1) is None
