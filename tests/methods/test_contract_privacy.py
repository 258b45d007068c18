"""Contract tests for privacy: private parameters appear nowhere outside the clients' folders."""

import numpy as np
import pytest

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.leaks import common_window
from hyperfl_flwr.contract.privacy import check_privacy
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.runs.checkpoint import SERVER

SENT_AT_FIRST = ("scaffold", "ditto")
"""Methods of which private numbers are in the first upload. c_i is 0 at first, so that its first change is c_i. Ditto's
models have one start and the same batches: where the gradient of all steps but the last is 0, they are equal."""

SENT_AS = {"changes/theta": f"{SERVER}consensus"}
"""After the last round PRIV-HFL's clients are sent the mean change instead of S."""


def test_the_search_finds_what_is_there() -> None:
    """A window planted at any offset of either side is found; 14 bytes and constant bytes are not."""
    rng = np.random.default_rng(0)
    needle, noise = rng.bytes(100), rng.bytes(1000)
    for start in range(20):
        assert common_window(needle, noise[: 30 + start] + needle[start : start + 16] + noise[60:])
        # Not 15 bytes, since a neighbour may be equal by chance.
        assert not common_window(needle, noise[: 30 + start] + needle[start : start + 14] + noise[60:])
    assert not common_window(bytes(64), bytes(64))
    assert not common_window(needle, noise)
    assert common_window(needle[:16], needle[:16])


@pytest.mark.parametrize("method", METHODS)
def test_private_parameters_are_in_no_message_log_or_checkpoint(method: str, federate: Federate) -> None:
    check_privacy(method, federate, sent_at_first=method in SENT_AT_FIRST, sent_as=SENT_AS, plots=True)
