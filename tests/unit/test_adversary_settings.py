"""Settings of malicious nodes: which nodes they are, and which values are refused."""

import pytest
from federations import small_settings

from hyperfl_flwr.app.methods import check_run
from hyperfl_flwr.config.adversary import AdversaryConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.warnings import adversary_warnings

ATTACK = "adversary.attack"


def config(**changes: Scalar) -> RunConfig:
    return RunConfig.from_flat(small_settings(**{"method": "fedavg"} | changes))


def malicious(share: float, num_nodes: int, seed: int = 0) -> list[int]:
    return list(AdversaryConfig(attack="alie", share=share).malicious_nodes(seed, num_nodes))


def test_a_larger_share_adds_malicious_nodes() -> None:
    """Of 20 nodes, 0, 10, 20 and 40 % are 0, 2, 4 and 8, each set within the next one; the seed decides which."""
    found = [set(malicious(share, 20)) for share in (0.0, 0.1, 0.2, 0.4)]
    assert [len(each) for each in found] == [0, 2, 4, 8]
    assert found[0] < found[1] < found[2] < found[3]
    assert len({tuple(malicious(0.2, 20, seed)) for seed in range(5)}) > 1


def test_the_number_of_malicious_nodes_is_rounded() -> None:
    assert [len(malicious(0.2, num_nodes)) for num_nodes in (3, 5, 7, 8)] == [1, 1, 1, 2]


def test_nodes_may_be_listed() -> None:
    found = config(**{ATTACK: "alie", "adversary.nodes": "3,0,3"}).adversary
    assert found.malicious_nodes(0, 4) == [0, 3]
    assert config(**{ATTACK: "alie", "adversary.nodes": 2}).adversary.malicious_nodes(0, 4) == [2]


@pytest.mark.parametrize(
    ("given", "num_nodes", "problem"),
    [
        ({"share": 0.1}, 2, "adversary.share = 0.1 selects no node of 2"),
        ({"share": 0.9}, 2, "all 2 nodes would be malicious"),
        ({"nodes": "0,1"}, 2, "all 2 nodes would be malicious"),
        ({"nodes": "1,2"}, 2, "adversary.nodes must be below the number of nodes, 2; got 2"),
    ],
)
def test_impossible_numbers_are_refused(given: dict[str, Scalar], num_nodes: int, problem: str) -> None:
    adversary = config(**{ATTACK: "ipm"} | {f"adversary.{name}": value for name, value in given.items()}).adversary
    with pytest.raises(ConfigError, match=problem):
        adversary.malicious_nodes(0, num_nodes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"adversary.share": 0.2}, r"adversary.share must be 0.0 with adversary.attack = none; got 0.2"),
        ({"adversary.nodes": "1"}, r"adversary.nodes must be auto with adversary.attack = none; got 1"),
        ({ATTACK: "ipm", "adversary.share": 0.2, "adversary.nodes": "1"}, r"nodes must be auto with adversary.share"),
        ({ATTACK: "ipm", "adversary.nodes": "1, 2"}, r"adversary.nodes must be auto, or numbers of nodes"),
        ({ATTACK: "label-flip", "adversary.scale": 2.0}, r"adversary.scale must be auto with .* label-flip"),
        ({ATTACK: "alie", "adversary.target-class": 1}, r"target-class must be 0 with .* alie, .* no effect; got 1"),
        ({ATTACK: "alie", "adversary.trigger-size": 2}, r"trigger-size must be 3 with .* alie"),
        ({"adversary.poisoned-share": 0.5}, r"poisoned-share must be 0.3125 with .* none"),
        ({ATTACK: "alie", "adversary.share": 1.0}, r"adversary.share must be less than 1"),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Scalar], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "input_shape", "problem"),
    [
        ({ATTACK: "ipm", "method": "local"}, (1, 8, 8), "must be none with local, got ipm: its clients upload nothing"),
        (
            {ATTACK: "ipm", "method": "fedakd"},
            (1, 8, 8),
            "must be none with fedakd, got ipm: .* no parameters that could",
        ),
        ({ATTACK: "label-flip", "secagg.enabled": True}, (1, 8, 8), "with secagg.enabled, got label-flip: the sums of"),
        ({ATTACK: "alie", "novel.clients": 1}, (1, 8, 8), "with novel.clients above 0, got alie"),
        ({ATTACK: "alie", "cross-site": True}, (1, 8, 8), "with cross-site, got alie: its means are over all clients"),
        ({ATTACK: "backdoor", "target": "mlp"}, (64,), "must not be backdoor with feature vectors"),
        ({ATTACK: "backdoor", "adversary.trigger-size": 8}, (1, 8, 9), "below the images' smaller side, 8; got 8"),
        ({ATTACK: "backdoor", "adversary.target-class": 10}, (1, 8, 8), "below the number of classes, 10; got 10"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    changes: dict[str, Scalar], input_shape: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_run(config(**changes), input_shape, 10)


def test_other_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"adversary.attack must be none with task = regression: it is for classif"):
        config(task="regression", **{ATTACK: "label-flip"})


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, False),
        ({"adversary.attack": "backdoor"}, False),  # without malicious nodes, it measures chance
        ({"adversary.attack": "alie"}, True),
        ({"adversary.attack": "alie", "adversary.share": 0.4}, False),
        ({"adversary.attack": "alie", "adversary.nodes": "1"}, False),
    ],
)
def test_an_attack_without_malicious_nodes_is_named_before_the_run(changes: dict[str, Scalar], warns: bool) -> None:
    found = adversary_warnings(RunConfig.from_flat(small_settings(method="fedavg", **changes)), 5)
    assert [text.split(":")[0] for text in found] == ["adversary.attack = alie has no effect"] * warns
