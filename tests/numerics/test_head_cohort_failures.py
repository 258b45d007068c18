"""Clients that fail in a cohort, and clients whose training is their own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigScalar as Scalar
from head_cohorts import SIZES, Node, StackedNode, numbers
from numpy.typing import NDArray

from clients.engine.head_cohort import HEAD_WEIGHT, HeadCohort
from clients.hyperfl import HEALTH, HyperFLClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.protocol.arrays import formed
from hyperfl_flwr.training.public_training import LocalSteps


def broken_nodes(folder: Path, kind: type[Node] = Node) -> Iterator[tuple[Node, str]]:
    """Yield nodes of which the client 1 fails, in the middle of a cohort, and the error."""
    loading = kind(folder / "loading", 3)
    make = loading.make

    def without_images(client: int) -> HyperFLClient:
        member = make(client)
        if client == 1:
            member.context.data.train_images.fill_(float("nan"))
        return member

    loading.make = without_images  # type: ignore[method-assign]
    yield loading, "FloatingPointError: embedding/v is not finite after training"
    storing = kind(folder / "storing", 3)
    (folder / "storing").mkdir()
    (folder / "storing" / "client-00001").write_text("a file where the client's folder should be")
    yield storing, "StateError: the state of client 1 after round 1 is not stored"
    stepping = kind(folder / "stepping", 3)
    make_stepping = stepping.make

    def without_labels(client: int) -> HyperFLClient:
        member = make_stepping(client)
        if client == 1:
            member.context.data.train_labels[-1] = 10  # of ten classes
        return member

    stepping.make = without_labels  # type: ignore[method-assign]
    yield stepping, "IndexError: Target 10 is out of bounds"


def test_an_error_of_the_whole_cohort_is_that_of_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left out by name with the reason, as a client that fails alone."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(HeadCohort, "train", fail)
    _, result = Node(tmp_path, 3).summed()
    assert [(failure.client, failure.reason) for failure in result.failures] == [
        (client, "RuntimeError: out of memory") for client in range(3)
    ]


def test_a_failing_client_leaves_the_cohort(tmp_path: Path) -> None:
    """With NaN in its data, a full disk or a wrong label; the others have the same bits as without it."""
    expected, reference = Node(tmp_path / "without", 3).summed([0, 2])
    for node, problem in broken_nodes(tmp_path):
        sums, result = node.summed()
        assert [failure.client for failure in result.failures] == [1]
        assert result.failures[0].reason.startswith(problem)
        assert numbers(result) == numbers(reference)
        assert sums == expected
        assert not (node.folder / "client-00001" / "round-000001.npz").exists()


def test_a_failing_client_leaves_a_stacked_cohort(tmp_path: Path) -> None:
    """With NaN in its data, a full disk or a wrong label; the others have what they have alone."""
    expected, reference = Node(tmp_path / "without", "one-by-one").uploads()
    for node, problem in broken_nodes(tmp_path, StackedNode):
        arrays, result = node.uploads()
        assert [failure.client for failure in result.failures] == [1]
        assert result.failures[0].reason.startswith(problem)
        assert [one.client for one in result.results] == [0, 2]
        for found, wanted in zip(arrays, (expected[0], expected[2]), strict=True):
            for key, value in wanted.items():
                moved = float(np.abs(value - node.sent[key]).max())
                np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-4 * moved + 1e-7, err_msg=key)
    assert not reference.failures


class OwnTraining(HyperFLClient):
    """A client whose `train` takes the method's training, on H itself."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train all groups in place."""
        return self.train_own(rng) | {"mine": 1.0}


class OwnSteps(HyperFLClient):
    """A client with another `train_own`."""

    def train_own(self, rng: np.random.Generator) -> dict[str, float]:
        """Train all groups in place."""
        return super().train_own(rng) | {"mine": 1.0}


class OwnPlace(HyperFLClient):
    """A client that changes the hypernetwork in place."""

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train all groups in place."""
        with torch.no_grad():
            for value in self.hypernetwork.parameters():
                value.add_(0.01)
        return {"train-loss": 0.0, "mine": 1.0, **dict.fromkeys(HEALTH, 0.0)}


class OwnFit(HyperFLClient):
    """A client that takes its own steps between `begin` and `end`, on the hypernetwork in place."""

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Scalar]]:
        """Train all groups in place."""
        begun = self.begin(parameters, config)
        with torch.no_grad():
            self.hypernetwork.head_weight.add_(0.01)
        arrays, num_examples, metrics = self.end(begun, self.train(begun.rng))
        return [formed(array) for array in arrays], num_examples, metrics | {"mine": 1.0}


@pytest.mark.parametrize("kind", [OwnTraining, OwnSteps, OwnPlace, OwnFit])
def test_a_subclass_with_a_training_of_its_own_shares_nothing(kind: type[HyperFLClient], tmp_path: Path) -> None:
    """It starts from the received H_0, in any cohort: on a shared one it would start from the client's before it."""

    class MyNode(Node):
        pass

    MyNode.kind = kind
    changes = {"hyperfl.keep-last": False}  # theta, which `OwnPlace` does not generate
    expected, _ = MyNode(tmp_path / "alone", "one-by-one", **changes).uploads()
    for cohort in ("auto", 1, 2):
        uploads, found = MyNode(tmp_path / str(cohort), cohort, **changes).uploads()
        assert ["mine" in result.metrics for result in found.results] == [True] * len(SIZES)
        for one, other in zip(uploads, expected, strict=True):
            assert {key: value.tobytes() for key, value in one.items()} == {
                key: value.tobytes() for key, value in other.items()
            }


@pytest.mark.parametrize("cohort", ["one-by-one", 3])
@pytest.mark.parametrize("changes", [{"learning_rate": 1e-9}, {"clip_norm": 1e-6}])
def test_the_local_steps_of_a_subclass_train_the_hypernetwork(
    cohort: str | int, changes: dict[str, float], tmp_path: Path
) -> None:
    """A tiny rate or clipping leaves the heads nearly as they were received."""

    class Slow(HyperFLClient):
        @classmethod
        def local_steps(cls, config: RunConfig) -> LocalSteps:
            return replace(super().local_steps(config), **changes)

    class MyNode(Node):
        kind = Slow

    slow, usual = MyNode(tmp_path / "slow", cohort), Node(tmp_path / "usual", cohort)
    moved = [
        max(float(np.abs(arrays[HEAD_WEIGHT] - node.sent[HEAD_WEIGHT]).max()) for arrays in node.uploads()[0])
        for node in (slow, usual)
    ]
    assert moved[0] < 0.01 * moved[1]
