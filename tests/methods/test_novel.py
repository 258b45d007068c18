"""Novel clients: what they are told and tell, what each way of giving them a model comes to, and what it costs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import NUM_CLIENTS, Federate, InProcessGrid, Settings, last_checkpoint, metrics, plain_grid
from flwr.app import ArrayRecord, Message, MessageType
from torch import Tensor
from torch.func import functional_call

from clients import adapter
from clients.base import BaseClient
from experiments.report import write_report
from hyperfl_flwr.agreement import handshake
from hyperfl_flwr.arrays import SharedArrays, pack_arrays, unpack_arrays
from hyperfl_flwr.client_app import app
from hyperfl_flwr.config import RunConfig
from hyperfl_flwr.data.client_data import ClientData, FederatedData, load_federated_data
from hyperfl_flwr.data.corruptions import corrupted
from hyperfl_flwr.errors import ConfigError, DataError, RunDirectoryError, RunFailedError
from hyperfl_flwr.messages import OWN_ARRAYS, Request, by_client, record_of
from hyperfl_flwr.methods import METHODS, check_novel
from hyperfl_flwr.models.encoder import build_encoder
from hyperfl_flwr.models.server_hypernetwork import DeepHypernetwork
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.novel_results import NovelRecord, described, flat_means, read_novel
from hyperfl_flwr.queries import ASSESS, DESCRIBE, DESCRIPTOR, ERRORS, GRADIENTS, RATES, Question
from hyperfl_flwr.recording import read_manifest
from hyperfl_flwr.rng import numpy_generator
from hyperfl_flwr.training.a_distance import a_distance, split
from strategies.asking import Query, ask
from strategies.base import Setting
from strategies.nearest import find_distances

NOVEL = [NUM_CLIENTS, NUM_CLIENTS + 1]
PLAN: dict[str, Any] = {
    "target": "mlp", "num_rounds": 1, "data.partition": "iid", "learning_rate": 0.1, "novel.clients": len(NOVEL),
    "novel.a-distance-rounds": 3, "it-pfl.fine-tune-rounds": 0, "pfedhn.server-learning-rate": 0.1, "local_epochs": 4,
}  # fmt: skip
"""Digits, 8 x 8; enough training that models are better than chance and differ."""

PERSONAL: dict[str, Any] = {
    "num_rounds": 5, "data.partition": "shards", "pfedhn.combine": "sum", "pfedhn.hidden-width": 32,
}  # fmt: skip
"""With these, pFedHN's models differ."""

SHAPE = (1, 8, 8)
MODEL_BYTES = 4 * (65 * 200 + 201 * 200 + 201 * 10)


class QueryGrid(InProcessGrid):
    """Keeps who was asked by messages of each type, and the arrays of each client's answers."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.asked: dict[str, set[int]] = {}
        self.answers: dict[str, list[dict[int, SharedArrays]]] = {}

    def answer(self, message: Message) -> Message:
        reply, kind = super().answer(message), message.metadata.message_type
        if kind != "query.hello":
            self.asked.setdefault(kind, set()).update(Request.of(message.content).clients)
        if not reply.has_error() and OWN_ARRAYS in reply.content:
            own = by_client(unpack_arrays(record_of(reply.content, OWN_ARRAYS, ArrayRecord)))
            self.answers.setdefault(kind, []).append({client: dict(arrays) for client, arrays in own.items()})
        return reply


def data_of(run: Path) -> FederatedData:
    return load_federated_data(RunConfig.from_flat(read_manifest(run)["settings"]).data_settings())


def by_way(run: Path, way: str, corruption: str = "none") -> dict[int, NovelRecord]:
    """Return a way's records of novel.json by client."""
    found = [record for record in read_novel(run) if (record.way, record.corruption) == (way, corruption)]
    assert len({record.client for record in found}) == len(found)
    return {record.client: record for record in found}


def outputs(parameters: dict[str, Tensor], images: Tensor) -> Tensor:
    return functional_call(build_target("mlp", SHAPE, 10), parameters, images)


def share_correct(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(dim=1) == labels).double().mean())


