"""Conformance with PFLlib: equal initial values, data and batches give equal models, method by method.

`HYPERFL_TEST_PFLLIB=FOLDER` names a checkout of https://github.com/TsingZ0/PFLlib (Apache-2.0); without it the tests
are skipped. Nothing of it is part of this project. Its clients and servers run in this process, in float64, with our
target network and with the batches that our clients drew. Its loops are replaced by calls of their parts, since they
evaluate and sample. `docs/results/conformance.md` has the table that the tests print.
"""

import contextlib
import importlib
import io
import os
import random
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain import Samples, random_samples
from rounds import Rounds
from torch import nn

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.models.targets import build_target

FOLDER = os.environ.get("HYPERFL_TEST_PFLLIB", "")

pytestmark = pytest.mark.skipif(not FOLDER, reason="needs HYPERFL_TEST_PFLLIB=FOLDER, a checkout of TsingZ0/PFLlib")

SHAPE, CLASSES, WIDTH = (1, 4, 4), 4, 12
SIZES, BATCH, EPOCHS, ROUNDS, RATE = (40, 60, 80), 20, 2, 3, 0.05
"""Training samples of three clients, multiples of the batch size, since PFLlib leaves out a shorter last batch."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method of ours and the same one of PFLlib.

    Attributes:
        method: Our name.
        theirs: Module and class of PFLlib's server.
        settings: Our settings, besides the common ones.
        arguments: PFLlib's arguments, besides the common ones.
        trains: The calls with which one of its clients trains, each with the part of our batches that it takes.
        ends: The calls with which its server ends a round.
        shared: The part of the model that is shared.
        private: Our private group and the attribute of PFLlib's client with the same model; empty for none.
        sizes: Training samples of the clients.
        halves: Whether a batch of ours is one of twice the size of theirs.
        tolerance: Largest difference, relative to the largest change of a parameter; 0 if the two differ on purpose.
        remark: Why they differ, or what it takes that they agree.
    """

    method: str
    theirs: tuple[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trains: Sequence[tuple[str, int]] = (("train", 0),)
    ends: Sequence[str] = ("receive_models", "aggregate_parameters")
    shared: str = "model"
    private: tuple[str, str] = ("", "")
    sizes: Sequence[int] = SIZES
    halves: bool = False
    tolerance: float = 1e-12
    remark: str = ""


ROWS = [
    Row(method="fedavg", theirs=("serveravg", "FedAvg")),
    Row(
        method="fedprox",
        theirs=("serverprox", "FedProx"),
        settings={"fedprox.mu": 0.7},
        arguments={"mu": 0.7},
    ),
    Row(
        method="scaffold",
        theirs=("serverscaffold", "SCAFFOLD"),
        settings={"scaffold.server-learning-rate": 0.8},
        arguments={"server_learning_rate": 0.8},
    ),
    Row(
        method="feddyn",
        theirs=("serverdyn", "FedDyn"),
        settings={"feddyn.alpha": 0.5},
        arguments={"alpha": 0.5},
        ends=("receive_models", "update_server_state", "aggregate_parameters"),
        tolerance=0.0,
        remark="PFLlib penalises the distance to the received model, the paper its square",
    ),
    Row(
        method="pfedme",
        theirs=("serverpFedMe", "pFedMe"),
        settings={
            "pfedme.pull": 3.0,
            "pfedme.inner-steps": 3,
            "pfedme.model-learning-rate": 0.1,
            "pfedme.server-rate": 0.7,
            "weight-decay": 1e-3,
        },
        arguments={"lamda": 3.0, "K": 3, "p_learning_rate": RATE, "local_learning_rate": 0.1, "beta": 0.7},
        ends=("receive_models", "aggregate_parameters", "beta_aggregate_parameters"),
        sizes=(60, 60, 60),
        remark="with its hidden weight decay of 0.001 for θ, and clients of equal size, which it weights by samples",
    ),
    Row(
        method="ditto",
        theirs=("serverditto", "Ditto"),
        settings={"ditto.pull": 0.7},
        arguments={"mu": 0.7, "plocal_epochs": EPOCHS},
        trains=(("ptrain", 1), ("train", 0)),
        private=("personal", "model_per"),
    ),
    Row(method="fedper", theirs=("serverper", "FedPer"), shared="extractor", private=("classifier", "model.head")),
    Row(method="lg-fedavg", theirs=("serverlg", "LG_FedAvg"), shared="classifier", private=("extractor", "model.base")),
    Row(
        method="moon",
        theirs=("servermoon", "MOON"),
        settings={"moon.mu": 5.0, "moon.temperature": 0.5},
        arguments={"mu": 5.0, "tau": 0.5},
    ),
    Row(method="fedrod", theirs=("serverrod", "FedROD")),
    Row(
        method="per-fedavg",
        theirs=("serverperavg", "PerAvg"),
        settings={"per-fedavg.alpha": RATE, "batch-size": BATCH},
        halves=True,
    ),
    Row(
        method="fedala",
        theirs=("serverala", "FedALA"),
        settings={"fedala.layers": 1, "fedala.rate": 1.0, "fedala.share": 1.0, "batch-size": 40},
        arguments={"eta": 1.0, "rand_percent": 100, "layer_idx": 2, "batch_size": 40},
        sizes=(40, 40, 40),
        private=("personal", "model"),
    ),
    Row(
        method="apfl",
        theirs=("serverapfl", "APFL"),
        settings={"apfl.adaptive": False},
        arguments={"alpha": 0.5},
        private=("personal", "model_per"),
        tolerance=0.0,
        remark="PFLlib takes the gradients of its private model in place of the mixture, which it then replaces",
    ),
]
"""One row for each method that both have; rows of methods that this version does not have are left out."""


@pytest.fixture(autouse=True)
def double(float64: None) -> None:
    """Compute in float64."""


class Split(nn.Module):
    """Our target network under PFLlib's names of its two parts."""

    def __init__(self, base: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, head

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(images))


@dataclass
class Recorded(Samples):
    """A client's training samples, which record the batches that our client draws."""

    def batch(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.train_images[index], self.train_labels[index]

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the samples as PFLlib's data set."""
        return list(zip(self.train_images, self.train_labels, strict=True))


def recorded(size: int, seed: int) -> Recorded:
    """Return random samples of a client, whose labels are unevenly distributed."""
    samples = random_samples(size, SHAPE, CLASSES, seed)
    return Recorded(samples.train_images, (samples.train_labels * (1 + seed) // 2) % CLASSES)


class Passes:
    """Yields the batches of the next pass each time it is iterated over."""

    def __init__(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], num_passes: int) -> None:
        self._length = len(batches) // num_passes
        self._rest = list(batches)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Any:
        batches, self._rest = self._rest[: self._length], self._rest[self._length :]
        return iter(batches)


@pytest.fixture
def pfllib(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that builds one of PFLlib's servers: row, its data, our first model -> server."""
    system = Path(FOLDER).expanduser() / "system"
    assert (system / "flcore").is_dir(), f"HYPERFL_TEST_PFLLIB={FOLDER} is not a checkout of PFLlib: no system/flcore"
    monkeypatch.syspath_prepend(str(system))
    monkeypatch.setitem(sys.modules, "h5py", types.ModuleType("h5py"))
    before = set(sys.modules)

    def build(row: Row, data: Sequence[Any], model: Split) -> Any:
        reader = importlib.import_module("utils.data_utils")  # patched before other modules take the name from it
        monkeypatch.setattr(reader, "read_client_data", lambda _, client, **__: data[client].pairs())
        module = importlib.import_module(f"flcore.servers.{row.theirs[0]}")
        # Its participants are all clients; the sum then has our order.
        monkeypatch.setattr(random, "sample", lambda clients, _: list(clients))
        common = {
            "model": model, "device": "cpu", "dataset": "", "algorithm": row.method, "num_classes": CLASSES,
            "local_learning_rate": RATE, "local_epochs": EPOCHS, "batch_size": BATCH // (1 + row.halves),
            "learning_rate_decay": False, "learning_rate_decay_gamma": 1.0, "num_clients": len(data),
            "join_ratio": 1.0, "random_join_ratio": False, "client_drop_rate": 0.0, "time_threthold": 1e9,
            "train_slow_rate": 0.0, "send_slow_rate": 0.0, "global_rounds": ROUNDS, "few_shot": 0,
            "num_new_clients": 0, "fine_tuning_epoch_new": 0, "save_folder_name": "", "time_select": False,
            "goal": "", "top_cnt": 0, "auto_break": False, "eval_gap": 1, "dlg_eval": False, "dlg_gap": 1,
            "batch_num_per_client": 1,
        }  # fmt: skip
        server = getattr(module, row.theirs[1])(types.SimpleNamespace(**common | row.arguments), 0)
        server.selected_clients = server.clients
        return server

    yield build
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("flcore", "utils"):
            del sys.modules[name]


def train(row: Row, member: Any, samples: Any) -> None:
    """Train one of PFLlib's clients on the batches that our client drew in this round."""
    seen, samples.seen = samples.seen, []
    part = len(seen) // len(row.trains)
    for call, number in row.trains:
        batches = [samples.batch(index) for index in seen[number * part : (number + 1) * part]]
        member.load_train_data = lambda batch_size=None, batches=batches: Passes(batches, EPOCHS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on what is deprecated
            getattr(member, call)()


def vector(module: nn.Module) -> np.ndarray:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy().copy()


def of_group(arrays: Mapping[str, np.ndarray], group: str) -> np.ndarray:
    return np.concatenate([value.ravel() for key, value in arrays.items() if key.startswith(f"{group}/")])


def initial_model(ours: Rounds) -> dict[str, torch.Tensor]:
    """Return the whole model from which all clients start, by name."""
    values = initial_state(ours.strategy.new_target(), torch_generator(ours.config.seed, "model"))
    return {name: value.clone() for name, value in values.items()}


def attribute(member: Any, path: str) -> Any:
    for name in path.split("."):
        member = getattr(member, name)
    return member


@pytest.mark.parametrize("row", [pytest.param(row, id=row.method) for row in ROWS if row.method in METHODS])
def test_three_rounds_give_pfllibs_models(
    row: Row, pfllib: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The shared model after every round, and the private ones; the difference is relative to the largest change."""
    data = [recorded(size, seed) for seed, size in enumerate(row.sizes)]
    settings = {
        "batch-size": BATCH,
        "local-epochs": EPOCHS,
        "learning-rate": RATE,
        "momentum": 0.0,
        "weight-decay": 0.0,
    }
    ours = Rounds(row.method, tmp_path, monkeypatch, data, CLASSES, WIDTH, settings | row.settings)
    target = build_target("mlp", SHAPE, CLASSES)
    target.load_state_dict(initial_model(ours), assign=True)
    with contextlib.redirect_stdout(io.StringIO()):
        server = pfllib(row, data, Split(target.extractor, target.classifier))
    start = of_group(ours.sent, row.shared)
    largest = 0.0
    for _ in range(ROUNDS):
        ours.round(range(len(data)))
        server.send_models()
        for member, samples in zip(server.clients, data, strict=True):
            train(row, member, samples)
        server.previous_global_model = list(server.global_model.parameters())  # pFedMe's loop sets it
        for call in row.ends:
            getattr(server, call)()
        found, expected = of_group(ours.sent, row.shared), vector(server.global_model)
        largest = max(largest, np.abs(found - expected).max() / np.abs(expected - start).max())
        for client, member in enumerate(server.clients if row.private[0] else ()):
            found = of_group(ours.private(client), row.private[0])
            expected = vector(attribute(member, row.private[1]))
            largest = max(largest, np.abs(found - expected).max() / np.abs(expected).max())
    with capsys.disabled():
        sys.stdout.write(f"\n| `{row.method}` | `{row.theirs[1]}` | {largest:.0e} | {row.remark} |\n")
    if row.tolerance:
        assert largest < row.tolerance
    else:
        assert largest > 1e-3, "they differ for a known reason; has PFLlib changed?"
