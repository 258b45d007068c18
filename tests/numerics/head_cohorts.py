"""Nodes of HyperFL's clients that are trained in cohorts or one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain import random_samples

from clients.engine.cohort_trainer import trainer_of
from clients.engine.cohort_training import CohortTraining
from clients.engine.context import ClientContext
from clients.engine.head_cohort import HeadCohort
from clients.hyperfl import HyperFLClient
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.models.hypernetwork import common_embedding, initial_hypernetwork
from hyperfl_flwr.node.array_sums import PlainSum
from hyperfl_flwr.node.cohort import CohortResult, Received, train_cohort
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.protocol.arrays import SharedArrays, Uploads, formed
from hyperfl_flwr.protocol.messages import Reduction, Request

SIZES = (7, 50, 123)
"""Training samples of the clients: 2, 10 and 26 steps of 10 samples."""

SETTINGS = {
    "method": "hyperfl", "device": "cpu", "threads": 1, "learning-rate": 0.02, "batch-size": 10, "local-epochs": 2,
    "hyperfl.embedding-dim": 6, "hyperfl.hidden-width": 32, "hyperfl.clip-norm": 0.5,
}  # fmt: skip


@dataclass
class Uploaded:
    """Uploads of one client each, as a sum receives them."""

    arrays: list[SharedArrays] = field(default_factory=list)

    def add(self, arrays: Uploads, num_examples: int) -> None:
        """Keep a client's arrays."""
        self.arrays.append({key: formed(value).copy() for key, value in arrays.items()})


class StackedClient(HyperFLClient):
    """A client whose steps are stacked, as on a GPU."""

    @classmethod
    def together(cls, config: RunConfig, received: SharedArrays, device: torch.device) -> CohortTraining | None:
        """Return the cohort of the CPU, with stacked steps."""
        cohort = super().together(config, received, device)
        assert isinstance(cohort, HeadCohort)
        cohort._stacked = True
        return cohort


class Node:
    """A node with a client for each size; its clients' state is in a folder."""

    kind: type[HyperFLClient] = HyperFLClient

    def __init__(self, folder: Path, cohort: str | int, sizes: Sequence[int] = SIZES, **changes: Any) -> None:
        settings = default_settings() | SETTINGS | {"num-clients": len(sizes), "cohort": cohort}
        named = {key.replace("_", "-"): value for key, value in changes.items()}
        self.config = resolved(RunConfig.from_flat(settings | named))
        self.folder, self.sizes = folder, sizes
        member = self.make(0)
        network, extractor = member.hypernetwork, member.extractor
        v = common_embedding(6, "hyperfan-bias", 0)
        values = initial_hypernetwork(network, extractor, "hyperfan-bias", v, torch_generator(0, "hypernetwork"))
        dtype = torch.get_default_dtype()
        self.sent = {key: values[key.partition("/")[2]].to(dtype).numpy() for key in member.keys()}  # noqa: SIM118

    def make(self, client: int) -> HyperFLClient:
        """Return a client as a node builds it."""
        dtype = torch.get_default_dtype()
        train, test = random_samples(self.sizes[client], (1, 8, 8), 10, client), random_samples(9, (1, 8, 8), 10, 99)
        data = ClientData(
            train_images=train.train_images.to(dtype), train_labels=train.train_labels,
            test_images=test.train_images.to(dtype), test_labels=test.train_labels, augmentation=None, num_classes=10,
        )  # fmt: skip
        state = PrivateState(self.folder, "0" * 16, client)
        return self.kind(
            ClientContext(config=self.config, client=client, data=data, device=torch.device("cpu"), state=state)
        )

    def request(self, number: int, clients: Sequence[int]) -> Request:
        """Return the request of a round, in which the clients start from the state of the round before."""
        return Request(
            round=number, experiment="0" * 16, run_directory="", clients=clients, versions=[number - 1] * len(clients),
            kept_versions=[0] * len(clients), num_clients=len(self.sizes), max_num_examples=max(self.sizes),
        )  # fmt: skip

    def train(self, total: Any, number: int = 1, clients: Sequence[int] | None = None) -> CohortResult:
        """Train clients in a round, by default all."""
        trainer = trainer_of(self.kind, self.config, torch.device("cpu"), self.make)
        request = self.request(number, range(len(self.sizes)) if clients is None else clients)
        return train_cohort(trainer, request, Received(shared=self.sent), total, send_details=True)

    def uploads(self, number: int = 1) -> tuple[list[SharedArrays], CohortResult]:
        """Train all clients; return what each uploads, and their results."""
        total = Uploaded()
        result = self.train(total, number)
        return total.arrays, result

    def summed(self, clients: Sequence[int] | None = None) -> tuple[dict[str, bytes], CohortResult]:
        """Train clients; return the bytes of their sums, and their results."""
        chosen = range(len(self.sizes)) if clients is None else clients
        total = PlainSum(self.sent, {"hypernetwork": Reduction.MEAN_BY_EXAMPLES}, self.request(1, chosen))
        result = self.train(total, clients=chosen)
        assert total.outliers == {}
        return {key: value.tobytes() for key, value in total.arrays.items()}, result

    def state(self, client: int, number: int = 1) -> dict[str, np.ndarray]:
        """Return the private arrays that a client stored."""
        return dict(PrivateState(self.folder, "0" * 16, client).load(number))


def numbers(result: CohortResult) -> list[tuple[int, int, dict[str, float]]]:
    """Return the clients' results without times."""
    times = ("seconds", "train-seconds")
    return [
        (one.client, one.num_examples, {name: each for name, each in one.metrics.items() if name not in times})
        for one in result.results
    ]


def assert_equal_rounds(one: Node, other: Node, tolerance: float) -> None:
    """Check uploads, private state and metrics of two rounds; differences are measured by each array's movement."""
    for number in (1, 2):
        (got, result), (wanted, expected) = one.uploads(number), other.uploads(number)
        assert not result.failures
        for client, (arrays, reference) in enumerate(zip(got, wanted, strict=True)):
            for key, value in reference.items():
                moved = float(np.abs(value - one.sent[key]).max())
                np.testing.assert_allclose(arrays[key], value, rtol=0, atol=tolerance * moved, err_msg=key)
                assert arrays[key].dtype == value.dtype
            stored, before = one.state(client, number), other.state(client, number)
            for key, value in before.items():
                np.testing.assert_allclose(stored[key], value, rtol=100 * tolerance, atol=100 * tolerance, err_msg=key)
        for (_, size, some), (_, examples, others) in zip(numbers(result), numbers(expected), strict=True):
            assert (size, some) == (examples, pytest.approx(others, rel=100 * tolerance))


class StackedNode(Node):
    """A node of which all clients take one step together."""

    kind = StackedClient
