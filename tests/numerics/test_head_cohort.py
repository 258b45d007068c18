"""HyperFL's clients that share H_0 in a cohort, against the same clients trained one by one."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigScalar as Scalar
from numpy.typing import NDArray
from plain import random_samples

from clients.engine import cohort_trainer
from clients.engine.cohort_trainer import trainer_of
from clients.engine.cohort_training import CohortTraining
from clients.engine.context import ClientContext
from clients.engine.head_cohort import HEAD_WEIGHT, HeadCohort
from clients.hyperfl import HEALTH, HyperFLClient
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.models.hypernetwork import common_embedding, initial_hypernetwork
from hyperfl_flwr.node.array_sums import PlainSum
from hyperfl_flwr.node.cohort import CohortResult, Received, train_cohort
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.protocol.arrays import SharedArrays, Uploads, formed, not_finite
from hyperfl_flwr.protocol.messages import Reduction, Request
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum
from hyperfl_flwr.training import hyperfl_cohort
from hyperfl_flwr.training.factored_array import MOST_WAITING, DeviceTotal, FactoredArray
from hyperfl_flwr.training.public_training import LocalSteps

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


def factored(factor: float, scale: float, dtype: torch.dtype = torch.float32) -> FactoredArray:
    """Return a matrix of 24 x 3001 elements with 5 rows of factors."""
    generator = torch.Generator().manual_seed(0)
    base, left, right = (
        torch.randn(shape, generator=generator, dtype=dtype) for shape in ((24, 3001), (5, 24), (5, 3001))
    )
    bound = float(base.abs().max())
    return FactoredArray(base=base, base_bound=bound, factor=factor, left=left * scale, right=right)


def test_the_columns_are_the_product() -> None:
    """To rounding, equal to a H_0 + L^T R in float64, and below the bound."""
    array = factored(0.9, 0.1, torch.float64)
    expected = 0.9 * array.base + array.left.t() @ array.right
    np.testing.assert_allclose(array.formed(), expected.numpy(), rtol=1e-13, atol=1e-13)
    assert float(expected.abs().max()) <= array.bound
    assert (array.shape, array.dtype) == ((24, 3001), np.float64)
    assert [part.start for part, _ in array.columns()] == [0, 2730]


@pytest.mark.parametrize("scale", [0.1, 1e4, 1e7])
def test_sums_of_factors_are_those_of_the_formed_matrix(scale: float) -> None:
    """The same bits in all levels, also for terms that are too large for level 0."""
    array = factored(0.9, scale)
    received = {"h/w": array.base.numpy()}
    one, other = (
        ReproducibleSum(received, {"h": Reduction.MEAN_BY_EXAMPLES}, num_clients=3, max_num_examples=9)
        for _ in range(2)
    )
    for size in (9, 4):
        one.add({"h/w": array}, size)
        other.add({"h/w": array.formed()}, size)
    assert list(one.levels) == list(other.levels)
    assert (len(one.levels) > 1) is (scale > 1)
    for level in one.levels:
        assert one.sums(level)["h/w"].tobytes() == other.sums(level)["h/w"].tobytes()


@pytest.mark.parametrize("scale", [0.1, 1e4])
@pytest.mark.parametrize("place", ["cache", "device"])
def test_sums_of_several_matrices_are_those_of_the_formed_ones(
    place: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits in a processor's cache and on a device; terms that are too large for level 0 are added at once."""
    arrays = [factored(factor, scale) for factor in np.linspace(-0.7, 0.9, MOST_WAITING + 3)]
    received = {"h/w": arrays[0].base.numpy()}
    one, other = (
        ReproducibleSum(received, {"h": Reduction.MEAN_BY_EXAMPLES}, num_clients=20, max_num_examples=9)
        for _ in range(2)
    )
    if place == "device":
        cpu = torch.device("cpu")
        monkeypatch.setattr(FactoredArray, "new_total", lambda self, sums: DeviceTotal(sums, cpu))
        monkeypatch.setattr(FactoredArray, "columns", lambda self: iter([(slice(0, 3001), self.on_device().numpy())]))
    for number, array in enumerate(arrays):
        one.add({"h/w": array}, number % 9 + 1)
        other.add({"h/w": array.formed()}, number % 9 + 1)
    assert len(one.matrix_totals) == (scale < 1)
    alone, reference = (
        total.levels_of({"h/w": value}, 5) for total, value in ((one, arrays[0]), (other, arrays[0].formed()))
    )
    assert len(one.matrix_totals) == (scale < 1)
    for levels, expected in ((alone, reference), ({level: one.sums(level) for level in one.levels}, other.levels)):
        assert list(levels) == list(expected)
        for level, sums in levels.items():
            assert sums["h/w"].tobytes() == expected[level]["h/w"].tobytes()
    one.merge(reference)
    other.merge(reference)
    one.add({"h/w": arrays[1]}, 3)
    other.add({"h/w": arrays[1].formed()}, 3)
    assert one.take_mean(25, 13)["h/w"].tobytes() == other.take_mean(25, 13)["h/w"].tobytes()


@pytest.mark.parametrize(("factor", "scale", "finite"), [(1.0, 1.0, True), (1.0, 1e38, False), (np.nan, 1.0, False)])
def test_factors_show_what_is_not_finite(factor: float, scale: float, finite: bool) -> None:
    """Also elements that overflow, although the factors do not."""
    array = factored(factor, scale)
    assert bool(np.isfinite(array.formed()).all()) is finite
    assert not_finite({"h/w": array}) == (None if finite else "h/w")
