"""Estimates of class shares: the closed form against real gradients, regression against scikit-learn, both controls."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from hyperfl_flwr.attacks.bias_shares import class_gradients, during_round, shares_of_bias
from hyperfl_flwr.attacks.shadow_shares import PENALTIES, estimates
from hyperfl_flwr.attacks.upload_sketch import LENGTH, sketch, sketch_of_upload
from hyperfl_flwr.audit.property.attacks import ATTACKS, CONTROLS, View, estimated
from hyperfl_flwr.audit.property.results import Guesses, best_attack, is_revealed, outcome, verdict
from hyperfl_flwr.runs.observation import Observation
from hyperfl_flwr.training.per_example import PerExampleGradients


def bias_gradient(logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """Return the gradient of the mean cross-entropy with respect to a bias that is added to the logits, by autograd."""
    bias = torch.zeros(logits.shape[1], dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits + bias, labels)
    return torch.autograd.grad(loss, bias)[0].numpy()


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_the_closed_form_finds_the_shares_in_a_real_gradient(scale: float) -> None:
    """Exact with the client's own softmax: for a network that knows nothing, and for ones that are partly right."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 9 + [1] * 1 + [3] * 5 + [4] * 10)  # class 2 is missing
    logits = torch.randn(25, 5, generator=rng, dtype=torch.float64) * scale
    logits[range(25), labels] += scale
    found = shares_of_bias([bias_gradient(logits, labels)], [class_gradients(logits, labels)])
    np.testing.assert_allclose(found, [0.36, 0.04, 0.0, 0.2, 0.4], atol=1e-6)


def test_a_network_that_is_always_right_reveals_nothing() -> None:
    """The control: its gradient is zero for whatever shares, and so are the equations."""
    logits = 200 * torch.eye(3, dtype=torch.float64)[[0, 0, 0, 1, 2]]
    labels = torch.tensor([0, 0, 0, 1, 2])
    gradient = bias_gradient(logits, labels)
    other = bias_gradient(logits[2:], labels[2:])
    softmax = class_gradients(logits, labels)
    np.testing.assert_array_equal(shares_of_bias([gradient], [softmax]), shares_of_bias([other], [softmax]))


def test_rounds_give_equations_for_the_same_shares() -> None:
    """A second round without noise corrects a first one with noise."""
    rng = torch.Generator().manual_seed(1)
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    rounds = [torch.randn(10, 3, generator=rng, dtype=torch.float64) for _ in range(4)]
    gradients, softmax = (
        [bias_gradient(each, labels) for each in rounds],
        [class_gradients(each, labels) for each in rounds],
    )
    noisy = [gradients[0] + np.array([0.2, -0.1, -0.1]), *gradients[1:]]
    alone, together = (shares_of_bias(noisy[:k], softmax[:k]) for k in (1, 4))
    truth = np.array([0.6, 0.3, 0.1])
    assert np.abs(together - truth).max() < 0.5 * np.abs(alone - truth).max()
    with pytest.raises(ValueError, match="at least one round, got none"):
        shares_of_bias([], [])


def test_the_gradients_of_classes_during_a_round() -> None:
    before, after = np.full((2, 2), 0.5), np.eye(2)
    np.testing.assert_array_equal(during_round(before, after, 1), before)
    np.testing.assert_allclose(during_round(before, after, 1000), (before + after) / 2, atol=1e-3)
    logits = torch.tensor([[0.0, 2.0, 1.0], [4.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    softmax = torch.softmax(logits.double(), dim=1).numpy()
    found = class_gradients(logits, torch.tensor([0, 0, 2])) + np.eye(3)
    np.testing.assert_allclose(found, [softmax[:2].mean(axis=0), [1 / 3] * 3, softmax[2]], rtol=1e-6)


def network_and_samples() -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """Return a linear classifier, and two groups of samples [2, 400, 6] of the same classes [400], far apart."""
    rng = torch.Generator().manual_seed(0)
    network, labels = torch.nn.Linear(6, 4), torch.arange(400) % 4
    with torch.no_grad():
        network.weight.copy_(torch.randn(4, 6, generator=rng))
    centres = 2 * torch.randn(4, 6, generator=rng)
    return network, centres[labels] + 0.1 * torch.randn(2, 400, 6, generator=rng), labels


def test_the_shares_are_found_in_a_sum_of_clipped_gradients() -> None:
    """With factors measured on the attacker's samples, and far off without: classes' gradients differ in size."""
    network, (own, known), labels = network_and_samples()
    chosen = torch.cat([torch.nonzero(labels == label).flatten()[:count] for label, count in enumerate((10, 2, 7, 6))])
    gradients = PerExampleGradients(network, list(network.parameters()), own[:1])
    mean = gradients.clipped_sums(own[chosen], labels[chosen], 0.5).sums[1].double().numpy() / 25
    factors = (0.5 / gradients.norms(known, labels)).clamp(max=1)
    assert factors.min() < 0.5 * factors.max()
    with torch.no_grad():
        logits = network(known)
    truth = np.array([10, 2, 7, 6]) / 25
    assert np.abs(shares_of_bias([mean], [class_gradients(logits, labels, factors)]) - truth).max() < 0.02
    assert np.abs(shares_of_bias([mean], [class_gradients(logits, labels)]) - truth).max() > 0.1


def test_the_norms_are_those_of_each_samples_gradient() -> None:
    network, (own, _), labels = network_and_samples()
    norms = PerExampleGradients(network, list(network.parameters()), own[:1]).norms(own[:5], labels[:5])
    for row in range(5):
        loss = torch.nn.functional.cross_entropy(network(own[row : row + 1]), labels[row : row + 1])
        found = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(network.parameters()))])
        np.testing.assert_allclose(norms[row].item(), found.norm().item(), rtol=1e-5)


