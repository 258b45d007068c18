"""Groups that are sent alike to all clients, of which nothing comes back (DOWN) or each client's answer alone (EACH).

FedAvg with two vectors of three numbers: `hint` goes down only, and of `mark` each client sends what it received, plus
its id. The server keeps the sum of the marks, and sends the next hint.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict

from clients.fedavg import FedAvgClient
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import check_run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics
from hyperfl_flwr.contract.grids import Settings, round_of
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.models.vector import Vector
from hyperfl_flwr.protocol.messages import ARRAYS, PER_CLIENT_ARRAYS, Reduction, record_of
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid
from strategies.fedavg import FedAvg

HINT, MARK = "hint/theta", "mark/theta"
SIZE = 12
"""Bytes of each vector."""


class Counting(InProcessGrid):
    """Keeps the names of the arrays of all training messages and replies; `falsify` changes the reply of node 1."""

    def __init__(
        self, num_nodes: int, settings: Settings, *, falsify: Callable[[RecordDict], None] = lambda content: None
    ) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.falsify = falsify
        self.down: list[set[str]] = []
        self.up: list[set[str]] = []

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if message.metadata.message_type == MessageType.TRAIN:
            if message.metadata.dst_node_id == FIRST_NODE_ID + 1 and round_of(message) == 1:
                self.falsify(reply.content)
            self.down.append(names_in(message.content))
            self.up.append(names_in(reply.content))
        return reply


def names_in(content: RecordDict) -> set[str]:
    return {name for record in content.array_records.values() for name in unpack_arrays(record)}


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Mapping[int, dict[str, np.ndarray]]]]:
    """Return a function that gives FedAvg some of the two groups, and a list of what `update` received."""

    def extend(**groups: Reduction) -> list[Mapping[int, dict[str, np.ndarray]]]:
        received: list[Mapping[int, dict[str, np.ndarray]]] = []
        build, train, initial = FedAvgClient.build_groups, FedAvgClient.train, FedAvg.initial_parameters

        def build_groups(self: Any) -> Any:
            return {**build(self), **{name: Vector(3) for name in groups}}

        def train_marked(self: Any, rng: np.random.Generator) -> dict[str, float]:
            if "hint" in groups:
                np.testing.assert_array_equal(self.groups["hint"].theta, self.context.round)
            for name in groups:
                self.groups[name].theta += self.context.client
            return train(self, rng)

        def initial_parameters(self: Any) -> Any:
            return {**initial(self), **{name: {"theta": torch.ones(3)} for name in groups}}

        def update(self: Any, per_client: Any, num_examples: Mapping[int, int]) -> None:
            assert list(num_examples) == list(per_client)
            received.append(per_client)

        def advance(self: Any, means: Any) -> Any:
            return {**means, HINT: self.sent[HINT] + np.float32(1)} if "hint" in groups else means

        monkeypatch.setattr(FedAvgClient, "shared", {**FedAvgClient.shared, **groups})
        monkeypatch.setattr(FedAvgClient, "build_groups", build_groups)
        monkeypatch.setattr(FedAvgClient, "train", train_marked)
        monkeypatch.setattr(FedAvg, "initial_parameters", initial_parameters)
        monkeypatch.setattr(FedAvg, "update", update)
        monkeypatch.setattr(FedAvg, "advance", advance)
        return received

    return extend


def models_of(run: Path) -> dict[str, Any]:
    return exact({key: value for key, value in last_checkpoint(run)[0].items() if key.startswith("model/")})


def bytes_of(run: Path) -> tuple[int, int]:
    """Return the payload of a client, down and up, in the last round."""
    row = [row for row in metrics(run) if row["kind"] == "train"][-1]
    return row["bytes_down_per_client"], row["bytes_up_per_client"]


def test_what_goes_down_and_what_comes_back(federate: Federate, extended: Any) -> None:
    """Both vectors go down once per node; the hint does not come back; each mark comes back alone and in full.

    The model is that of FedAvg bit for bit, with one node and with two. After two rounds the hint is 1 + 2, and the
    mark 1, as the server does not change it.
    """
    plain = federate("fedavg")
    received = extended(hint=Reduction.DOWN, mark=Reduction.EACH)
    for num_nodes in (1, 2):
        grids: list[Counting] = []

        def make(number: int, settings: Settings, grids: list[Counting] = grids) -> Counting:
            grids.append(Counting(number, settings))
            return grids[-1]

        received.clear()
        run = federate("fedavg", num_nodes, grid=make)
        assert models_of(run) == models_of(plain)
        arrays, _ = last_checkpoint(run)
        assert arrays[HINT].tolist() == [3] * 3
        assert arrays[MARK].tolist() == [1] * 3
        expected = {client: {MARK: [1.0 + client] * 3} for client in range(NUM_CLIENTS)}
        found = [{client: {key: v.tolist() for key, v in a.items()} for client, a in one.items()} for one in received]
        assert found == [expected, expected]
        (grid,) = grids
        assert len(grid.down) == 2 * num_nodes
        assert all({HINT, MARK} <= names for names in grid.down)
        assert not any(name.endswith(HINT) for names in grid.up for name in names)
        assert not any(name == MARK for names in grid.up for name in names)
        assert {name for names in grid.up for name in names if name.endswith(MARK)} == {
            f"{client}/{MARK}" for client in range(NUM_CLIENTS)
        }
        down, up = bytes_of(plain)
        assert bytes_of(run) == (down + 2 * SIZE, up + SIZE)


def change(content: RecordDict, record: str, **arrays: np.ndarray | None) -> None:
    """Replace or remove arrays of a record, which is added if it is missing; __ stands for a slash."""
    found = unpack_arrays(record_of(content, record, ArrayRecord)) if record in content else {}
    for name, value in arrays.items():
        key = name.removeprefix("_").replace("__", "/")
        found = {k: v for k, v in found.items() if k != key} | ({} if value is None else {key: value})
    content[record] = pack_arrays(found)


def zeros(size: int = 3, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(size, dtype)


FALSE_REPLIES: dict[str, tuple[Callable[[RecordDict], None], str]] = {
    "an answer in a group that goes down": (
        lambda content: change(content, ARRAYS, hint__theta=zeros(3, np.float64)),
        "unexpected arrays: hint/theta",
    ),
    "the same for one client": (
        lambda content: change(content, PER_CLIENT_ARRAYS, _1__hint__theta=zeros()),
        "unexpected arrays: hint/theta",
    ),
    "a mark in the sums": (
        lambda content: change(content, ARRAYS, mark__theta=zeros(3, np.float64)),
        "unexpected arrays: mark/theta",
    ),
    "a model for one client": (
        lambda content: change(content, PER_CLIENT_ARRAYS, _1__model__x=zeros()),
        "unexpected arrays: model/x",
    ),
    "no mark": (lambda content: change(content, PER_CLIENT_ARRAYS, _1__mark__theta=None), "arrays of the clients"),
    "a mark of another client": (
        lambda content: change(content, PER_CLIENT_ARRAYS, _2__mark__theta=zeros()),
        r"arrays of the clients \[1, 2, 3\], expected \[1, 3\]",
    ),
    "shape": (
        lambda content: change(content, PER_CLIENT_ARRAYS, _1__mark__theta=zeros(4)),
        r"mark/theta has shape \(4,\), expected \(3,\)",
    ),
    "type": (
        lambda content: change(content, PER_CLIENT_ARRAYS, _1__mark__theta=zeros(3, np.float64)),
        "mark/theta has type float64, expected float32",
    ),
    "no number": (
        lambda content: change(content, PER_CLIENT_ARRAYS, _3__mark__theta=zeros() * np.float32(np.nan)),
        "mark/theta is not finite",
    ),
    "infinite": (
        lambda content: change(content, PER_CLIENT_ARRAYS, _3__mark__theta=zeros() + np.float32(np.inf)),
        "mark/theta is not finite",
    ),
    "too long": (
        lambda content: change(content, PER_CLIENT_ARRAYS, _3__mark__theta=zeros() + np.float32(1e3)),
        "its update of mark has .* times the norm",
    ),
    "no record": (lambda content: content.pop(PER_CLIENT_ARRAYS), "per-client-arrays"),
}


@pytest.mark.parametrize("name", FALSE_REPLIES)
def test_a_reply_that_is_wrong_is_refused(name: str, federate: Federate, extended: Any) -> None:
    falsify, reason = FALSE_REPLIES[name]
    received = extended(hint=Reduction.DOWN, mark=Reduction.EACH)
    run = federate("fedavg", grid=partial(Counting, falsify=falsify), num_rounds=1)
    (row,) = [row for row in metrics(run) if row["kind"] == "train"]
    assert row["failed"] == [1, 3]
    assert [sorted(arrays) for arrays in received] == [[0, 2, 4]]
    (text, _) = [path.read_text() for path in sorted((run / "failures").iterdir())]
    assert re.match(f"node 1: .*{reason}", text), text


def test_arrays_of_single_clients_are_refused_where_the_method_has_none(federate: Federate) -> None:
    falsify = partial(change, record=PER_CLIENT_ARRAYS, _1__hint__theta=zeros())
    run = federate("fedavg", grid=partial(Counting, falsify=falsify), num_rounds=1)
    assert "arrays of single clients, of which the method has none" in next((run / "failures").iterdir()).read_text()


def test_secure_sums_with_a_group_that_goes_down(federate: Federate, extended: Any) -> None:
    """The sums are those without the group, and it is no part of them."""
    secure: dict[str, Any] = {"secagg.enabled": True, "num_nodes": 3}
    plain = federate("fedavg", **secure)
    extended(hint=Reduction.DOWN)
    run = federate("fedavg", **secure)
    assert models_of(run) == models_of(plain)
    assert last_checkpoint(run)[0][HINT].tolist() == [3] * 3
    (down, up), (before, after) = bytes_of(run), bytes_of(plain)
    assert (down, up) == (before + SIZE, after)


def checked(**changes: Any) -> None:
    config = RunConfig.from_flat(default_settings() | {"method": "fedavg"} | changes)
    check_run(config, (1, 8, 8), 10)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secagg.enabled": True}, "the server must see each client's mark"),
        ({"privacy.unit": "client", "privacy.clip-norm": 1.0, "privacy.noise": "local"}, "its mark are not averaged"),
    ],
)
def test_what_comes_back_alone_needs_a_server_that_sees_it(changes: Any, reason: str, extended: Any) -> None:
    """Secure sums and noise on means are refused; with a group that only goes down they are not."""
    extended(hint=Reduction.DOWN)
    checked(**changes)
    extended(mark=Reduction.EACH)
    with pytest.raises(ConfigError, match=reason):
        checked(**changes)


@pytest.mark.parametrize("noise", ["local", "server"])
def test_what_goes_down_is_not_clipped(noise: str, federate: Federate, extended: Any) -> None:
    """With privacy of whole clients the model is that of FedAvg with the same noise, here none or a fixed one."""
    private: dict[str, Any] = {"privacy.unit": "client", "privacy.clip-norm": 0.5, "privacy.noise": noise}
    private |= {"privacy.noise-multiplier": 0.0} if noise == "local" else {"privacy.noise-multiplier": 1e-6}
    plain = federate("fedavg", **private)
    extended(hint=Reduction.DOWN)
    run = federate("fedavg", **private)
    assert last_checkpoint(run)[0][HINT].tolist() == [3] * 3
    for key, value in last_checkpoint(plain)[0].items():
        np.testing.assert_allclose(last_checkpoint(run)[0][key], value, rtol=0, atol=1e-4)


def test_what_comes_back_alone_is_clipped_with_the_rest(federate: Federate, extended: Any) -> None:
    """`privacy.clip-norm` bounds the joint change of model and mark, so no mark moves by more."""
    received = extended(mark=Reduction.EACH)
    federate("fedavg", **{"privacy.clip-norm": 0.5})
    moved = [np.linalg.norm(arrays[MARK] - 1) for one in received for arrays in one.values()]
    assert max(moved) <= 0.5
    assert max(moved) > 0.1
