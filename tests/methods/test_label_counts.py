"""Methods whose clients send their label counts: a special case, the generator, false counts, warnings."""

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MessageType

from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics
from hyperfl_flwr.contract.grids import Settings, plain_grid, round_of
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.protocol.messages import LABEL_COUNTS, PER_CLIENT_ARRAYS, record_of
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid

NO_EFFECT: dict[str, Settings] = {
    "fedftg": {"fedftg.iterations": 0},
    "fedgen": {"fedgen.generated-weight": 0.0, "fedgen.latent-weight": 0.0},
}
"""Settings with which a method's model is FedAvg's."""

of_each = pytest.mark.parametrize("method", NO_EFFECT)


class Miscounting(InProcessGrid):
    """Adds `change` to the label counts that client 1 sends in round 1."""

    def __init__(self, num_nodes: int, settings: Settings, *, change: list[float]) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.change = np.array(change + [0.0] * (10 - len(change)), np.float32)

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        to_malicious = message.metadata.dst_node_id == FIRST_NODE_ID + 1
        if to_malicious and message.metadata.message_type == MessageType.TRAIN and round_of(message) == 1:
            arrays = unpack_arrays(record_of(reply.content, PER_CLIENT_ARRAYS, ArrayRecord))
            key = f"1/{LABEL_COUNTS}"
            reply.content[PER_CLIENT_ARRAYS] = pack_arrays({**arrays, key: arrays[key] + self.change})
        return reply


@of_each
def test_without_effect_the_model_is_fedavg_s_bit_for_bit(method: str, federate: Federate) -> None:
    """Three of five clients each in the first rounds; with the default settings the model differs."""
    plan: dict[str, Any] = {"fraction_train": 0.6, "num_rounds": 3, "learning_rate": 0.05}
    models = []
    for name, changes in (("fedavg", {}), (method, NO_EFFECT[method]), (method, {})):
        arrays, _ = last_checkpoint(federate(name, **plan, **changes))
        models.append(exact({key: value for key, value in arrays.items() if key.startswith("model/")}))
    assert models[0] == models[1]
    assert models[0] != models[2]


@of_each
@pytest.mark.parametrize("change", [[1.0], [-100.0, 100.0], [0.5, -0.5]])
def test_wrong_counts_are_refused(method: str, change: list[float], federate: Federate) -> None:
    run = federate(method, grid=partial(Miscounting, change=change), num_rounds=1)
    (row,) = [row for row in metrics(run) if row["kind"] == "train"]
    assert row["failed"] == [1, 3]
    text = sorted((run / "failures").iterdir())[0].read_text()
    assert re.match("node 1: the label counts of client 1 must be whole numbers .* its 40 training samples", text)


@of_each
def test_the_run_says_that_counts_are_sent_and_refuses_what_would_falsify_them(method: str, federate: Federate) -> None:
    run = federate(method, grid=plain_grid, num_rounds=1)
    assert (
        f"warning: with {method} every client sends its number of training samples of each class"
        in (run / "server.log").read_text()
    )
    with pytest.raises(ConfigError, match=rf"privacy\.clip-norm must be 0 with {method}, got 1: its clients send"):
        federate(method, **{"privacy.clip-norm": 1.0})