def test_regression_is_that_of_scikit_learn_with_the_penalty_of_a_cross_validation() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 6)).astype(np.float32) * [1, 2, 3, 4, 5, 0]  # the last feature is constant
    numbers = features @ rng.normal(size=(6, 2)) + rng.normal(size=(40, 2))
    attacked = rng.normal(size=(7, 6)).astype(np.float32)
    federations = np.repeat(np.arange(10), 4)
    scale = np.maximum(features.std(axis=0), 1e-9) * np.sqrt(5)
    own, other = ((values - features.mean(axis=0))[:, :5] / scale[:5] for values in (features, attacked))
    folds = [np.isin(federations, [fold, fold + 5]) for fold in range(5)]
    for column in range(2):
        target = numbers[:, column]
        errors = np.zeros(len(PENALTIES))
        for held in folds:
            for number, penalty in enumerate(PENALTIES):
                fitted = Ridge(alpha=32 * penalty).fit(own[~held], target[~held])
                errors[number] += np.sum((fitted.predict(own[held]) - target[held]) ** 2)
        best = PENALTIES[int(np.argmin(errors))]
        expected = Ridge(alpha=40 * best).fit(own, target).predict(other)
        found = estimates({"a": features}, numbers, federations, {"a": attacked})[:, column]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="at least two shadow federations, got 1"):
        estimates({"a": features}, numbers, np.zeros(40, np.int64), {"a": attacked})


def planted(signal: float, federations: int = 24, clients: int = 4) -> View:
    """Return a view in which one of three arrays depends on the share."""
    rng = np.random.default_rng(0)
    shares = rng.integers(0, 16, size=(federations, clients)) / 25
    features = {name: rng.normal(size=(federations, clients, 50)).astype(np.float32) for name in ("a", "b", "c")}
    features["b"] += (signal * shares[..., None] * np.sign(rng.normal(size=50))).astype(np.float32)
    return View(
        features=features, shares=shares, singles={}, single_shares=shares[:, :0], gradients=None, class_gradients=None,
        label=0, seed=0,
    )  # fmt: skip


def test_sums_are_estimated_with_the_single_uploads_of_shadow_federations() -> None:
    """Four sums alone would not do: the array has 50 features."""
    single = planted(3.0, federations=8)
    summed = View(
        features={name: values.mean(axis=1, keepdims=True) for name, values in single.features.items()},
        shares=single.shares.mean(axis=1, keepdims=True), singles=single.features, single_shares=single.shares,
        gradients=None, class_gradients=None, label=0, seed=0,
    )  # fmt: skip
    features, shares, federations = summed.shadows(np.array([1, 3]))
    assert features["a"].shape == (10, 50)
    np.testing.assert_array_equal(federations, [1] * 5 + [3] * 5)
    np.testing.assert_allclose(shares[:5], [single.shares[1].mean(), *single.shares[1]])
    np.testing.assert_allclose(features["b"][0], features["b"][1:5].mean(axis=0), rtol=1e-5)
    assert np.abs(estimated(summed, ATTACKS["regression"], np.arange(8))[..., 0] - summed.shares).max() < 0.05


