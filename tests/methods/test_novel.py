"""Novel clients: their messages, the accuracy of each way to give them a model, and its cost."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import InProcessGrid, setting_of
from flwr.app import ArrayRecord, Message, MessageType
from html_pages import Page
from torch import Tensor
from torch.func import functional_call

from hyperfl_flwr.app.client import app
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import last_checkpoint
from hyperfl_flwr.contract.grids import Settings, plain_grid
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.corruptions import corrupted
from hyperfl_flwr.data.federated_data import ClientData, FederatedData, load_federated_data
from hyperfl_flwr.models.encoder import build_encoder
from hyperfl_flwr.models.server_hypernetwork import DeepHypernetwork
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.arrays import SharedArrays, by_number
from hyperfl_flwr.protocol.messages import PER_CLIENT_ARRAYS, Request, record_of
from hyperfl_flwr.protocol.packing import unpack_arrays
from hyperfl_flwr.protocol.queries import ASSESS, DESCRIBE, DESCRIPTOR, ERRORS, GRADIENTS
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.novel_results import NovelRecord, read_novel
from hyperfl_flwr.runs.run_directory import read_manifest
from strategies.novel.nearest import find_distances

NOVEL = [NUM_CLIENTS, NUM_CLIENTS + 1]
PLAN: dict[str, Any] = {
    "target": "mlp", "num_rounds": 1, "data.partition": "iid", "learning_rate": 0.1, "novel.clients": len(NOVEL),
    "novel.a-distance-rounds": 3, "it-pfl.fine-tune-rounds": 0, "pfedhn.server-learning-rate": 0.1, "local_epochs": 4,
}  # fmt: skip
"""Digits of 8 x 8 pixels, and enough training that models differ and are better than chance."""

PERSONAL: dict[str, Any] = {
    "num_rounds": 5, "data.partition": "shards", "pfedhn.combine": "sum", "pfedhn.hidden-width": 32,
}  # fmt: skip
"""Settings with which the models of pFedHN's clients differ."""

SHAPE = (1, 8, 8)
MODEL_BYTES = 4 * (65 * 200 + 201 * 200 + 201 * 10)


class QueryGrid(InProcessGrid):
    """Record which clients were asked by each message type, and the arrays of each client's replies."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.asked: dict[str, set[int]] = {}
        self.answers: dict[str, list[dict[int, SharedArrays]]] = {}

    def answer(self, message: Message) -> Message:
        reply, kind = super().answer(message), message.metadata.message_type
        if kind != "query.hello":
            self.asked.setdefault(kind, set()).update(Request.of(message.content).clients)
        if not reply.has_error() and PER_CLIENT_ARRAYS in reply.content:
            own = by_number(unpack_arrays(record_of(reply.content, PER_CLIENT_ARRAYS, ArrayRecord)))
            self.answers.setdefault(kind, []).append({client: dict(arrays) for client, arrays in own.items()})
        return reply


def data_of(run: Path) -> FederatedData:
    return load_federated_data(RunConfig.from_flat(read_manifest(run)["settings"]).data_settings())


def by_way(run: Path, way: str, corruption: str = "none") -> dict[int, NovelRecord]:
    """Return the records in novel.json of one way, by client."""
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
    """The checkpoint's aggregate is assessed without uploads, on clean images and on corrupted ones (run's seed)."""
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
    assert "novel clients, global, rotation" in Page(write_report(run).read_text()).rows
    summary = json.loads((run / "summary.json").read_text())
    assert summary["novel_global"] == pytest.approx(np.mean(told[:2]))
    assert summary["novel_global_rotation_sem"] == pytest.approx(np.std(told[2:], ddof=1) / np.sqrt(2))
    assert f"2 novel clients: global {100 * np.mean(told[:2]):.1f} +- " in (run / "server.log").read_text()


def test_the_models_of_training_clients_are_assessed(federate: Federate) -> None:
    """PFedHN's three ways match the models that the checkpoint's hypernetwork generates from its embeddings."""
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
    """Descriptor and accuracy match the checkpoint's encoder and hypernetwork, for all samples and for a subset.

    With much noise the descriptor is far from the one without noise, with next to none it is close to it.
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


@pytest.mark.parametrize("method", ["fedavg", "pfedhn", "it-pfl"])
def test_the_number_of_nodes_changes_no_assessment(method: str, federate: Federate) -> None:
    """novel.json is the same on 1, 3 and 7 nodes."""
    one, *others = ((federate(method, number, **PLAN) / "novel.json").read_bytes() for number in (1, 3, 7))
    assert others == [one, one]


def test_novel_clients_are_neither_trained_nor_evaluated_and_their_labels_not_read(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only queries concern novel clients, and their replies are the same bytes when their labels are changed."""
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

    def unlabelled(self: FederatedData, client: int, device: object = "cpu") -> ClientData:
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
