"""Contract tests for resuming: a killed or prolonged run ends with the same bits as an uninterrupted one."""

from functools import partial
from typing import Any

import pytest
from federations import REPRESENTATIVES, of_every_method_if_extended, of_representatives

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.faults import check_resume
from hyperfl_flwr.contract.folders import metrics, outcome
from hyperfl_flwr.contract.grids import KilledError, KilledGrid


@of_every_method_if_extended
def test_a_killed_run_goes_on_as_if_nothing_had_happened(method: str, federate: Federate) -> None:
    """Runs of `REPRESENTATIVES` are also killed in round 1, where there is no checkpoint yet, and in the last round."""
    check_resume(method, federate, thorough=method in REPRESENTATIVES)


@of_every_method_if_extended
def test_a_finished_run_is_prolonged_to_a_straight_longer_one(method: str, federate: Federate) -> None:
    """The last round of a short run trains all clients and is repeated; the prolonged run equals a straight one.

    Runs of `REPRESENTATIVES` are also prolonged after one round, and with all clients in every round.
    """
    cases = [(0.5, (1, 2)), (1.0, (2,))] if method in REPRESENTATIVES else [(0.5, (2,))]
    for share, lengths in cases:
        plan: dict[str, Any] = {"fraction_train": share}
        straight = federate(method, num_rounds=4, **plan)
        for rounds in lengths:
            short = federate(method, num_rounds=rounds, **plan)
            long = federate(method, num_rounds=4, resume=str(short), **plan)
            assert outcome(long) == outcome(straight), (share, rounds)


@of_representatives
def test_a_prolonged_run_that_is_killed_is_still_a_straight_one(method: str, federate: Federate) -> None:
    """A run that is prolonged, killed at the handshake or in round 2 and resumed equals a straight run."""
    plan: dict[str, Any] = {"fraction_train": 0.5}
    straight = federate(method, num_rounds=4, **plan)
    for rounds, in_round in ((1, 2), (2, 0)):
        short = federate(method, num_rounds=rounds, **plan)
        with pytest.raises(KilledError):
            federate(method, num_rounds=4, resume=str(short), grid=partial(KilledGrid, in_round=in_round), **plan)
        long = federate(method, num_rounds=4, resume=str(short), **plan)
        assert metrics(long) == metrics(straight), (rounds, in_round)
        assert outcome(long) == outcome(straight), (rounds, in_round)