def hypernetwork_of(arrays: dict[str, np.ndarray], hidden_width: int) -> DeepHypernetwork:
    network = DeepHypernetwork(
        build_target("mlp", SHAPE, 10), embedding_dim=2, hidden_width=hidden_width, hidden_layers=1
    )
    names = network.state_dict()
    network.load_state_dict({name: torch.tensor(arrays[f"server/{name}"]) for name in names}, assign=True)
    return network


def test_the_global_model_is_assessed_on_corrupted_data_too(federate: Federate) -> None:
    """Of the checkpoint's aggregate, without messages; the corrupted images are those of the run's seed."""
    run = federate("fedavg", **PLAN, **{"novel.corruptions": "none,rotation"})
    arrays, _ = last_checkpoint(run)
    parameters = {key.removeprefix("model/"): torch.tensor(value) for key, value in arrays.items()}
    data, told = data_of(run), []
    for corruption in ("none", "rotation"):
        records = by_way(run, "global", corruption)
        assert list(records) == NOVEL
        for client, record in records.items():
            mine = data.client(client)
            images = mine.test_images
            if corruption == "rotation":
                rng = numpy_generator(0, "corruption", client, corruption, "test")
                images = corrupted(images, corruption, rng, mean=data.dataset.mean, std=data.dataset.std)
            assert record.accuracy == share_correct(outputs(parameters, images), mine.test_labels)
            assert (record.bytes_down, record.bytes_up, record.models, record.samples) == (MODEL_BYTES, 0, 1, 0)
            assert record.num_examples == len(mine.test_labels)
            told.append(record.accuracy)
    assert len(set(told)) > 1
    assert max(told) > 0.2
    assert "<td>novel clients, global, rotation</td>" in write_report(run).read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["novel_global"] == pytest.approx(np.mean(told[:2]))
    assert summary["novel_global_rotation_sem"] == pytest.approx(np.std(told[2:], ddof=1) / np.sqrt(2))
    assert f"2 novel clients: global {100 * np.mean(told[:2]):.1f} +- " in (run / "server.log").read_text()


def test_the_models_of_training_clients_are_assessed(federate: Federate) -> None:
    """PFedHN's three ways, of what the checkpoint's hypernetwork makes of its table of embeddings."""
    run = federate("pfedhn", **PLAN | PERSONAL)
    arrays, _ = last_checkpoint(run)
    network = hypernetwork_of(arrays, hidden_width=32)
    thetas = [network.split(network(torch.tensor(row))) for row in arrays["server/embeddings"]]
    assert len(thetas) == NUM_CLIENTS
    data, config = data_of(run), RunConfig.from_flat(read_manifest(run)["settings"])
    grid = plain_grid(2, config.flat())
    distances = find_distances(grid, setting_of(config, grid), "none")
    row = 4 * 65  # weights or gradients of one classifier
    each_way = [by_way(run, way) for way in ("sampled", "ensemble", "nearest")]
    for client in NOVEL:
        mine = data.client(client)
        logits = [outputs(theta, mine.test_images).detach() for theta in thetas]
        accuracies = [share_correct(one, mine.test_labels) for one in logits]
        sampled, ensemble, nearest = (records[client] for records in each_way)
        assert sampled.accuracy == pytest.approx(np.mean(accuracies), abs=1e-12)
        assert ensemble.accuracy == share_correct(torch.stack(logits).mean(dim=0), mine.test_labels)
        assert nearest.accuracy == accuracies[min(distances.between[client], key=distances.between[client].get)]
        assert (sampled.bytes_down, sampled.models) == (MODEL_BYTES, 1)
        assert (ensemble.bytes_down, ensemble.models) == (NUM_CLIENTS * MODEL_BYTES, NUM_CLIENTS)
        assert (sampled.bytes_up, ensemble.bytes_up, sampled.samples) == (0, 0, 0)
        # Three times weights and gradients of a classifier per training client, then weights and an error rate.
        assert nearest.bytes_down == MODEL_BYTES + 4 * NUM_CLIENTS * row
        assert nearest.bytes_up == NUM_CLIENTS * (3 * row + 8)
        assert nearest.bytes_of_others == NUM_CLIENTS * (7 * row + 8)
        assert (nearest.models, nearest.samples) == (1, len(mine.train_images))
    assert len({record.accuracy for records in each_way for record in records.values()}) > 2


