"""Nodes with their own image folders: they train together, misfits are left out, and no path leaves a node."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from flwr.common.serde import recorddict_to_proto
from html_pages import Page
from PIL import Image

from hyperfl_flwr.app.client import app
from hyperfl_flwr.audit.record_round import recorded_round
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import Federate, MakeGrid
from hyperfl_flwr.contract.folders import metrics
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import HyperFLError, RunDirectoryError
from hyperfl_flwr.data.federated_data import load_local_data
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.launch.tensorboard import write_event_files
from hyperfl_flwr.results.export import model_of_node, model_of_run
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.figures.plots import run_figure
from hyperfl_flwr.runs.run_directory import read_manifest
from hyperfl_flwr.server.in_process_grid import InProcessGrid

CLASSES = "0,1,2,3,4,5,6,7,8,9"
OWN: dict[str, Any] = {
    "num_clients": 3, "data.classes": CLASSES, "data.train-samples": "auto", "data.test-samples": "auto",
    "min-nodes": 2, "node-timeout": 1.0, "dataset": "mnist", "data-root": "/nowhere",
}  # fmt: skip
"""The run names a data set that does not exist: the nodes have their own."""

HOLDINGS = ("0123", "3456", "6789")
"""Classes of the three owners, who have 40 images each, 8 of them for testing."""


def write_owners_folders(folder: Path) -> list[Path]:
    """Write scikit-learn's digits into the folders of three owners and return these folders."""
    digits = load_dataset("digits").train
    found = []
    for number, labels in enumerate(HOLDINGS):
        found.append(folder / f"owner-{number}" / "patients of Dr. No")
        for label in labels:
            (found[-1] / label).mkdir(parents=True)
            for row in np.flatnonzero(digits.labels == int(label))[number * 10 : number * 10 + 10]:
                Image.fromarray(digits.images[row, 0]).save(found[-1] / label / f"{row}.png")
    return found


class OwnersGrid(InProcessGrid):
    """Nodes of different owners, each with its own `data` setting or image folder; keeps the bytes of all replies."""

    def __init__(self, settings: Settings, data: list[str] | list[Path], states: Path) -> None:
        super().__init__(app, len(data), settings)
        self.said: list[bytes] = []
        for number, (context, named) in enumerate(zip(self._contexts.values(), data, strict=True)):
            context.node_config |= {
                "data": f"folder:{named}" if isinstance(named, Path) else named,
                "device": "cpu", "threads": 1, "state-dir": str(states / str(number)),
            }  # fmt: skip

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if reply.has_error():
            self.said.append(str(reply.error.reason).encode())
        else:
            self.said.append(recorddict_to_proto(reply.content).SerializeToString())
        return reply


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return write_owners_folders(tmp_path / "owners")


def owners(data: list[str] | list[Path], states: Path, made: list[OwnersGrid]) -> MakeGrid:
    def grid(_: int, settings: Settings) -> OwnersGrid:
        made.append(OwnersGrid(settings, data, states))
        return made[-1]

    return grid


@pytest.mark.parametrize("method", ["hyperfl", "fedavg"])
def test_three_owners_train_together(method: str, federate: Federate, folders: list[Path], tmp_path: Path) -> None:
    """Each client trains on 32 images (8 of each of 4 classes); no reply or manifest reveals labels or paths."""
    grids: list[OwnersGrid] = []
    run = federate(method, 3, grid=owners(folders, tmp_path / "states", grids), **OWN)
    rows = [row for row in metrics(run) if row["kind"] == "client" and row["round"] == 2]
    assert [row["client"] for row in rows] == [0, 1, 2]
    assert {row["num_examples"] for row in rows} == {32}
    manifest = read_manifest(run)
    assert "label_counts" not in manifest
    assert manifest["settings"]["dataset"] == "mnist"
    said = b"".join(grids[0].said)
    assert b"patients" not in said
    assert str(tmp_path).encode() not in said
    assert len(list((tmp_path / "states").glob("*/decoded/folder-*"))) == 3


TITLE = "the nodes' own data, 10 classes, 1x8x8"


