"""IT-PFL-HN's two phases: what they compute and what each client is sent."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import InProcessGrid
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from torch import Tensor

from clients.engine.context import client_setting
from clients.it_pfl import ITPFLClient
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics
from hyperfl_flwr.contract.grids import Settings, plain_grid
from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.protocol.arrays import SharedArrays, by_number
from hyperfl_flwr.protocol.messages import (
    ARRAYS,
    CLIENTS,
    CONFIG,
    PER_CLIENT_ARRAYS,
    Report,
    Request,
    record_of,
)
from hyperfl_flwr.protocol.packing import unpack_arrays
from hyperfl_flwr.protocol.queries import DESCRIBE, QuerySpec
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.run_directory import read_manifest

LOCAL, SERVER_RATE = 0.05, 0.5
"""Rates of the clients and of the server, for a round of one local step on all data without momentum and decay."""

PLAIN: dict[str, Any] = {
    "target": "mlp", "batch_size": 40, "learning_rate": LOCAL, "momentum": 0.0, "weight_decay": 0.0,
    "pfedhn.clip-norm": 0.0, "pfedhn.server-learning-rate": SERVER_RATE, "pfedhn.server-momentum": 0.0,
    "pfedhn.server-weight-decay": 0.0, "pfedhn.server-clip-norm": 0.0, "checkpoint_every": 1,
    "pfedhn.hidden-width": 32, "pfedhn.embedding-learning-rate": SERVER_RATE, "it-pfl.pooling": "mean-max",
}  # fmt: skip


class OwnArraysGrid(InProcessGrid):
    """Keep the type, the request and the per-client arrays of each message and reply that has such arrays."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.sent: list[tuple[str, Request, dict[int, SharedArrays]]] = []
        self.replies: list[tuple[str, Request, dict[int, SharedArrays]]] = []

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if message.metadata.message_type != "query.hello":
            request = Request.of(message.content)
            for content, kept in ((message.content, self.sent), (reply.content, self.replies)):
                if PER_CLIENT_ARRAYS in content:
                    own = by_number(unpack_arrays(record_of(content, PER_CLIENT_ARRAYS, ArrayRecord)))
                    kept.append((message.metadata.message_type, request, own))
        return reply


def arrays_after(run: Path, number: int) -> dict[str, Tensor]:
    return {key: torch.tensor(value) for key, value in Checkpoints(run / "checkpoints").load(number)[0].items()}


def layer(values: dict[str, Tensor], inputs: Tensor, name: str) -> Tensor:
    return inputs @ values[f"{name}.weight"].T + values[f"{name}.bias"]


def descriptor(values: dict[str, Tensor], images: Tensor) -> Tensor:
    """Return the descriptor of the mlp target's encoder, written out."""
    phi = layer(values, images.flatten(1), "encoder/body.1").clamp(min=0)
    pooled = torch.cat([phi[:, :250].mean(dim=0), phi[:, 250:].max(dim=0).values])
    centred = pooled - pooled.mean()
    pooled = centred / (centred.square().mean() + 1e-5).sqrt()
    hidden = layer(values, layer(values, pooled, "encoder/head.1").clamp(min=0), "encoder/head.3").clamp(min=0)
    return layer(values, hidden, "encoder/head.5")


def logits(values: dict[str, Tensor], row: Tensor, images: Tensor) -> Tensor:
    """Return the logits of the mlp that h(row) generates, written out; h has one hidden layer."""
    hidden = layer(values, layer(values, row, "server/body.0").clamp(min=0), "server/body.2")
    theta, begin = hidden @ values["server/head_weight"] + values["server/head_bias"], 0
    inputs = images.flatten(1)
    for number, (fan_in, units) in enumerate(((64, 200), (200, 200), (200, 10))):
        weight = theta[begin : begin + fan_in * units].reshape(units, fan_in)
        bias = theta[begin + fan_in * units : begin + (fan_in + 1) * units]
        inputs = inputs @ weight.T + bias
        inputs = inputs.clamp(min=0) if number < 2 else inputs
        begin += (fan_in + 1) * units
    assert begin == len(theta)
    return inputs


