"""Accuracy and loss computed as sums over samples."""

import math

import numpy as np
import pytest
import torch

from hyperfl_flwr.metrics.classification import ClassificationSums, evaluate


def test_accuracy_and_loss_by_hand():
    """Logits (ln 3, 0), (0, 0), (0, ln 7), (ln 4, 0) with labels 0, 1, 1, 1.

    Probabilities of the labels: 3/4, 1/2, 7/8, 1/5. Correct are the first and the third; of equal logits argmax is the
    first, so the second is wrong. Loss ln(4/3) + ln 2 + ln(8/7) + ln 5.
    """
    logits = torch.tensor([[3.0, 1], [1, 1], [1, 7], [4, 1]], dtype=torch.float64).log()
    sums = evaluate(lambda images: images.flatten(1), logits.reshape(4, 2, 1, 1), torch.tensor([0, 1, 1, 1]))
    assert (sums.correct, sums.total) == (2, 4)
    assert sums.accuracy == 0.5
    assert sums.loss == pytest.approx(math.log(4 / 3 * 2 * 8 / 7 * 5), rel=1e-14)
    assert sums.mean_loss == pytest.approx(sums.loss / 4)


@pytest.mark.parametrize("batch_size", [1, 7, 9, 50, 53, 54, 200])
def test_batch_size_does_not_change_the_counts(batch_size):
    """53 samples against numpy on all at once; with batches of 7, 9 and 50 the last one has 4, 8 and 3 samples."""
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((53, 5)), rng.integers(0, 5, 53)
    sizes = []

    def predict(images):
        sizes.append(len(images))
        return images.flatten(1)

    images = torch.from_numpy(logits).reshape(53, 5, 1, 1)
    sums = evaluate(predict, images, torch.from_numpy(labels), batch_size=batch_size)
    assert sum(sizes) == 53
    assert max(sizes) <= batch_size
    assert (sums.correct, sums.total) == (int((logits.argmax(axis=1) == labels).sum()), 53)
    expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(53), labels]
    assert sums.loss == pytest.approx(expected.sum(), rel=1e-12)


def test_a_mean_of_sums_is_no_mean_of_means():
    """1 of 1 and 1 of 3 correct give 2 of 4, not (1 + 1/3) / 2; losses 2 and 1 give a mean of 3/4."""
    union = ClassificationSums(correct=1, total=1, loss=2.0) + ClassificationSums(correct=1, total=3, loss=1.0)
    assert union == ClassificationSums(correct=2, total=4, loss=3.0)
    assert (union.accuracy, union.mean_loss) == (0.5, 0.75)


def test_nothing_has_no_accuracy():
    """Without samples accuracy and loss are NaN (0 / 0), and the sums are neutral in additions."""
    nothing = ClassificationSums()
    assert math.isnan(nothing.accuracy)
    assert math.isnan(nothing.mean_loss)
    something = ClassificationSums(correct=1, total=2, loss=0.5)
    assert nothing + something == something


def test_evaluation_keeps_no_graph():
    """Logits do not require a gradient although the weights do."""
    weights = torch.eye(3, requires_grad=True)
    required = []

    def predict(images):
        logits = images.flatten(1) @ weights
        required.append(logits.requires_grad)
        return logits

    sums = evaluate(predict, torch.eye(3).reshape(3, 3, 1, 1), torch.arange(3))
    assert required == [False]
    assert sums.correct == 3
