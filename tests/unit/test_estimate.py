"""The seconds of an estimate: of a run's rounds, of the last one, and of its evaluation."""

import pytest

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.estimate import busy_seconds


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