def test_a_share_that_an_array_depends_on_is_found_and_one_that_none_does_is_not() -> None:
    regression, permuted = ATTACKS["regression"], CONTROLS["permuted"]
    found = outcome(planted(10.0), regression).numbers(0.3)
    assert found["r2"]["interval"][0] > 0.95
    assert found["auc"]["interval"][0] > 0.95
    assert found["error"]["value"] < 0.05
    nothing = outcome(planted(0.0), regression).numbers(0.3)
    assert nothing["r2"]["interval"][0] < 0
    assert nothing["auc"]["interval"][0] < 0.5 < nothing["auc"]["interval"][1]
    control = outcome(planted(10.0), permuted).numbers(0.3)
    assert control["r2"]["value"] < 0.05
    assert not ATTACKS["bias"].applies_to(planted(10.0))


def test_each_half_is_attacked_with_the_other_one_only() -> None:
    """Shares of the own half, which differ from those of the other one, are not used."""
    view = planted(10.0)
    kept = np.arange(2, 24)
    before = estimated(view, ATTACKS["regression"], kept)
    assert before.shape == (22, 4, 1)
    view.shares[0::2] = 0.9
    after = estimated(view, ATTACKS["regression"], kept)
    np.testing.assert_array_equal(before[0::2], after[0::2])
    assert not np.allclose(before[1::2], after[1::2])
    np.testing.assert_allclose(estimated(view, CONTROLS["prior"], kept)[1::2], 0.9)


def test_measures_by_hand() -> None:
    guesses = Guesses(estimated=np.array([[[0.1], [0.2]], [[0.5], [0.5]]]), true=np.array([[0.1, 0.4], [0.5, 0.2]]))
    assert guesses.error() == pytest.approx((0.2 + 0.3) / 4)
    assert guesses.r2() == pytest.approx(1 - (0.04 + 0.09) / 4 / np.var([0.1, 0.4, 0.5, 0.2]))
    assert guesses.area(0.3) == pytest.approx(2.5 / 4)
    assert guesses.area(0.5) is None


@pytest.mark.parametrize(
    ("bias", "regression", "best", "words"),
    [((0.5, 0.3, 0.6), (0.6, -0.2, 0.4), "bias", "estimates"),
     ((0.05, 0.01, 0.6), (-0.2, -0.4, 0.4), "bias", "barely estimates"),
     ((-0.2, -0.6, 0.7), (0.0, -0.9, 0.4), "bias", "does not estimate, but ranks,"),
     ((-0.2, -0.6, 0.5), (0.0, -0.9, None), "regression", "does not estimate")],
)  # fmt: skip
def test_the_verdict_is_that_of_the_attack_that_finds_most(
    bias: tuple[float, ...], regression: tuple[float | None, ...], best: str, words: str
) -> None:
    """Each has R², the interval's lower end, and that of the area below the ROC curve."""
    found = {
        name: {"r2": {"value": r2, "interval": [low, 1.0]}, "auc": area and {"value": 0.8, "interval": [area, 1.0]}}
        for name, (r2, low, area) in {"bias": bias, "regression": regression}.items()
    }
    document = {"views": {"upload": found}}
    assert best_attack(document, "upload") == best
    assert verdict(document, "upload") == words
    assert is_revealed(document, "upload") == (words != "does not estimate")


def test_a_sketch_is_linear_and_keeps_inner_products() -> None:
    rng = np.random.default_rng(0)
    one, other = ({"short": rng.normal(size=(4, 5)), "long": rng.normal(size=(90, 100)) + 0.5} for _ in range(2))
    first, second = sketch(one), sketch(other)
    mean = sketch({name: (one[name] + other[name]) / 2 for name in one})
    np.testing.assert_allclose(first["short"], one["short"].ravel(), rtol=1e-6)
    assert first["long"].shape == (LENGTH,)
    for name in one:
        np.testing.assert_allclose(mean[name], (first[name] + second[name]) / 2, rtol=1e-3, atol=1e-4)
    # The error of an inner product is at most about the product of the lengths divided by the root of L.
    error = np.dot(first["long"], second["long"]) - np.sum(one["long"] * other["long"])
    assert abs(error) < 3 * np.linalg.norm(one["long"]) * np.linalg.norm(other["long"]) / np.sqrt(LENGTH)


def test_a_sketch_of_an_upload_is_about_what_training_has_changed() -> None:
    """Parameters become their change; a change, and what is no parameter, stays."""
    received = {"model/w": np.array([1.0, 2.0]), "labels/counts": np.array([5.0])}
    reply = {"model/w": np.array([1.5, 1.0]), "labels/counts": np.array([3.0])}
    observation = Observation(received=received, reply=reply, num_examples=3)
    found = sketch_of_upload(observation, "values")
    np.testing.assert_array_equal(found["model/w"], [0.5, -1.0])
    np.testing.assert_array_equal(found["labels/counts"], [3.0])
    np.testing.assert_array_equal(sketch_of_upload(observation, "decrease")["model/w"], [1.5, 1.0])
