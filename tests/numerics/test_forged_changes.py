"""What malicious nodes send in the place of their changes, against the formulas of the papers."""

from statistics import NormalDist

import numpy as np
import pytest

from strategies.engine.forged_changes import IPM_SCALE, forged_changes, largest_z

CHANGES = np.array([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 0.0]])
WEIGHTS = np.array([1.0, 2.0, 3.0, 2.0])
MALICIOUS = np.array([True, False, True, False])


def forged(attack: str, scale: float | str = "auto") -> np.ndarray:
    return forged_changes(attack, scale, CHANGES, WEIGHTS, MALICIOUS)


def mean_with(forged_values: np.ndarray) -> np.ndarray:
    """Return the mean that the server computes with the malicious nodes' changes."""
    sent = CHANGES.copy()
    sent[MALICIOUS] = forged_values
    return WEIGHTS @ sent / WEIGHTS.sum()


def test_sign_flip_is_the_opposite() -> None:
    np.testing.assert_array_equal(forged("sign-flip"), -CHANGES[MALICIOUS])
    np.testing.assert_array_equal(forged("sign-flip", 4.0), -4 * CHANGES[MALICIOUS])


@pytest.mark.parametrize(
    ("senders", "malicious", "share"),
    [(50, 24, 24 / 26), (50, 12, 24 / 38), (51, 12, 25 / 39), (20, 8, 9 / 12), (20, 4, 9 / 16)],
)
def test_z_is_that_of_the_paper(senders: int, malicious: int, share: float) -> None:
    """With s = floor(n/2 + 1) - m, z is the quantile (n - m - s) / (n - m)."""
    assert largest_z(senders, malicious) == NormalDist().inv_cdf(share)


def test_z_of_the_papers_example() -> None:
    """Baruch et al., section 4.1: n = 50 and m = 24 give z = 1.43."""
    assert largest_z(50, 24) == pytest.approx(1.43, abs=0.005)


@pytest.mark.parametrize(("senders", "malicious"), [(20, 1), (20, 2), (1, 1), (2, 2)])
def test_too_few_malicious_nodes_have_no_z(senders: int, malicious: int) -> None:
    assert largest_z(senders, malicious) == 0.0


def test_a_majority_needs_no_honest_sender() -> None:
    assert largest_z(20, 15) == NormalDist().inv_cdf(4 / 5)


def test_malicious_nodes_agree_on_their_own_mean_and_deviation() -> None:
    """The malicious nodes' changes are (1, -2) and (5, 6): their mean is (3, 2), their deviation (2, 4)."""
    np.testing.assert_array_equal(forged("alie", 0.5), [[4.0, 4.0], [4.0, 4.0]])
    z = largest_z(4, 2)
    np.testing.assert_allclose(forged("alie"), [[3 + 2 * z, 2 + 4 * z]] * 2, rtol=1e-15)


def test_inner_product_manipulation_is_against_the_honest_mean() -> None:
    """The honest changes (3, 4) and (7, 0) have equal weights: their mean is (5, 2)."""
    np.testing.assert_array_equal(forged("ipm", 2.0), [[-10.0, -4.0]] * 2)
    np.testing.assert_array_equal(forged("ipm"), [[-5 * IPM_SCALE, -2 * IPM_SCALE]] * 2)


def test_the_mean_turns_where_the_paper_says() -> None:
    """With the weights h of honest nodes and l of malicious nodes the mean is (h - εl)/(h + l) of the honest one."""
    np.testing.assert_array_equal(mean_with(forged("ipm", 1.0)), [0.0, 0.0])
    np.testing.assert_array_equal(mean_with(forged("ipm", 3.0)), [-5.0, -2.0])


def test_without_an_honest_node_there_is_no_mean_to_turn() -> None:
    found = forged_changes("ipm", 2.0, CHANGES, WEIGHTS, np.ones(4, bool))
    np.testing.assert_array_equal(found, np.zeros((4, 2)))


def test_model_replacement_replaces_the_model() -> None:
    """If the honest nodes change nothing, the mean is that of the malicious nodes alone; a factor may be given, too."""
    weights, malicious = np.array([1.0, 1.0, 6.0, 8.0]), np.array([False, False, True, False])
    changes = np.where(malicious[:, None], CHANGES, 0.0)
    forged_values = forged_changes("backdoor", "auto", changes, weights, malicious)
    np.testing.assert_allclose(weights[malicious] @ forged_values / weights.sum(), CHANGES[2], rtol=1e-15)
    np.testing.assert_array_equal(forged("backdoor", 2.0), 2 * CHANGES[MALICIOUS])


def test_several_malicious_nodes_replace_it_together() -> None:
    changes = np.where(MALICIOUS[:, None], CHANGES, 0.0)
    forged_values = forged_changes("backdoor", "auto", changes, WEIGHTS, MALICIOUS)
    np.testing.assert_array_equal(
        WEIGHTS[MALICIOUS] @ forged_values / WEIGHTS.sum(), WEIGHTS[MALICIOUS] @ CHANGES[MALICIOUS] / 4
    )


def test_an_attack_on_data_forges_nothing() -> None:
    with pytest.raises(ValueError, match="label-flip forges no changes"):
        forged("label-flip")