def test_the_data_set_that_nobody_used_is_named_nowhere(
    federate: Federate, folders: list[Path], tmp_path: Path
) -> None:
    """Page, figure, summary, event files and exports name the nodes' own data; only the manifest has the setting."""
    grid = owners(folders, tmp_path / "states", [])
    run = federate("fedavg", 3, grid=grid, plots=True, **OWN | {"num_rounds": 1})
    assert json.loads((run / "summary.json").read_text())["dataset"] == TITLE
    assert read_manifest(run)["data"] == {
        "source": "nodes", "title": TITLE, "num_classes": 10, "input_shape": [1, 8, 8],
        "classes": CLASSES.split(","), "are_files": True, "sha256": "", "columns": "",
    }  # fmt: skip
    page = Page(write_report(run).read_text())
    assert page.title == f"fedavg on {TITLE}"
    assert page.rows["dataset"] == [TITLE, "digits"]
    assert run_figure(run).get_suptitle() == f"fedavg on {TITLE}, 3 clients"
    assert TITLE.encode() in b"".join(path.read_bytes() for path in write_event_files(run).iterdir())
    others = [path for path in run.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert not [path for path in others if b"mnist" in path.read_bytes()]
    exported = model_of_run(run, None)
    assert exported.about()["dataset"] == TITLE
    assert (exported.recipe.input_shape, exported.recipe.mean, exported.recipe.std) == ((1, 8, 8), (0.5,), (0.5,))
    assert model_of_node(tmp_path / "states" / "0", 0).about()["dataset"] == "folder patients of Dr. No"


def test_named_data_sets_of_the_owners_choice(federate: Federate, tmp_path: Path) -> None:
    """Three owners choose digits; a fourth uses the run's data set, which is digits in one run and MNIST in others.

    Otherwise the server does not learn which data set was chosen or how it is normalised.
    """
    names = ["digits", "digits", "digits", ""]
    named = {"num_clients": 4, "min-nodes": 4, "node-timeout": 1.0, "num_rounds": 1}
    grids: list[OwnersGrid] = []
    make = owners(names, tmp_path / "states", grids)
    run = federate("fedavg", 4, grid=make, **named | {"dataset": "digits"})
    assert json.loads((run / "summary.json").read_text())["dataset"] == "digits"
    assert model_of_run(run, None).about()["dataset"] == "digits"
    run = federate("fedavg", 4, grid=make, **named | {"dataset": "mnist", "data-root": "/nowhere", "min-nodes": 3})
    assert json.loads((run / "summary.json").read_text())["dataset"] == TITLE
    with pytest.raises(RunDirectoryError, match=r"only the nodes know how to .* not given data\.normalisation"):
        model_of_run(run, None)
    assert not any(b"digits" in text for text in grids[1].said)
    changes = {"dataset": "mnist", "data-root": "/nowhere", "min-nodes": 3, "data.normalisation": "0.5/0.5"}
    given = federate("fedavg", 4, grid=make, **named | changes)
    assert model_of_run(given, None).recipe.input_shape == (1, 8, 8)


def test_uploads_of_owners_are_not_held_against_a_data_set_that_they_did_not_have(
    federate: Federate, folders: list[Path], tmp_path: Path
) -> None:
    grid = owners(folders, tmp_path / "states", [])
    watched = {"num_rounds": 1, "audit.clients": "0", "audit.rounds": "1"}
    run = federate("fedavg", 3, grid=grid, **OWN | watched)
    assert list((run / "observations").iterdir())
    with pytest.raises(RunDirectoryError, match="was trained on the nodes' own data, which are not on this machine"):
        recorded_round(run, {})


def test_a_file_of_a_simulation_is_named_without_the_path_to_it(federate: Federate, tmp_path: Path) -> None:
    digits = load_dataset("digits").train
    (tmp_path / "hospital").mkdir()
    np.savez(tmp_path / "hospital" / "wards.npz", images=digits.images[:300], labels=digits.labels[:300] % 4)
    run = federate("fedavg", dataset=f"npz:{tmp_path / 'hospital' / 'wards.npz'}", num_rounds=1)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["dataset"] == "wards.npz, 4 classes, 1x8x8"
    assert model_of_run(run, None).about()["dataset"] == summary["dataset"]
    page = Page(write_report(run).read_text())
    assert page.title == "fedavg on wards.npz, 4 classes, 1x8x8"
    assert page.rows["dataset"][0].startswith(f"npz:{tmp_path}")  # the setting as given, for the user who gave it


def test_one_that_does_not_fit_is_left_out_by_name(federate: Federate, folders: list[Path], tmp_path: Path) -> None:
    """A node with an unknown class folder is refused; the server learns neither which nor how many."""
    (folders[1] / "3").rename(folders[1] / "Mrs. Secret")
    grids: list[OwnersGrid] = []
    run = federate("fedavg", 3, grid=owners(folders, tmp_path / "states", grids), **OWN)
    assert {row["client"] for row in metrics(run) if row["kind"] == "client"} == {0, 2}
    said = b"".join(grids[0].said)
    assert b"some of its class folders are not in data.classes" in said
    assert b"Secret" not in said
    assert b"Secret" not in b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


def test_an_image_that_is_damaged_later_fails_its_client_only(
    federate: Federate, folders: list[Path], tmp_path: Path
) -> None:
    grids: list[OwnersGrid] = []
    make = owners(folders, tmp_path / "states", grids)

    class Damaging(OwnersGrid):
        def answer(self, message: Message) -> Message:
            if message.metadata.message_type == "train":
                (folders[2] / "9" / "broken.png").write_bytes(b"no image")
            return super().answer(message)

    def grid(num_nodes: int, settings: Settings) -> OwnersGrid:
        make(num_nodes, settings)
        grids[0].__class__ = Damaging
        return grids[0]

    federate("fedavg", 3, grid=grid, **OWN | {"num_rounds": 1, "failure-budget": 0.5})
    assert b"DataError, see the node's log" in grids[0].said
    assert not any(b"broken" in text for text in grids[0].said)


def own_settings(make_settings: Callable[..., Settings], folder: Path, **changes: Any) -> RunConfig:
    settings = make_settings("fedavg", **OWN | {"dataset": f"folder:{folder}"} | changes)
    return RunConfig.from_flat(settings)


def test_sizes_per_client_are_upper_limits(make_settings: Callable[..., Settings], folders: list[Path]) -> None:
    data = load_local_data(own_settings(make_settings, folders[0]).data_settings(), 1)
    assert data.partition == "own"
    assert [len(data.train_indices(client)) for client in range(3)] == [0, 32, 0]
    few = {"data.train-samples": 5, "data.test-samples": 100}
    limited = load_local_data(own_settings(make_settings, folders[0], **few).data_settings(), 1)
    assert (len(limited.train_indices(1)), len(limited.test_indices(1))) == (5, 8)
    held = {"data.validation-fraction": 0.25}
    validated = load_local_data(own_settings(make_settings, folders[0], **held).data_settings(), 1)
    assert (len(validated.train_indices(1)), len(validated.test_indices(1))) == (24, 8)
    assert not set(validated.train_indices(1)) & set(validated.test_indices(1))


FEATURES: dict[str, Any] = {
    "num_clients": 2, "data.train-samples": "auto", "data.test-samples": "auto", "min-nodes": 2, "node-timeout": 1.0,
    "dataset": "mnist", "data-root": "/nowhere", "target": "mlp", "dp.epsilon": 8.0,
}  # fmt: skip


def write_features(folder: Path) -> list[str]:
    """Write scikit-learn's digits as the feature vectors of two owners; return their `data` settings."""
    digits = load_dataset("digits").train
    for number in range(2):
        part = slice(number * 80, number * 80 + 80)
        features = digits.images[part].reshape(80, -1).astype(np.float32)
        np.savez(folder / f"owner-{number}.npz", features=features, labels=digits.labels[part])
    return [f"npz:{folder / f'owner-{number}.npz'}" for number in range(2)]


def test_noisy_steps_refuse_statistics_of_the_owners_records(federate: Federate, tmp_path: Path) -> None:
    """One record would move the mean and standard deviation by which all others are normalised."""
    grids: list[OwnersGrid] = []
    make = owners(write_features(tmp_path), tmp_path / "states", grids)
    with pytest.raises(HyperFLError, match=r"data\.normalisation must not be auto where noise protects single records"):
        federate("fedavg", 2, grid=make, **FEATURES)
    for public in ("0/1", ",".join(["0.5"] * 64) + "/" + ",".join(["2"] * 64)):
        run = federate("fedavg", 2, grid=make, **FEATURES, **{"data.normalisation": public})
        assert json.loads((run / "summary.json").read_text())["privacy"]["epsilon"] == 8.0
    federate("fedavg", 2, grid=make, **FEATURES | {"dp.epsilon": 0.0})


def test_one_record_changes_no_other_with_public_numbers(tmp_path: Path) -> None:
    """With the owner's statistics it changes all of them; images are always mapped to [-1, 1]."""
    rng = np.random.default_rng(0)
    for kind, samples in (("features", rng.normal(size=(20, 6))), ("images", rng.random((20, 8, 8)))):
        moved = {}
        for public in ("auto", "0/1"):
            found = []
            for first in (0.0, 1.0):
                changed = np.concatenate([np.full_like(samples[:1], first), samples[1:]])
                held = {kind: changed, "labels": np.arange(20) % 4}
                np.savez(tmp_path / "one.npz", **held, **{f"test_{key}": each[:4] for key, each in held.items()})
                flat = {"dataset": f"npz:{tmp_path / 'one.npz'}", "data.normalisation": public}
                settings = RunConfig.from_flat(default_settings() | flat).data_settings()
                sample_format = replace(settings.sample_format, has_owner=True)
                data = load_local_data(replace(settings, sample_format=sample_format), 0)
                assert data.dataset.own_statistics == (kind == "features" and public == "auto")
                found.append(data.client(0).train_images)
            moved[public] = (found[0] != found[1]).flatten(1).any(1).sum()
        assert moved == {"auto": 20 if kind == "features" else 1, "0/1": 1}
