"""`hyperfl personalize` and `hyperfl join` with `--deployment`: SuperNodes of new clients get models, others none."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import small_settings, trained
from programs import LocalDeployment, finished, local_deployment
from safetensors.torch import load_file
from waiting import eventually

from clients.novel.on_demand import NovelOwner
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.results.join_server import join_with_server
from hyperfl_flwr.results.personalize import personalize

pytestmark = [pytest.mark.slow, pytest.mark.extended]


@dataclass(frozen=True, kw_only=True)
class NewClients:
    """A deployment in which node 0 has labelled samples, node 1 has unlabelled ones, and node 2 trains."""

    run: Path
    unlabelled: Path
    labelled: Path
    made: LocalDeployment


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewClients]:
    folder = tmp_path_factory.mktemp("new")
    run = trained(small_settings(method="it-pfl", target="mlp", output=str(folder / "run")))
    digits, unlabelled, labelled = load_dataset("digits"), folder / "unlabelled.npz", folder / "labelled.npz"
    np.savez(unlabelled, images=np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8))
    np.savez(
        labelled, images=digits.train.images[:30], labels=digits.train.labels[:30],
        test_images=digits.test.images[:20], test_labels=digits.test.labels[:20],
    )  # fmt: skip
    with local_deployment(folder / "fl", 3) as made:
        for number, line in ((0, f'join-data = "npz:{labelled}"'), (1, f'novel-data = "{unlabelled}"')):
            settings = made.nodes[number].folder / "node.toml"
            text = settings.read_text().replace('novel-output = ""', 'novel-output = "mine"')
            settings.write_text(text.replace('novel-data = ""', line))
        made.start()
        yield NewClients(run=run, unlabelled=unlabelled, labelled=labelled, made=made)


def predictions(folder: Path) -> list[list[str]]:
    with (folder / "predictions.csv").open() as file:
        return list(csv.reader(file))


def test_a_novel_node_gets_what_one_in_this_process_gets(new: NewClients, tmp_path: Path) -> None:
    """Node 1 gets the predictions of an in-process run; the other nodes are left alone."""
    code, out, err = finished(new.made.hyperfl("personalize", new.run))
    assert code == 0, err + new.made.nodes[1].log
    result = new.made.nodes[1].folder / "mine"
    eventually((result / "predictions.csv").is_file, "the predictions")
    owner = NovelOwner(data=new.unlabelled, output=tmp_path / "here", device=torch.device("cpu"))
    assert out.splitlines() == [f"novel client 1: {personalize(new.run, owner, {}).served.seen()}"]
    assert predictions(result) == predictions(tmp_path / "here")


def test_a_node_that_joins_gets_what_one_in_this_process_gets(new: NewClients, tmp_path: Path) -> None:
    """Node 0, client 0 as in this process, gets the same bits; the accuracies stay with it."""
    words = ("--rounds", 1, "--embedding-rate", 1)
    code, out, err = finished(new.made.hyperfl("join", new.run, *words))
    assert code == 0, err + new.made.nodes[0].log
    result = new.made.nodes[0].folder / "mine"
    eventually((result / "model.json").is_file, "the model")
    here = tmp_path / "here"
    joined = join_with_server(new.run, f"npz:{new.labelled}", here, 1, torch.device("cpu"), rate=1.0)
    (line,) = out.splitlines()
    assert line.startswith("novel client 0: ")
    assert "accuracy" not in out + err
    assert joined.served.rounds == 1
    found, expected = (load_file(folder / "model.safetensors") for folder in (result, here))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