@pytest.mark.parametrize("fine_tune_rounds", [0, 1])
def test_a_round_is_gradient_descent_through_hypernetwork_and_network(
    fine_tune_rounds: int, federate: Federate
) -> None:
    """In round 2 of 2, of either phase, the server steps along the autograd gradient of the clients' mean loss.

    In the second phase only h moves. It is evaluated at g(D_i), through which no gradient flows; embeddings and encoder
    stay the same.
    """
    run = federate("it-pfl", **PLAIN, **{"it-pfl.fine-tune-rounds": fine_tune_rounds})
    before, after = arrays_after(run, 1), arrays_after(run, 2)
    data = load_federated_data(RunConfig.from_flat(read_manifest(run)["settings"]).data_settings())
    values = {
        key: value.clone().requires_grad_()
        for key, value in before.items()
        if key.startswith("server/") and not key.startswith(("server/momentum/", "server/encoder-optimiser/"))
    }
    loss = torch.zeros(())
    for client in range(NUM_CLIENTS):
        mine = data.client(client)
        row = descriptor(before, mine.train_images) if fine_tune_rounds else values["server/embeddings"][client]
        if fine_tune_rounds:
            torch.testing.assert_close(after["server/descriptors"][client], row, rtol=1e-4, atol=1e-6)
        found = logits(values, row, mine.train_images)
        loss = loss + torch.nn.functional.cross_entropy(found, mine.train_labels) / NUM_CLIENTS
    gradients = torch.autograd.grad(loss, list(values.values()), allow_unused=True)
    for (key, value), gradient in zip(values.items(), gradients, strict=True):
        assert (gradient is None) == (bool(fine_tune_rounds) and key == "server/embeddings")
        if gradient is None:
            assert torch.equal(after[key], before[key])
        else:
            step = LOCAL * gradient
            assert step.abs().max() > 0
            torch.testing.assert_close((value - after[key]) / SERVER_RATE, step, rtol=1e-2, atol=2e-6)
    frozen = [torch.equal(after[key], before[key]) for key in before if key.startswith("encoder/")]
    assert all(frozen) if fine_tune_rounds else not any(frozen)
    kept = {key: value for key, value in after.items() if key.startswith("server/federation/")}
    assert len(kept) == (len(values) - 1 if fine_tune_rounds else 0)
    for key, value in kept.items():
        assert torch.equal(value, before[key.replace("federation/", "")])


def test_the_first_phase_is_pfedhns(federate: Federate) -> None:
    """Hypernetwork, embeddings and momentum equal pFedHN's bit for bit: the encoder does not influence them."""
    plan = {
        "num_rounds": 3, "fraction_train": 0.5, "pfedhn.server-learning-rate": 0.1, "pfedhn.embedding-std": 0.3,
        "pfedhn.embedding-learning-rate": 0.5, "pfedhn.embedding-weight-decay": 1e-4,
    }  # fmt: skip
    mine, _ = last_checkpoint(federate("it-pfl", **plan, **{"it-pfl.fine-tune-rounds": 0}))
    theirs, _ = last_checkpoint(federate("pfedhn", **plan))
    shared = {key: value for key, value in mine.items() if key.startswith("server/") and "optimiser" not in key}
    assert exact(shared) == exact(theirs)


def test_nobody_is_sent_what_is_another_clients(federate: Federate) -> None:
    """Messages and replies hold arrays of the clients they concern; only DESCRIBE replies have an embedding.

    The embeddings are the server's rows in the first phase and the clients' descriptors, which are uploaded once, in
    the second.
    """
    grids: list[OwnArraysGrid] = []

    def make(num_nodes: int, settings: Settings) -> OwnArraysGrid:
        grids.append(OwnArraysGrid(num_nodes, settings))
        return grids[-1]

    changes = {"num_rounds": 4, "checkpoint_every": 1, "it-pfl.fine-tune-rounds": 2}
    run = federate("it-pfl", 5, grid=make, **changes)
    for _, request, own in (*grids[0].sent, *grids[0].replies):
        assert list(own) == list(request.clients)
        assert len(own) == 1  # each of the five nodes has one client
    rows = {
        (kind, request.round, client): arrays["embedding/weight"]
        for kind, request, own in grids[0].sent
        for client, arrays in own.items()
    }
    described = [
        (request.round, client, arrays["embedding/weight"])
        for kind, request, own in grids[0].replies
        for client, arrays in own.items()
        if kind == DESCRIBE
    ]
    assert [(number, client) for number, client, _ in described] == [(3, client) for client in range(NUM_CLIENTS)]
    table = Checkpoints(run / "checkpoints").load(2)[0]["server/embeddings"]
    for _, client, row in described:
        for key in ((MessageType.TRAIN, 3), (MessageType.TRAIN, 4), (MessageType.EVALUATE, 4)):
            np.testing.assert_array_equal(rows[(*key, client)], row)
        assert not np.array_equal(row[0], table[client])
        assert not np.array_equal(rows[MessageType.TRAIN, 1, client], rows[MessageType.TRAIN, 2, client])
    for kind, _, own in grids[0].replies:
        for arrays in own.values():
            assert kind == DESCRIBE or not arrays["embedding/weight"].any()


