"""Which forged networks are above the default limits of a node, as docs/privacy/node-checks.md has them."""

from collections.abc import Set as AbstractSet

import pytest

from benchmarks.forged_networks import FORGERIES, FORGING, GENERATING, OF_GENERATED
from benchmarks.measure_node_checks import LIMITS, forged
from hyperfl_flwr.privacy.received_network import STATISTICS, Statistic

NOTICED: dict[str, AbstractSet[Statistic]] = {
    "`imprint`": {"change", "duplicates", "nested"},
    "`trap-weights`": {"change", "rare"},
    "`fishing`": {"change", "duplicates"},
    "`feature-fishing`": {"change", "duplicates", "loss-jump"},
    "bins, rows turned by up to 11 degrees": {"change"},
    "bins in 8 directions": {"change", "duplicates"},
    "bins in 8 directions, rows turned": {"change"},
    "bins in 48 of 128 units": set(),
    "trap weights, 2 % of the samples": {"change", "dead", "rare"},
    "trap weights, 10 % of the samples": {"change"},
    "dead layer": {"change", "dead"},
    "one class, logit + 4": {"change"},
}


@pytest.mark.parametrize("name", FORGERIES)
def test_each_check_notices_what_the_page_says(name: str) -> None:
    measured = forged(FORGERIES[name])
    assert {each.statistic for each in measured} == set(STATISTICS)
    assert {each.statistic for each in measured if each.value > LIMITS[each.statistic]} == NOTICED[name]


def test_a_generated_network_is_noticed_like_a_common_one() -> None:
    for forging, (name, forgery) in zip(FORGING, OF_GENERATED.items(), strict=True):
        measured = forged(forgery, GENERATING)
        found = {each.statistic for each in measured if each.value > LIMITS[each.statistic]}
        assert found == NOTICED[f"`{forging}`"], name


def test_an_honest_network_is_below_all_limits() -> None:
    measured = forged(lambda _network, _known, _rng: None)
    assert {each.statistic for each in measured if each.value > LIMITS[each.statistic]} == set()