def test_a_descriptor_becomes_a_model(federate: Federate) -> None:
    """Encoder and hypernetwork of the checkpoint, by hand; a part of the samples is a part of the larger part.

    With much noise the descriptor is another in every run, with next to none it is the one without noise.
    """
    changes: dict[str, Any] = {"it-pfl.pooling": "mean", "novel.samples": "all,8", "novel.epsilons": "none,0.1,1e9"}
    grids: list[QueryGrid] = []

    def make(num_nodes: int, settings: Settings) -> QueryGrid:
        grids.append(QueryGrid(num_nodes, settings))
        return grids[-1]

    run = federate("it-pfl", 1, grid=make, **PLAN, **changes)
    arrays, _ = last_checkpoint(run)
    encoder = build_encoder("mlp", SHAPE, 2, "mean")
    values = {name: torch.tensor(arrays[f"encoder/{name}"]) for name in encoder.state_dict()}
    encoder.load_state_dict(values, assign=True)
    encoder_bytes = sum(value.nbytes for key, value in arrays.items() if key.startswith("encoder/"))
    network, data = hypernetwork_of(arrays, hidden_width=8), data_of(run)
    records = read_novel(run)
    asked = [(record.samples, record.all_samples, record.epsilon) for record in records if record.client == NOVEL[0]]
    assert asked == [(amount, amount == 40, epsilon) for amount in (40, 8) for epsilon in (None, 0.1, 1e9)]
    plain, noisy, nearly = (grids[0].answers[DESCRIBE][position] for position in range(3))
    for client in NOVEL:
        mine = data.client(client)
        row = plain[client][DESCRIPTOR]
        torch.testing.assert_close(torch.tensor(row[0]), encoder.descriptor(mine.train_images))
        np.testing.assert_allclose(nearly[client][DESCRIPTOR], row, rtol=1e-2, atol=1e-3)
        assert np.abs(noisy[client][DESCRIPTOR] - row).max() > 10 * np.abs(nearly[client][DESCRIPTOR] - row).max()
        theta = network.split(network(torch.tensor(row[0])))
        (record,) = [r for r in records if r.client == client and r.all_samples and r.epsilon is None]
        assert record.accuracy == share_correct(outputs(theta, mine.test_images), mine.test_labels)
        assert (record.bytes_down, record.bytes_up, record.models) == (encoder_bytes + MODEL_BYTES, 4 * 2, 1)
        few = grids[0].answers[DESCRIBE][3][client][DESCRIPTOR][0]
        order = numpy_generator(0, "unlabelled", client).permutation(40)[:8]
        torch.testing.assert_close(torch.tensor(few), encoder.descriptor(mine.train_images[order]))


