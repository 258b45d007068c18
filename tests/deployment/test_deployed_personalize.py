"""`hyperfl personalize --deployment`: an untrained SuperNode receives a model, the others do not."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import small_settings, trained
from programs import eventually, finished, local_deployment

from clients.novel.on_demand import NovelOwner
from hyperfl_flwr.results.personalize import personalize

pytestmark = pytest.mark.slow


def predictions(folder: Path) -> list[list[str]]:
    with (folder / "predictions.csv").open() as file:
        return list(csv.reader(file))


def test_a_novel_node_gets_what_one_in_this_process_gets(tmp_path: Path) -> None:
    """Node 1 of 2 is novel and gets the predictions of an in-process run; node 0, which trains, is left alone."""
    run = trained(small_settings(method="it-pfl", target="mlp", output=str(tmp_path / "run")))
    data = tmp_path / "private.npz"
    np.savez(data, images=np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8))
    with local_deployment(tmp_path / "fl", 2) as made:
        settings = made.nodes[1].folder / "node.toml"
        text = settings.read_text().replace('novel-data = ""', f'novel-data = "{data}"')
        settings.write_text(text.replace('novel-output = ""', 'novel-output = "mine"'))
        made.start()
        code, out, err = finished(made.hyperfl("personalize", run))
        assert code == 0, err + made.nodes[1].log
        result = made.nodes[1].folder / "mine"
        eventually((result / "predictions.csv").is_file, "the predictions")
    served = personalize(run, NovelOwner(data=data, output=tmp_path / "here", device=torch.device("cpu")), {}).served
    assert out.splitlines() == [f"novel client 1: {served.seen()}"]
    assert predictions(result) == predictions(tmp_path / "here")
