"""Checks of a user's network before anything starts; each of the wrong networks breaks one rule."""

import pytest
import torch

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.models.custom.checks import check_custom

SHAPE = (1, 8, 8)

GOOD = ("build", "with_batchnorm", "perceptron", "attention", "recurrent", "Patches")

WRONG = {
    "gone": "gone in module own_networks does not exist",
    "NUMBER": "NUMBER in module own_networks is of type int",
    "fails": r"failed with input_shape = \(1, 8, 8\), num_classes = 10: KeyError: 'no such thing' \(.*own_networks.py",
    "returns_text": "must return a torch.nn.Module, but returned str",
    "no_parameters": "the network has no parameters",
    "only_a_classifier": "the classifier is the only layer with parameters",
    "other_outputs": r"must be the classifier, torch.nn.Linear with 10 outputs; it is 2, Linear.*out_features=11",
    "ends_with_a_norm": "must be the classifier.*it is 3, LayerNorm",
    "ends_with_softmax": "must end with its classifier and return the logits",
    "wrong_shape": r"3 samples must give logits, float32 \[3, 10\], but gave float32 \[3, 1, 8, 10\]",
    "cannot_take_them": r"cannot take samples \[3, 1, 8, 8\]: RuntimeError: .*mat1 and mat2",
    "tied": "2.weight and 3.weight are one tensor",
    "doubles": r"parameters must be float32 on the CPU.*1.weight is float64 \[8, 64\]",
    "frozen": "1.weight is frozen; register it as a buffer instead",
    "lazy": "1.weight has no shape yet",
    "own_random_numbers": "the same values under the same seed of torch, but 1.bias differs",
    "functional_dropout": "draws random numbers that do not follow from the run's seed",
    "argument_dropout": "draws random numbers that do not follow from the run's seed",
    "counts": "the buffer 2.count changes in training",
    "batch_statistics": "must not depend on the other samples",
    "cumulative_statistics": "2 needs a momentum",
    "changes_its_input": "changes its input in place",
    "keeps_references": "does not use the weights that are passed in a call",
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_one_is_let_through(name: str) -> None:
    """A valid network is accepted, and trying it does not change the process's random numbers."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_custom(f"own_networks:{name}", SHAPE, 10)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[name]) as caught:
        check_custom(f"own_networks:{name}", SHAPE, 10)
    assert str(caught.value).startswith(f"target = own_networks:{name}: ")


def test_a_module_that_is_nowhere_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no module nowhere_at_all is in the working directory"):
        check_custom("nowhere_at_all.nets:build", SHAPE, 10)
    with pytest.raises(ConfigError, match=r"no module own_networks.part is"):
        check_custom("own_networks.part:build", SHAPE, 10)
    with pytest.raises(ConfigError, match=r"no module own_networks\.py is .*; for a model .* own_networks:build \("):
        check_custom("own_networks.py:build", SHAPE, 10)