def test_novel_clients_are_neither_trained_nor_evaluated_and_their_labels_not_read(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message but the queries names them, and with other labels they answer these with the same bytes."""
    grids: list[QueryGrid] = []

    def make(num_nodes: int, settings: Settings) -> QueryGrid:
        grids.append(QueryGrid(num_nodes, settings))
        return grids[-1]

    everyone, trained = {*range(NUM_CLIENTS), *NOVEL}, set(range(NUM_CLIENTS))
    expected = {
        "it-pfl": {DESCRIBE: set(NOVEL)},
        "pfedhn": {GRADIENTS: everyone, ERRORS: everyone},
    }
    client_data = FederatedData.client

    def unlabelled(self: FederatedData, client: int) -> ClientData:
        data = client_data(self, client)
        if client not in NOVEL:
            return data
        return replace(data, train_labels=data.train_labels * 0, test_labels=data.test_labels * 0)

    for method, queries in expected.items():
        runs = [federate(method, 3, grid=make, **PLAN)]
        with monkeypatch.context() as patch:
            patch.setattr(FederatedData, "client", unlabelled)
            runs.append(federate(method, 3, grid=make, **PLAN))
        for run, grid in zip(runs, grids[-2:], strict=True):
            rounds = {MessageType.TRAIN: trained, MessageType.EVALUATE: trained}
            assert grid.asked == rounds | queries | {ASSESS: set(NOVEL)}
            assert set(last_checkpoint(run)[1].versions) == trained
            assert not list((run / "clients").rglob(f"client-{NOVEL[0]:05d}*"))
            manifest = read_manifest(run)
            assert sorted(client for clients in manifest["nodes"] for client in clients) == sorted(everyone)
            assert np.sum(manifest["label_counts"]["train"], axis=1).tolist() == [40] * len(everyone)
        answers = [
            [
                {key: value.tobytes() for key, value in arrays.items()}
                for kind in queries
                for reply in grid.answers[kind]
                for arrays in reply.values()
            ]
            for grid in grids[-2:]
        ]
        assert answers[0] == answers[1]
        accuracies = [[record.accuracy for record in read_novel(run)] for run in runs]
        assert accuracies[0] != accuracies[1]


GROUPS = 3
"""Of classes (two each) and clients (three each) in the data set whose clients are alike or not."""


@pytest.fixture
def groups(make_settings: Callable[..., Settings], tmp_path: Path) -> tuple[RunConfig, FederatedData]:
    """Nine clients, three to a pair of classes; images of a class are a pattern with noise. Two are novel."""
    rng = np.random.default_rng(5)
    clients = np.repeat(np.arange(3 * GROUPS), 40)
    labels = 2 * (clients % GROUPS) + rng.integers(0, 2, len(clients))
    patterns = rng.integers(60, 200, (2 * GROUPS, 8, 8))
    images = (patterns[labels] + rng.normal(0, 25, (len(labels), 8, 8))).clip(0, 255).astype(np.uint8)
    np.savez(tmp_path / "groups.npz", images=images, labels=labels, clients=clients)
    settings = make_settings("pfedhn", dataset=f"npz:{tmp_path}/groups.npz", **{
        "num_clients": 7, "novel.clients": 2, "data.partition": "natural", "data.train-samples": "auto",
        "data.test-samples": "auto", "target": "mlp",
    })  # fmt: skip
    config = RunConfig.from_flat(settings, methods=METHODS)
    return config, load_federated_data(config.data_settings())


def distances_in(config: RunConfig, num_nodes: int = 2) -> Any:
    grid = plain_grid(num_nodes, config.flat())
    return find_distances(grid, setting_of(config, grid), "none")


def setting_of(config: RunConfig, grid: InProcessGrid) -> Setting:
    federation = handshake(grid, config.hosted_clients, 10.0)
    return Setting(
        config=config, federation=federation, reductions={}, experiment="0" * 16, run_directory=config.output
    )


def test_the_nearest_client_has_the_same_classes(groups: tuple[RunConfig, FederatedData]) -> None:
    """And A-distances are those of classifiers that gradient descent finds where all samples are in one place."""
    config, data = groups
    found = distances_in(config)
    assert found.failures == []
    classes = [set(np.flatnonzero(counts)) for counts in data.label_counts()[0]]
    for novel in (7, 8):
        assert classes[found.nearest(novel)] == classes[novel]
        far = [found.between[novel][other] for other in range(7) if classes[other] != classes[novel]]
        assert min(far) > found.between[novel][found.nearest(novel)] + 0.5
        for other in (0, 3):
            halves = [split(data.client(i).train_images, numpy_generator(0, "a-distance", i)) for i in (other, novel)]
            assert found.between[novel][other] == pytest.approx(central(halves, config), abs=1e-6)


def central(halves: list[tuple[Tensor, Tensor]], config: RunConfig) -> float:
    """Return the A-distance of two clients' samples [(to learn from, to count on)] by autograd."""
    weights = torch.zeros(65, requires_grad=True)
    sides = [-1.0, 1.0]
    for _ in range(config.novel.a_distance_rounds):
        loss = torch.zeros(())
        for side, (samples, _) in zip(sides, halves, strict=True):
            scores = samples @ weights[:-1] / 8 + weights[-1]
            loss = loss + torch.nn.functional.softplus(-side * scores).mean() / 2
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = (weights - config.novel.a_distance_learning_rate * gradient).detach().requires_grad_()
    rates = [
        float((side * (samples @ weights[:-1] / 8 + weights[-1]) <= 0).double().mean())
        for side, (_, samples) in zip(sides, halves, strict=True)
    ]
    return a_distance(*rates)


def test_clients_that_fail_are_left_out_of_the_comparison(
    groups: tuple[RunConfig, FederatedData], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training client 2 fails at once, novel client 8 in the second round; 7 keeps all its other distances."""
    config, _ = groups
    straight, calls, client_data = distances_in(config, 3), [], FederatedData.client

    def broken(self: FederatedData, client: int) -> ClientData:
        calls.append(client)
        if client == 2 or (client == 8 and calls.count(8) > 1):
            raise RuntimeError("the camera is broken")
        return client_data(self, client)

    monkeypatch.setattr(FederatedData, "client", broken)
    found = distances_in(config, 3)
    assert [(failure.client, failure.reason) for failure in found.failures] == [
        (2, "RuntimeError: the camera is broken"),
        (8, "RuntimeError: the camera is broken"),
    ]
    assert found.between == {7: {other: straight.between[7][other] for other in (0, 1, 3, 4, 5, 6)}}
    row, rounds = 4 * 65, config.novel.a_distance_rounds
    assert found.bytes_down[7] == row * (7 + 6 * rounds)
    assert found.bytes_of_others[7] == row * (7 + 6 * rounds) + row * 6 * rounds + 8 * 6


def test_natural_novel_clients_are_drawn(groups: tuple[RunConfig, FederatedData]) -> None:
    """Every client of the data set is one of the federation; which are the last two, the seed of the data decides."""
    config, data = groups
    without = load_federated_data(replace(config.data_settings(), novel_clients=0))
    order = [data.train_indices(client).tolist() for client in range(9)]
    plain = [without.train_indices(client).tolist() for client in range(9)]
    assert sorted(order) == sorted(plain) == plain
    for client in range(9):
        assert set(data.dataset.test.clients[data.test_indices(client)]) == {plain.index(order[client])}
    drawn = set()
    for seed in range(10):
        other = load_federated_data(replace(config.data_settings(), seed=seed))
        places = [plain.index(other.train_indices(client).tolist()) for client in range(9)]
        assert places[:7] == sorted(places[:7])
        drawn.add(tuple(places[7:]))
    assert len(drawn) > 5
    with pytest.raises(DataError, match=r"num-clients \+ novel.clients must be the number of client ids .* 9, got 10"):
        load_federated_data(replace(config.data_settings(), num_clients=10))


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        (
            "hyperfl",
            {},
            "with hyperfl: its clients .* a client without labels has no classifier of its own",
        ),
        ("local", {}, "novel.clients must be 0 with local: its clients keep model to themselves"),
        ("priv-hfl", {}, "take one of fedavg, pfedhn, it-pfl"),
        ("pfedhn-pc", {}, "keep classifier to themselves"),
        (
            "it-pfl",
            {"novel.epsilons": "none,1", "it-pfl.pooling": "mean-max"},
            "none,1 needs it-pfl.pooling = mean, got mean-max",
        ),
        ("fedavg", {"novel.corruptions": "saturation"}, "must not have saturation: .* 1 channels"),
    ],
)
def test_what_cannot_be_is_refused(
    method: str, changes: Settings, problem: str, federate: Federate, tmp_path: Path
) -> None:
    """Before anything is written."""
    with pytest.raises(ConfigError, match=problem):
        federate(method, **PLAN, **changes)
    assert not list(tmp_path.iterdir())


def test_corruptions_are_of_images(make_settings: Callable[..., Settings]) -> None:
    config = RunConfig.from_flat(make_settings("fedavg", **{"novel.clients": 1, "novel.corruptions": "blur"}))
    with pytest.raises(ConfigError, match="must be none, got blur: the samples are no images"):
        check_novel(config, [64])


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("corruptions", "none,fog", "must be none or blur, .* got 'none,fog'"),
        ("samples", "0", "must be all or whole numbers above 0, each once"),
        ("samples", "8,8", "must be all or whole numbers above 0, each once"),
        ("epsilons", "1,-1", "must be none or numbers above 0"),
        ("epsilons", "1e999", "must be none or numbers above 0"),
        ("delta", 1.0, "must be less than 1"),
        ("clients", -1, "must be greater than or equal to 0"),
    ],
)
def test_wrong_settings_are_refused(key: str, value: Any, problem: str, make_settings: Callable[..., Settings]) -> None:
    with pytest.raises(ConfigError, match=f"novel.{key} {problem}"):
        RunConfig.from_flat(make_settings("fedavg", **{f"novel.{key}": value}))


def test_lists_are_read(make_settings: Callable[..., Settings]) -> None:
    changes: Settings = {"novel.samples": 5, "novel.epsilons": "none,0.5,1e2"}
    novel = RunConfig.from_flat(make_settings("fedavg", **changes)).novel
    assert (novel.amounts, novel.budgets) == ([5], [None, 0.5, 100.0])


def test_a_failing_novel_client_is_named_and_the_others_go_on(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 6 has too few samples for the second descriptor; then none can be read at all, and the run is resumed."""
    client_data = FederatedData.client

    def small(self: FederatedData, client: int) -> ClientData:
        data = client_data(self, client)
        return replace(data, train_images=data.train_images[:10]) if client == 6 else data

    with monkeypatch.context() as patch:
        patch.setattr(FederatedData, "client", small)
        run = federate("it-pfl", **PLAN, **{"novel.samples": "all,20"})
    assert [(record.client, record.samples) for record in read_novel(run)] == [(5, 40), (6, 10), (5, 20)]
    reason = "client 6 is left out: ValueError: has 10 training samples, asked for 20"
    assert reason in (run / "server.log").read_text()
    assert (run / "failures" / "round-000001-novel-client-00006.txt").is_file()

    def gone(self: FederatedData, client: int) -> ClientData:
        if client in NOVEL:
            raise RuntimeError("the camera is broken")
        return client_data(self, client)

    output = str(run.parent / "run-111")
    with monkeypatch.context() as patch:
        patch.setattr(FederatedData, "client", gone)
        with pytest.raises(RunFailedError, match="no novel client could be assessed"):
            federate("it-pfl", output=output, **PLAN)
    assert not (Path(output) / "novel.json").exists()
    resumed = federate("it-pfl", output=output, resume=output, **PLAN)
    assert read_manifest(resumed)["status"] == "completed"
    assert [(record.client, record.samples) for record in read_novel(resumed)] == [(5, 40), (6, 40)]
    assert not list((resumed / "failures").iterdir())


def test_a_complete_run_is_resumed_to_assess_in_another_way(federate: Federate) -> None:
    """Its rounds are not repeated, and novel.json is that of a run which had these settings from the start."""
    run = federate("it-pfl", **PLAN)
    again: dict[str, Any] = {"resume": str(run), "output": str(run)}
    seconds = [json.loads(line).get("seconds") for line in (run / "metrics.jsonl").read_text().splitlines()]
    before = read_novel(run)
    with pytest.raises(RunDirectoryError, match="is complete after 1 rounds"):
        federate("it-pfl", **PLAN, **again)
    with pytest.raises(RunDirectoryError, match=r"novel\.clients was 2, now 3"):
        federate("it-pfl", **PLAN | {"novel.clients": 3}, **again)
    (run / "novel.json").unlink()
    federate("it-pfl", **PLAN, **again)
    assert read_novel(run) == before
    straight = federate("it-pfl", **PLAN, **{"novel.samples": "all,5"})
    federate("it-pfl", **PLAN, **again, **{"novel.samples": "all,5"})
    assert read_novel(run) == read_novel(straight) != before
    assert read_manifest(run)["settings"]["novel.samples"] == "all,5"
    assert [json.loads(line).get("seconds") for line in (run / "metrics.jsonl").read_text().splitlines()] == seconds
    assert metrics(run) == metrics(straight)


@pytest.mark.parametrize("kind", [ASSESS, GRADIENTS, ERRORS])
def test_without_novel_clients_nothing_is_assessed(kind: str, make_settings: Callable[..., Settings]) -> None:
    """A server that asks all the same learns nothing about the samples."""
    config = RunConfig.from_flat(make_settings("fedavg", target="mlp"))
    grid, arrays = plain_grid(1, config.flat()), {"classifiers/weight": np.zeros((1, 65), np.float32)}
    query = Query(kind=kind, clients=[0], expected={0: {}}, own={0: arrays})
    found = ask(grid, setting_of(config, grid), 1, query)
    assert (found.arrays, [failure.client for failure in found.failures]) == ({}, [0])
    reason = "only novel clients are assessed" if kind == ASSESS else "in runs of pfedhn with novel clients only"
    assert reason in found.failures[0].reason


def test_a_trained_client_describes_all_of_its_samples_or_none(make_settings: Callable[..., Settings]) -> None:
    """A server that asks for one sample, or another form of them, learns nothing; nor does one that asks for a test."""
    config = RunConfig.from_flat(make_settings("it-pfl", target="mlp", **{"novel.clients": 2}))
    grid = plain_grid(1, config.flat())
    encoder = build_encoder("mlp", SHAPE, config.pfedhn.dimension(NUM_CLIENTS), "mean")
    arrays = pack_arrays({f"encoder/{name}": np.zeros(v.shape, np.float32) for name, v in encoder.state_dict().items()})
    expected = {0: {DESCRIPTOR: np.zeros((1, config.pfedhn.dimension(NUM_CLIENTS)), np.float32)}}
    for question in (Question(samples=1), Question(corruption="blur"), Question(epsilon=1.0, delta=0.1)):
        query = Query(kind=DESCRIBE, clients=[0], expected=expected, shared=arrays, question=question)
        found = ask(grid, setting_of(config, grid), 1, query)
        assert "describes all of its samples" in found.failures[0].reason
    query = Query(kind=ASSESS, clients=[0], expected={0: {}}, shared=arrays)
    assert "only novel clients are assessed" in ask(grid, setting_of(config, grid), 1, query).failures[0].reason


def test_a_client_with_impossible_error_rates_is_never_nearest(
    groups: tuple[RunConfig, FederatedData], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training client 0 answers rates of 1e9, for which the A-distance would be the lowest of all."""
    honest = adapter._WORK[ERRORS]

    def lying(member: BaseClient, received: SharedArrays, question: Question) -> tuple[SharedArrays, int]:
        arrays, number = honest(member, received, question)
        return ({RATES: np.full_like(arrays[RATES], 1e9)} if member.setting.client == 0 else arrays), number

    monkeypatch.setitem(adapter._WORK, ERRORS, lying)
    found = distances_in(groups[0], 1)
    assert [(failure.client, failure.reason) for failure in found.failures] == [
        (0, "error rates must be between 0 and 1")
    ]
    assert all(0 not in distances for distances in found.between.values())


def record(**changes: Any) -> NovelRecord:
    values = {"way": "global", "client": 5, "corruption": "none", "accuracy": 0.5, "num_examples": 9, "bytes_down": 1}
    return NovelRecord(**{**values, "models": 1, **changes})


def test_means_are_over_clients_with_all_samples_and_without_noise() -> None:
    """0.2, 0.4, 0.9: mean 0.5, variance (0.09 + 0.01 + 0.16) / 2 = 0.13."""
    records = [
        *(record(client=client, accuracy=share, bytes_down=client) for client, share in enumerate((0.2, 0.4, 0.9))),
        record(accuracy=1.0, all_samples=False), record(accuracy=1.0, epsilon=2.0),
        record(corruption="blur", accuracy=0.25),
    ]  # fmt: skip
    found = flat_means(records)
    assert found == {
        "novel_global": pytest.approx(0.5), "novel_global_sem": pytest.approx((0.13 / 3) ** 0.5),
        "novel_global_blur": 0.25, "novel_global_blur_sem": None,
        "novel_global_bytes_down": 1, "novel_global_bytes_up": 0, "novel_global_bytes_of_others": 0,
        "novel_global_models": 1,
    }  # fmt: skip
    assert flat_means(records[3:5]) == {}
    assert described(records) == "4 novel clients: global 50.0 +- 20.8, global 25.0 (blur)"
    assert described(records[3:5]) == (
        "1 novel client: see novel.json, none was assessed with all samples and without noise"
    )