def test_what_the_encoder_is_to_learn_has_the_mean_of_all_embeddings(federate: Federate) -> None:
    """The encoder targets of sampled clients are the table's rows, shifted together to the mean of all embeddings."""
    grids: list[OwnArraysGrid] = []

    def make(num_nodes: int, settings: Settings) -> OwnArraysGrid:
        grids.append(OwnArraysGrid(num_nodes, settings))
        return grids[-1]

    changes = {"checkpoint_every": 1, "fraction_train": 0.5, "it-pfl.fine-tune-rounds": 0}
    shorter = federate("it-pfl", num_rounds=2, **changes)  # its first round equals that of the longer run
    table = Checkpoints(shorter / "checkpoints").load(1)[0]["server/embeddings"]
    federate("it-pfl", grid=make, num_rounds=3, **changes)
    sent = [own for kind, request, own in grids[0].sent if kind == MessageType.TRAIN and request.round == 2]
    rows = {client: arrays["embedding/weight"][0] for own in sent for client, arrays in own.items()}
    clients = sorted(rows)
    assert 1 < len(clients) < NUM_CLIENTS
    found = np.stack([rows[client] for client in clients])
    np.testing.assert_allclose(found.mean(axis=0), table.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(found - found[0], table[clients] - table[clients[0]], atol=1e-6)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raises", "the camera is broken"),
        (np.nan, "embedding/weight is not finite"),
        (1e25, "embedding/weight of client 2 has numbers beyond 10000"),
    ],
)
def test_a_client_that_cannot_be_described_is_left_out_and_asked_again(
    fault: str | float, text: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 2 fails at the start of the second phase (round 2): it is named in that round and trained in the next."""
    describe, calls = ITPFLClient.describe, []

    def broken(self: ITPFLClient, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
        calls.append(self.context.client)
        arrays, number = describe(self, received, question)
        if self.context.client == 2 and calls.count(2) == 1:
            if isinstance(fault, str):
                raise RuntimeError("the camera is broken")
            return {key: value * np.float32(fault) for key, value in arrays.items()}, number
        return arrays, number

    monkeypatch.setattr(ITPFLClient, "describe", broken)
    run = federate("it-pfl", num_nodes=NUM_CLIENTS, num_rounds=3, **{"it-pfl.fine-tune-rounds": 2})
    assert sorted(calls) == [0, 1, 2, 2, 3, 4]
    assert [row["failed"] for row in metrics(run) if row["kind"] == "train"] == [[], [2], []]
    assert text in (run / "failures" / "round-000002-client-00002.txt").read_text()
    arrays, progress = last_checkpoint(run)
    assert arrays["server/described"].tolist() == [1] * NUM_CLIENTS
    assert progress.versions == dict.fromkeys(range(NUM_CLIENTS), 3)


@pytest.mark.parametrize("own", [False, True])
def test_noise_refuses_statistics_of_the_owners_records(
    own: bool, make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    """One record would move the normalised features of all others, more than the noise is made for."""
    config = resolved(RunConfig.from_flat(make_settings("it-pfl", **{"novel.clients": 1, "it-pfl.pooling": "mean"})))
    data, state = load_federated_data(config.data_settings()), PrivateState(tmp_path, "0" * 16, NUM_CLIENTS)
    setting = client_setting(config, data, NUM_CLIENTS, torch.device("cpu"), state)
    client = ITPFLClient(replace(setting, own_statistics=own))
    encoder = {
        f"encoder/{name}": np.full(tuple(value.shape), 0.1, np.float32)
        for name, value in client.groups["encoder"].state_dict().items()
    }
    assert client.describe(encoder, QuerySpec())[1] == 40
    if not own:
        assert client.describe(encoder, QuerySpec(epsilon=1.0, delta=1e-5))[1] == 40
        return
    with pytest.raises(RefusalError, match=r"data\.normalisation must not be auto where noise protects single records"):
        client.describe(encoder, QuerySpec(epsilon=1.0, delta=1e-5))


def test_a_method_without_an_encoder_describes_nothing(make_settings: Callable[..., Settings]) -> None:
    """FedAvg's clients answer a DESCRIBE message with a failure that gives the reason, and send no array."""
    settings = make_settings("fedavg")
    grid = plain_grid(1, settings)
    request = Request(
        round=1, experiment="0" * 16, run_directory="", clients=[0, 3], versions=[0, 0], kept_versions=[0, 0]
    )
    content = RecordDict({ARRAYS: ArrayRecord(), CONFIG: request.to_record()})
    message = Message(content, dst_node_id=next(iter(grid.get_node_ids())), message_type=DESCRIBE)
    (reply,) = grid.pull_messages(grid.push_messages([message]))
    assert PER_CLIENT_ARRAYS not in reply.content
    report = Report.from_record(record_of(reply.content, CLIENTS, ConfigRecord))
    reason = "ValueError: fedavg has no encoder"
    assert [(failure.client, failure.reason) for failure in report.failures] == [(0, reason), (3, reason)]
