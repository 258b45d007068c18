"""Settings of robust reductions: the methods that have them, what they refuse, and the numbers of nodes."""

from pathlib import Path
from typing import Any

import pytest
from federations import of_every_method, small_settings

from hyperfl_flwr.app import server
from hyperfl_flwr.app.methods import check_run
from hyperfl_flwr.app.robust_reductions import check_enough_nodes
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS
from hyperfl_flwr.contract.grids import Settings, plain_grid
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.planning import plan, plan_deployed
from hyperfl_flwr.launch.plans import IN_PROCESS

RULES = ("norm-bound", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median")

NOT_OF_FEDAKD = ("norm-bound", "median", "trimmed-mean")
"""Rules that are no weighted mean of the nodes' vectors, of which each is a numerator and a denominator."""

REFUSED = {
    "local": "its clients upload nothing",
    "scaffold": "its control are summed over the clients",
    "feddyn": "server and client must add the same upload",
    "srr-fl": "its clients randomise each number",
    "priv-hfl": "its changes are summed over the clients",
    "it-pfl": "the server uses each client's model, embedding by itself",
    "pfedhn": "the server uses each client's model by itself",
    "pfedhn-pc": "the server uses each client's extractor by itself",
    "feddf": "the server uses each client's model by itself",
    "fedftg": "the server uses each client's model, labels by itself",
    "fedgen": "the server uses each client's classifier, labels by itself",
}
"""Methods that are not robust, with the reason; all others are."""


def config_of(method: str = "fedavg", rule: str = "median", **changes: Any) -> RunConfig:
    return RunConfig.from_flat(small_settings(method=method, **{"robust.reduction": rule, **changes}))


@of_every_method
def test_which_methods_are_robust(method: str) -> None:
    """A method of which all groups are averaged is; of others, the message says why, and which are."""
    for rule in RULES:
        config = config_of(method, rule)
        if method in REFUSED:
            with pytest.raises(
                ConfigError, match=f"robust.reduction must be mean with {method}, .*{REFUSED[method]}.*fedavg"
            ):
                check_run(config, (1, 8, 8), 10)
        elif method == "fedakd" and rule in NOT_OF_FEDAKD:
            with pytest.raises(ConfigError, match=f"robust.reduction must not be {rule} with fedakd"):
                check_run(config, (1, 8, 8), 10)
        else:
            check_run(config, (1, 8, 8), 10)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"secagg.enabled": True},
            "with secagg.enabled, got median: .*privacy.clip-norm, which is applied before masking",
        ),
        (
            {"privacy.unit": "client", "privacy.clip-norm": 1.0, "privacy.noise-multiplier": 1.0},
            "with privacy.unit = client, got median",
        ),
        ({"max_update_ratio": 0.0}, "max-update-ratio must be above 0 and at most 1e\\+09"),
        ({"max_update_ratio": 1e10}, "max-update-ratio must be above 0 and at most 1e\\+09"),
        ({"robust.norm-bound": 1.0}, "robust.norm-bound must be auto with robust.reduction = median"),
        (
            {"robust.reduction": "mean", "robust.byzantine": 1},
            "robust.byzantine must be auto with robust.reduction = mean",
        ),
        ({"robust.reduction": "bulyan"}, "robust.reduction must be 'mean', "),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_run(config_of(**changes), (1, 8, 8), 10)


def test_noise_of_records_is_allowed() -> None:
    """What is computed from noisy uploads has their epsilon."""
    check_run(config_of("fedrep", "krum", **{"dp.epsilon": 8.0}), (1, 8, 8), 10)


@pytest.mark.parametrize(
    ("rule", "changes", "fewest"),
    [
        ("median", {}, 3),
        ("geometric-median", {}, 3),
        ("norm-bound", {}, 3),
        ("norm-bound", {"robust.norm-bound": 1.0}, 1),
        ("krum", {}, 5),
        ("krum", {"robust.byzantine": 2}, 7),
        ("multi-krum", {"robust.byzantine": 0}, 3),
        ("trimmed-mean", {"robust.byzantine": 4}, 9),
        ("median", {"robust.byzantine": 0}, 1),
    ],
)
def test_the_least_number_of_nodes(rule: str, changes: Settings, fewest: int) -> None:
    """One node less is refused with the number, and so are as few clients in a round."""
    config = config_of(rule=rule, num_clients=20, **changes)
    check_enough_nodes(config, fewest)
    if fewest > 1:
        with pytest.raises(ConfigError, match=rf"{rule} needs {fewest} nodes .*got {fewest - 1}: .*--num-nodes"):
            check_enough_nodes(config, fewest - 1)
        sampled = config_of(rule=rule, num_clients=20, fraction_train=(fewest - 1) / 20, **changes)
        with pytest.raises(ConfigError, match=f"got {fewest - 1}"):
            check_enough_nodes(sampled, 20)


def test_a_fifth_may_lie_by_default() -> None:
    robust = config_of(rule="krum").robust
    assert [robust.byzantine_of(asked) for asked in (1, 5, 9, 10, 20, 104)] == [1, 1, 1, 2, 4, 20]
    assert [robust.fewest_nodes(asked) for asked in (5, 10, 20)] == [5, 7, 11]


def test_a_simulation_has_a_node_for_each_client(tmp_path: Path) -> None:
    """Whatever the machine; too few nodes are refused before the run, in a deployment, too."""
    settings: Settings = {"robust.reduction": "krum", "num-clients": 7, "device": "cpu", "method": "fedavg"}
    settings |= {"output": str(tmp_path / "run")}
    assert plan(settings, None, IN_PROCESS).num_nodes == 7
    assert plan(settings, 5, IN_PROCESS).num_nodes == 5
    with pytest.raises(ConfigError, match=r"needs 5 nodes .*got 4"):
        plan(settings, 4, IN_PROCESS)
    with pytest.raises(ConfigError, match=r"needs 5 nodes .*got 4"):
        plan_deployed(4, {"robust.reduction": "krum", "method": "fedavg"})
    with pytest.raises(ConfigError, match="must be mean with pfedhn"):
        plan_deployed(7, {"robust.reduction": "krum", "method": "pfedhn"})
    assert plan_deployed(5, {"robust.reduction": "krum", "method": "fedavg"}).settings["num-clients"] == 5


def test_a_deployment_waits_for_as_many_nodes_as_the_rule_needs(tmp_path: Path) -> None:
    """Of five nodes one may lie: Krum needs all of them; three, half of them, suffice for the median and for a mean."""
    for rule, least in (("krum", 5), ("median", 3), ("mean", 3)):
        config = config_of(rule=rule, output=str(tmp_path))
        roster = server._roster(plain_grid(NUM_CLIENTS, config.flat()), config, lambda _: None, None)
        roster.gather()
        assert roster.min_nodes == least


def test_an_audit_attacks_what_honest_clients_upload_under_any_rule() -> None:
    """The malicious nodes of a run are none of the audit's few nodes, or would be all of them."""
    lies: Settings = {"adversary.attack": "backdoor", "adversary.nodes": "3", "adversary.target-class": 1}
    settings = small_settings(method="fedavg", batch_size=1, **{"robust.reduction": "krum", "robust.byzantine": 2})
    config = make_attacked_round(settings | lies, Options(num_images=2)).config
    assert not config.robust.is_robust
    assert config.adversary.attack == "none"
