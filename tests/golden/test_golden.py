"""Stored sequences of training losses and accuracies: they change only on purpose, see regenerate.py."""

import json

import pytest
from regenerate import EXPECTED, RUNS, sequences

STORED = json.loads(EXPECTED.read_text())


def test_every_run_is_stored():
    """The stored names are those in regenerate.py: a run that is not stored would not be compared."""
    assert list(STORED) == list(RUNS)


@pytest.mark.parametrize("name", list(RUNS))
def test_losses_and_accuracies_are_the_stored_ones(name, tmp_path):
    """Results of an earlier state of this code agree to 1e-3, also on other processors and versions of torch.

    Accuracies are means over two or four clients with 60 test images each: one or two images may change class.
    """
    found = sequences(name, tmp_path)
    assert found["train_loss"] == pytest.approx(STORED[name]["train_loss"], rel=1e-3)
    assert found["personalized_accuracy"] == pytest.approx(STORED[name]["personalized_accuracy"], rel=0, abs=1.01 / 120)


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(RUNS))
def test_losses_and_accuracies_on_cuda_are_near_the_stored_ones(name, tmp_path):
    """Losses agree to one per cent, accuracies to three images of 120: training amplifies the rounding."""
    found = sequences(name, tmp_path, device="cuda")
    assert found["train_loss"] == pytest.approx(STORED[name]["train_loss"], rel=1e-2)
    assert found["personalized_accuracy"] == pytest.approx(STORED[name]["personalized_accuracy"], rel=0, abs=3.01 / 120)
