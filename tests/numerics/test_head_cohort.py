"""HyperFL's clients that share H_0 in a cohort, against the same clients trained one by one."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_cohorts import SIZES, Node, StackedNode, assert_equal_rounds, numbers

from clients.engine import cohort_trainer
from clients.hyperfl import HyperFLClient
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum
from hyperfl_flwr.training import hyperfl_cohort
from hyperfl_flwr.training.factored_array import FactoredArray


@pytest.mark.parametrize("embedding", ["trained", "per-client", "common-frozen"])
@pytest.mark.parametrize("clip_norm", [0.5, 0.0])
@pytest.mark.usefixtures("float64")
def test_stacked_steps_equal_one_by_one(embedding: str, clip_norm: float, tmp_path: Path) -> None:
    """In float64 to 1e-12, for clients of unequal sizes, over two rounds."""
    changes = {"hyperfl.embedding": embedding, "hyperfl.clip-norm": clip_norm}
    one, other = StackedNode(tmp_path / "stacked", 3, **changes), Node(tmp_path / "alone", "one-by-one", **changes)
    trained: list[int] = []
    train = hyperfl_cohort._train

    def counted(requests: Sequence[hyperfl_cohort.StackedHeadTraining]) -> list[float]:
        losses = train(requests)
        trained.append(len(requests))
        return losses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hyperfl_cohort, "_train", counted)
        assert_equal_rounds(one, other, 1e-12)
    assert trained == [3, 3]


@pytest.mark.parametrize("embedding", ["trained", "per-client", "common-frozen"])
@pytest.mark.usefixtures("float64")
def test_a_cohort_equals_one_by_one(embedding: str, tmp_path: Path) -> None:
    """In float64 to 1e-12, for clients of unequal sizes, over two rounds, some steps clipped.

    A client may use units that the common embedding does not, with `per-client` half of them.
    """
    changes = {"hyperfl.embedding": embedding}
    nodes = [Node(tmp_path / str(cohort), cohort, **changes) for cohort in (3, "one-by-one")]
    assert_equal_rounds(nodes[0], nodes[1], 1e-12)


def test_in_float32_the_difference_is_rounding(tmp_path: Path) -> None:
    """The first round differs by less than 1e-4 of the movement: 26 steps at most, before rounding has grown."""
    nodes = [Node(tmp_path / str(cohort), cohort) for cohort in (3, "one-by-one")]
    (got, _), (wanted, _) = (node.uploads() for node in nodes)
    for arrays, reference in zip(got, wanted, strict=True):
        for key, value in reference.items():
            moved = float(np.abs(value - nodes[0].sent[key]).max())
            np.testing.assert_allclose(arrays[key], value, rtol=0, atol=1e-4 * moved + 1e-7, err_msg=key)


def test_the_size_of_a_cohort_changes_no_bit(tmp_path: Path) -> None:
    """Sums, metrics and private state are the same bytes with cohorts of 1, 2 and all, and on two nodes."""
    whole, result = Node(tmp_path / "auto", "auto").summed()
    for cohort in (1, 2):
        node = Node(tmp_path / str(cohort), cohort)
        sums, other = node.summed()
        assert sums == whole
        assert numbers(other) == numbers(result)
        for client in range(len(SIZES)):
            stored, reference = node.state(client), Node(tmp_path / "auto", "auto").state(client)
            assert {key: value.tobytes() for key, value in stored.items()} == {
                key: value.tobytes() for key, value in reference.items()
            }
    apart = Node(tmp_path / "apart", 2)
    (one, first), (rest, second) = apart.summed([1]), apart.summed([0, 2])
    received, rules = apart.sent, {"hypernetwork": Reduction.MEAN_BY_EXAMPLES}
    total = ReproducibleSum(received, rules, num_clients=3, max_num_examples=max(SIZES))
    total.add({key: np.frombuffer(one[key], np.float32).reshape(value.shape) for key, value in received.items()}, 50)
    total.merge({0: {key: np.frombuffer(rest[key]).reshape(value.shape) for key, value in received.items()}})
    assert {key: value.tobytes() for key, value in total.sums(0).items()} == whole
    assert sorted(each for part in (first, second) for each in map(str, numbers(part))) == sorted(
        map(str, numbers(result))
    )


def test_no_client_s_matrix_is_formed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that returns a sum of several clients only forms blocks of their matrices."""
    monkeypatch.setattr(FactoredArray, "formed", lambda self: pytest.fail("a matrix was formed"))
    _, result = Node(tmp_path, "auto").summed()
    assert [one.client for one in result.results] == [0, 1, 2]


def test_clipped_uploads_are_those_of_one_by_one(tmp_path: Path) -> None:
    """With `privacy.clip-norm` the norm is taken of the formed arrays, and uploads differ by rounding only."""
    changes = {"privacy.clip-norm": 0.01}
    (got, _), (wanted, _) = (Node(tmp_path / str(each), each, **changes).uploads() for each in (3, "one-by-one"))
    sent = Node(tmp_path, 3).sent
    for arrays, reference in zip(got, wanted, strict=True):
        change = [arrays[key].astype(np.float64) - value for key, value in sent.items()]
        assert sum(float((part**2).sum()) for part in change) ** 0.5 <= 0.01
        for key, value in reference.items():
            np.testing.assert_allclose(arrays[key], value, rtol=0, atol=1e-6, err_msg=key)


@pytest.mark.usefixtures("float64")
def test_a_client_of_many_steps_is_trained_alone(tmp_path: Path) -> None:
    """170 samples are 34 steps, more than the 32 units: its factors would be larger than H."""
    nodes = [Node(tmp_path / str(cohort), cohort, (7, 170, 50)) for cohort in (3, "one-by-one")]
    assert_equal_rounds(nodes[0], nodes[1], 1e-12)
    (got, _), (wanted, _) = (node.uploads() for node in nodes)
    assert {key: value.tobytes() for key, value in got[1].items()} == {
        key: value.tobytes() for key, value in wanted[1].items()
    }


def test_clients_that_are_trained_alone_are_few_at_a_time(tmp_path: Path) -> None:
    """Of clients that take too many steps for a cohort of two, no more than two hold their data at once."""
    node, alive, most = Node(tmp_path, 2, (170,) * 6), weakref.WeakSet[torch.Tensor](), [0]
    make = node.make

    def counting(client: int) -> HyperFLClient:
        member = make(client)
        alive.add(member.context.data.train_images)
        most[0] = max(most[0], len(alive))
        return member

    node.make = counting  # type: ignore[method-assign]
    _, found = node.uploads()
    assert len(found.results) == 6
    assert most[0] <= 3  # two, and the one that was just made


def test_a_cohort_needs_no_more_than_the_memory_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auto`, clients are taken while half of the free memory lasts, at least one; a number is taken as it is."""
    sizes: list[int] = []
    finish = cohort_trainer.CohortTrainer._next_cohort

    def counted(self: Any, waiting: Any, received: Any, training: Any) -> Any:
        before = len(waiting)
        parts = list(finish(self, waiting, received, training))
        sizes.append(before - len(waiting))
        yield from parts

    monkeypatch.setattr(cohort_trainer.CohortTrainer, "_next_cohort", counted)
    monkeypatch.setattr(cohort_trainer, "free_memory", lambda: 0)
    Node(tmp_path / "auto", "auto").uploads()
    Node(tmp_path / "two", 2).uploads()
    Node(tmp_path / "fixed", "auto", deterministic=True).uploads()  # whatever memory there is
    assert sizes == [1, 1, 1, 2, 1, 3]
