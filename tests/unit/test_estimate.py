"""An estimate's seconds: of a run's rounds, of the last one, and of its evaluation. Its bytes are those of a run."""

import json
import time
from functools import cache

import pytest

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.estimate import Asked, busy_seconds, estimate
from hyperfl_flwr.launch.planning import plan
from hyperfl_flwr.launch.plans import IN_PROCESS
from hyperfl_flwr.privacy import accounting
from strategies.engine import sampling
from tests.federations import small_settings


@pytest.mark.parametrize(
    ("changes", "in_turn", "evaluations"),
    [
        ({}, 9 * 3 + 50, 50),
        ({"last-round": "sampled"}, 10 * 3, 50),
        ({"evaluate": 7}, 9 * 3 + 50, 4),
        ({"last-round": "sampled", "evaluate": 1000}, 10 * 3, 50),
        ({"fraction-train": 1.0}, 10 * 50, 50),
    ],
)
def test_drawn_clients_cost_less(changes: dict[str, Scalar], in_turn: int, evaluations: int) -> None:
    """By hand, for 100 clients of which a round trains 5, on two processes."""
    sizes = {"num-clients": 100, "num-rounds": 10, "fraction-train": 0.05}
    config = RunConfig.from_flat(default_settings() | sizes | changes)
    assert busy_seconds(config, 2, 3.0, 0.25) == pytest.approx(3.0 * in_turn + 0.25 * evaluations)


def test_the_search_for_the_noise_of_a_budget_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on the number of steps, so that a measurement of two epochs searches again; a run does not."""

    @cache
    def slow_noise(*_: float) -> float:
        time.sleep(1.5)
        return 1.0

    monkeypatch.setattr(accounting, "record_noise", slow_noise)
    settings = small_settings(**{"method": "fedrep", "local-epochs": 3, "dp.epsilon": 8.0, "output": ""})
    cost = estimate(plan(settings, 1, IN_PROCESS), 1)
    assert cost.client_seconds < 1.5 < cost.seconds


@pytest.mark.parametrize(
    ("num_nodes", "changes"),
    [
        (2, {}),
        (10, {}),
        (4, {"fraction-train": 0.4, "num-rounds": 5}),
        (4, {"method": "fedrep"}),
    ],
)
def test_the_bytes_are_those_of_a_run(num_nodes: int, changes: dict[str, Scalar], federate: Federate) -> None:
    """Nodes with several of the ten clients send sums in float64; of drawn clients, nodes have several, one or none."""
    settings = {"method": "fedavg", "num-clients": 10, "num-rounds": 1, "data.train-samples": 20} | changes
    run = federate(num_nodes=num_nodes, **settings)
    measured = json.loads((run / "summary.json").read_text())["bytes_on_wire_per_round"]
    planned = plan(small_settings(**settings, output=""), num_nodes, IN_PROCESS)
    assert estimate(planned, 1).bytes_on_wire_per_round == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("num_nodes", "changes", "expected"),
    [
        (10, {}, (10, 10, 0)),
        (4, {}, (10, 4, 4)),
        (7, {}, (10, 7, 3)),
        (1, {"fraction-train": 0.1, "num-rounds": 9}, (1, 1, 0)),
        (3, {"fraction-train": 0.1, "num-rounds": 1}, (10, 3, 3)),
        (3, {"fraction-train": 0.1, "num-rounds": 1, "last-round": "sampled"}, (1, 1, 0)),
    ],
)
def test_nodes_with_several_clients_are_counted(
    num_nodes: int, changes: dict[str, Scalar], expected: tuple[int, int, int]
) -> None:
    """By hand, of ten clients; the only round is also the last one, which trains all of them."""
    config = RunConfig.from_flat(default_settings() | {"num-clients": 10} | changes)
    asked = Asked.of(config, num_nodes, lambda number: sampling.trained(config, number, range(10)))
    assert (asked.clients, asked.nodes, asked.several) == expected
