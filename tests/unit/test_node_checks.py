"""What the checks of a node's owner do about numbers that are above the limits, and which checks a node makes."""

import math

import pytest

from clients.engine.node_checks import REFUSED, Action, NodeChecks, Rule, checks_of
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.core.errors import ConfigError, RefusalError, for_others
from hyperfl_flwr.privacy.received_network import STATISTICS, Measured, Statistic

CHANGE = Measured(statistic="change", value=1.5, layer="fc")
RARE = Measured(statistic="rare", value=0.75, layer="conv")


def checks(
    notes: list[str], *, min_samples: int = 1, min_steps: int = 1, min_test_samples: int = 1, **actions: Action
) -> NodeChecks:
    named: dict[str, Statistic] = {"change": "change", "rare": "rare", "loss_jump": "loss-jump"}
    rules = {named[name]: Rule(action=action, limit=0.5) for name, action in actions.items()}
    least = {"min_samples": min_samples, "min_steps": min_steps, "min_test_samples": min_test_samples}
    return NodeChecks(rules=rules, note=notes.append, **least)


def test_what_is_below_the_limit_or_not_checked_is_not_reported() -> None:
    notes: list[str] = []
    checks(notes, rare="refuse").judge("round 3: client 0", [CHANGE])
    checks(notes, change="refuse").judge("round 3: client 0", [Measured(statistic="change", value=0.5)])
    assert notes == []


def test_a_warning_is_noted_and_the_client_trains() -> None:
    notes: list[str] = []
    checks(notes, change="warn").judge("round 3: client 0", [CHANGE, RARE])
    assert notes == [
        "round 3: client 0: check-change: the value 1.5 of layer fc of the received network is above max-change = "
        "0.5; the client trains with it. Ask the operator why; if the reason is harmless, raise max-change in "
        "node.toml (the node config)"
    ]


def test_a_refusal_names_the_check_to_the_owner_only() -> None:
    notes: list[str] = []
    with pytest.raises(RefusalError, match=r"check-rare: the value 0\.75 of layer conv") as caught:
        checks(notes, change="warn", rare="refuse").judge("round 3: client 0", [CHANGE, RARE])
    assert [note.split(": ")[2] for note in notes] == ["check-change", "check-rare"]
    assert "does not train" in notes[1]
    assert for_others(caught.value) == REFUSED


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_above_every_limit(value: float) -> None:
    with pytest.raises(RefusalError, match="check-loss-jump"):
        checks([], loss_jump="refuse").judge("round 3: client 0", [Measured(statistic="loss-jump", value=value)])


def test_few_samples_or_steps_are_refused() -> None:
    notes: list[str] = []
    made = checks(notes, min_samples=20, min_steps=3, min_test_samples=2)
    made.require_size("round 3: client 0", samples=20, steps=3, tests=2)
    made.require_size("round 3: client 0")  # nothing that could be of few
    assert notes == []
    with pytest.raises(RefusalError) as caught:
        made.require_size("round 3: client 0", samples=19, steps=2, tests=1)
    assert notes[0].startswith(
        "round 3: client 0: min-samples = 20, but the answer would come from 19 training samples; no answer is sent"
    )
    assert notes[1].startswith("round 3: client 0: min-steps = 3, but the answer would come from 2 local steps")
    assert "min-test-samples = 2, but the answer would come from 1 test or validation sample;" in notes[2]
    assert for_others(caught.value) == REFUSED


def test_a_node_warns_unless_its_owner_says_otherwise() -> None:
    made = checks_of(NodeConfig.of({"check-rare": "off", "check-dead": "refuse", "max-dead": 0.25}), print)
    assert made.rules.keys() == set(STATISTICS) - {"rare"}
    assert made.rules["dead"] == Rule(action="refuse", limit=0.25)
    assert made.rules["change"].action == "warn"


def test_a_simulated_node_checks_only_what_its_config_names() -> None:
    assert checks_of(NodeConfig.of({"simulated": True}), print).rules == {}
    made = checks_of(NodeConfig.of({"simulated": True, "check-change": "warn", "max-rare": 0.1}), print)
    assert made.rules.keys() == {"change"}


def test_limits_have_ranges() -> None:
    with pytest.raises(ConfigError, match=r"3 settings are wrong(.|\n)*check-dead(.|\n)*max-nested(.|\n)*min-steps"):
        NodeConfig.of({"check-dead": "stop", "max-nested": 1.5, "min-steps": 0})
