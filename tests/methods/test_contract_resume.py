"""What every method promises about a run that is killed or prolonged: it ends like a straight one, bit for bit."""

from functools import partial
from typing import Any

import pytest
from federations import Federate, KilledError, KilledGrid, metrics, outcome

from hyperfl_flwr.checkpoint import Checkpoints
from hyperfl_flwr.methods import METHODS

pytestmark = pytest.mark.parametrize("method", METHODS)


@pytest.mark.parametrize("in_round", [1, 4, 6])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(method: str, in_round: int, federate: Federate) -> None:
    """Half of the clients per round, a checkpoint every other one: a straight run is the expected value.

    KilledError in round 1 (no checkpoint yet), in round 4 (the last checkpoint is of round 2) and in the last one.
    """
    plan: dict[str, Any] = {"num_rounds": 6, "fraction_train": 0.5, "checkpoint_every": 2}
    straight = federate(method, **plan)
    plan["output"] = str(straight.parent / "run-111")
    with pytest.raises(KilledError):
        federate(method, grid=partial(KilledGrid, in_round=in_round), **plan)
    killed = straight.parent / "run-111"
    assert max(Checkpoints(killed / "checkpoints").rounds(), default=0) == {1: 0, 4: 2, 6: 5}[in_round]
    assert outcome(federate(method, resume=str(killed), **plan)) == outcome(straight)


@pytest.mark.parametrize("fraction_train", [0.5, 1.0])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_finished_run_is_prolonged_to_a_straight_longer_one(
    method: str, rounds: int, fraction_train: float, federate: Federate
) -> None:
    """The last round of the short run trained all clients and is not one of the long run: a straight run tells."""
    plan: dict[str, Any] = {"fraction_train": fraction_train}
    short = federate(method, num_rounds=rounds, **plan)
    long = federate(method, num_rounds=4, resume=str(short), **plan)
    assert outcome(long) == outcome(federate(method, num_rounds=4, **plan))


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("in_round", [0, 2])
def test_a_prolonged_run_that_is_killed_is_still_a_straight_one(
    method: str, rounds: int, in_round: int, federate: Federate
) -> None:
    """Prolonged, killed at the handshake or in round 2, resumed again: a straight run is the expected value."""
    plan: dict[str, Any] = {"fraction_train": 0.5}
    short = federate(method, num_rounds=rounds, **plan)
    with pytest.raises(KilledError):
        federate(method, num_rounds=4, resume=str(short), grid=partial(KilledGrid, in_round=in_round), **plan)
    long = federate(method, num_rounds=4, resume=str(short), **plan)
    straight = federate(method, num_rounds=4, **plan)
    assert metrics(long) == metrics(straight)
    assert outcome(long) == outcome(straight)
