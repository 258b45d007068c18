"""Thresholds of secure sums, and the number of honest nodes that they leave in a sum whatever the server says."""

import pytest

from hyperfl_flwr.config.secure_sums import SecureSumConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.protocol.secure_sums.numbers import SQUARES_FROM
from hyperfl_flwr.protocol.secure_sums.thresholds import (
    MOST_NODES,
    crowd,
    smallest_threshold,
    unknown_nodes,
    usual_colluding,
)

USUAL = {
    3: (0, 3, 3), 4: (1, 4, 3), 5: (1, 4, 3), 6: (1, 5, 4), 7: (2, 6, 4), 8: (2, 6, 3), 10: (3, 8, 5), 12: (3, 9, 5),
    15: (4, 12, 7), 20: (6, 15, 7), 30: (9, 23, 11), 50: (16, 39, 18), 75: (24, 58, 26), 100: (33, 78, 35),
}  # fmt: skip
"""Number of nodes -> nodes that may collude, threshold, and honest nodes in the smallest sum."""


@pytest.mark.parametrize("num_nodes", USUAL)
def test_usual_thresholds(num_nodes):
    colluding, threshold, honest = USUAL[num_nodes]
    assert usual_colluding(num_nodes) == colluding
    assert smallest_threshold(num_nodes, colluding) == threshold
    assert crowd(num_nodes, threshold, colluding) == honest


def test_two_honest_nodes_are_enough_on_request():
    """Two nodes then need both answers, and three survive a drop-out."""
    for num_nodes in (2, 3):
        assert smallest_threshold(num_nodes, 0, min_cohort=2) == 2
        assert crowd(num_nodes, 2, 0) == 2


@pytest.mark.parametrize(
    ("num_nodes", "threshold", "honest"), [(3, 3, 3), (4, 3, 3), (5, 4, 4), (10, 7, 6), (20, 13, 10), (100, 67, 51)]
)
def test_thresholds_without_colluding_nodes(num_nodes, threshold, honest):
    assert smallest_threshold(num_nodes, 0) == threshold
    assert crowd(num_nodes, threshold, 0) == honest


@pytest.mark.parametrize("num_nodes", range(2, MOST_NODES + 1))
def test_thresholds_are_the_least_that_suffice(num_nodes):
    """For every number of colluding nodes: one less breaks a condition; if none suffices, the error says what to do."""
    for colluding in range(num_nodes):
        wanted = max(3, (num_nodes - colluding + 1) // 2)
        enough = [
            t
            for t in range(colluding + 1, num_nodes + 1)
            if 2 * t > num_nodes + colluding
            and num_nodes - colluding - (num_nodes - colluding) * (num_nodes - t) // (t - colluding) >= wanted
        ]
        if enough:
            assert smallest_threshold(num_nodes, colluding) == min(enough)
        else:
            with pytest.raises(ConfigError, match=r"start more nodes"):
                smallest_threshold(num_nodes, colluding)


@pytest.mark.parametrize(
    ("num_nodes", "threshold", "colluding", "shares"),
    [
        (2, 2, 0, 1),  # each of two nodes knows its own share of the mean that both receive
        (3, 3, 0, 2),
        (4, 3, 0, 2),  # a sum of three nodes, one of which looks
        (7, 7, 0, 6),
        (20, 20, 0, 19),
        (4, 4, 1, 3),  # the server's three unknown shares are those of the honest nodes
        (20, 15, 6, 7),
        (5, 1, 1, 0),
    ],
)
def test_an_attacker_does_not_know_the_parts_of_others(num_nodes, threshold, colluding, shares):
    assert unknown_nodes(num_nodes, threshold, colluding) == shares
    for absent in range(num_nodes - threshold + 1 if shares else 0):
        assert shares <= num_nodes - absent - max(1, colluding)  # with an honest server, which opens sums of all others


def test_impossible_thresholds_have_no_crowd():
    """Too few shares, more than nodes, or a step of one honest node among six of the server's own."""
    assert crowd(5, 1, 1) == crowd(5, 3, 1) == crowd(5, 6, 1) == 0
    assert crowd(7, 7, 6) == 1


@pytest.mark.parametrize(
    ("num_nodes", "threshold", "min_cohort", "covered"), [(6, 5, 4, 4), (6, 5, 5, 4), (3, 2, 2, 2)]
)
def test_a_chosen_threshold_must_leave_the_least_crowd(num_nodes, threshold, min_cohort, covered):
    config = SecureSumConfig.model_validate({"threshold": threshold, "min-cohort": min_cohort})
    if covered >= min_cohort:
        assert config.threshold_of(num_nodes, num_nodes) == threshold
        return
    with pytest.raises(ConfigError, match=f"covers {covered} honest nodes at least, but {min_cohort} are required"):
        config.threshold_of(num_nodes, num_nodes)


@pytest.mark.parametrize(("threshold", "fewest"), [("auto", 4), (3, 4), (5, 5), (9, 6)])
def test_a_round_waits_for_the_nodes_that_its_threshold_needs(threshold, fewest):
    """Of six nodes, one may collude; with fewer nodes than the threshold no sum could be opened."""
    assert SecureSumConfig(threshold=threshold).fewest_nodes(6) == fewest


def test_the_numbers_of_nodes_that_have_squares_by_default():
    """Those of the page on secure sums."""
    defaults = {n: (smallest_threshold(n, usual_colluding(n)), usual_colluding(n)) for n in range(3, MOST_NODES + 1)}
    with_squares = [n for n, others in defaults.items() if unknown_nodes(n, *others) >= SQUARES_FROM]
    assert with_squares == [24, 25, *range(27, MOST_NODES + 1)]
