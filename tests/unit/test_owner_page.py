"""The page of a node's owner: results of single classes, which no message has, and what left the node."""

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from federations import Call
from flwr.app import Message, RecordDict
from html_pages import Page

from hyperfl_flwr.app import round_line as round_line_module
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.round_line import round_line
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.deploy.owner_page import ClientPart
from hyperfl_flwr.flower.log import FLOWER_LOGGER
from hyperfl_flwr.node.evaluations import FILE, MOST, Evaluation, Evaluations
from hyperfl_flwr.node.private_state import client_folders
from hyperfl_flwr.protocol.messages import CLIENTS, CONFIG, Failure, Report, Request
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics, settings_of
from hyperfl_flwr.server.in_process_grid import InProcessGrid


def owned(**node: Scalar) -> Callable[[int, Settings], InProcessGrid]:
    """Return a factory of grids whose nodes belong to data owners, as SuperNodes do, and have this node config."""
    return lambda num_nodes, settings: InProcessGrid(app, num_nodes, settings, node)


def evaluation(number: int, kind: str = "personalized", auc: float = 0.5) -> Evaluation:
    return Evaluation(
        round=number, kind=kind, samples=4, loss=1.0, score=0.5, interval=(0.15, 0.85),
        scores={"balanced_accuracy": 0.5, "macro_f1": 0.5, "auc": auc, "majority_share": 0.5},
    )  # fmt: skip


@pytest.fixture
def states(federate: Federate, tmp_path: Path) -> tuple[Path, Path]:
    """Return the folder of a run of HyperFL with five clients, and the state-dir of the node that hosts them."""
    states = tmp_path / "states"
    run = federate("hyperfl", 1, grid=owned(**{"state-dir": str(states)}))
    return run, states


def test_the_page_has_what_stays_on_the_node(states: tuple[Path, Path], call: Call) -> None:
    """Accuracies are the recorded ones; the samples of each class are those of the client's test data."""
    run, folder = states
    code, out, err = call("report", folder)
    assert (code, err) == (0, "")
    file = folder / read_manifest(run)["experiment"] / "report.html"
    assert out == f"{file}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    page = Page(text)
    assert page.headings[1:] == [
        *(f"Client {client}" for client in range(5)),
        "What left the node",
        "Differential privacy",
    ]
    assert page.sources == []
    last = [row for row in read_metrics(run) if (row["kind"], row["round"]) == ("client", 2)]
    for row in last:
        assert f'<dd class="value">{100 * row["personalized_accuracy"]:.2f} %</dd>' in text
    data = load_federated_data(RunConfig.from_flat(settings_of(run)).data_settings())
    counts = data.label_counts()[1]
    for client, place in enumerate(client_folders(folder / read_manifest(run)["experiment"])):
        found = Evaluations.read(place)
        assert found is not None
        assert (found.client, found.method) == (client, "hyperfl")
        for cells in found.confusion.values():
            true, _, numbers = np.transpose(cells)
            assert np.bincount(true, numbers, minlength=10).tolist() == counts[client].tolist()
        right = sum(number for true, predicted, number in found.confusion["personalized"] if true == predicted)
        assert right / counts[client].sum() == last[client]["personalized_accuracy"]
        steps = [(entry.round, entry.kind) for entry in found.entries]
        assert sorted(steps) == [
            (0, "aggregate"),
            (1, "aggregate"),
            (1, "personalized"),
            (2, "aggregate"),
            (2, "personalized"),
        ]
    assert "hypernetwork (parameters)" in page.rows
    assert "never leave the node: classifier, embedding" in " ".join(text.split())


def test_a_sample_without_a_predicted_class_is_of_no_class() -> None:
    """It counts as wrong, and is no row or column of the confusion table."""
    kept = Evaluations(client=0, experiment="e", method="m", dataset="d", classes=("a", "b"))
    part = ClientPart.of(kept.added(evaluation(1), [[0, -1, 3], [0, 0, 1], [1, 0, 2]]))
    assert part.outputs == [("a", "4", "25.00 %", "no class (3)"), ("b", "2", "0.00 %", "a (2)")]
    assert part.confusion_headers == ["true class", "a", "b"]


def test_single_classes_are_in_no_message(states: tuple[Path, Path]) -> None:
    """Each client sends its scores, the share of its most common class, and its number of test samples."""
    run, _ = states
    row = next(row for row in read_metrics(run) if row["kind"] == "client")
    scores = {f"personalized_{name}" for name in ("accuracy", "loss", "balanced_accuracy", "macro_f1", "auc")}
    assert scores <= set(row)
    assert {"majority_share", "test_examples"} <= set(row)
    assert not any(isinstance(value, list | dict) for value in row.values())


def test_a_resumed_run_repeats_rounds() -> None:
    """Nothing is lost; the curve has the last evaluation of each round, and `newest` the last one of all."""
    kept = Evaluations(client=0, experiment="e", method="m", dataset="d", classes=("a", "b"))
    for number in (1, 2, 3):
        kept = kept.added(evaluation(number), [[0, 0, number]])
    again = kept.added(replace(evaluation(2), score=0.75), [[0, 1, 9]])
    assert [each.round for each in again.entries] == [1, 2, 3, 2]
    assert again.curve("personalized") == {1: 0.5, 2: 0.75, 3: 0.5}
    assert again.newest("personalized") == again.entries[-1]
    assert again.confusion == {"personalized": [[0, 1, 9]]}


def test_the_file_does_not_grow_for_ever() -> None:
    kept = Evaluations(
        client=0, experiment="e", method="m", dataset="d", classes=("a", "b"), entries=[evaluation(1)] * MOST
    )
    assert len(kept.added(evaluation(2), []).entries) == MOST


def test_an_unreadable_file_does_not_stop_training(
    federate: Federate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is damaged after the first evaluation, set aside at the second, and a new one goes on from there."""
    write, damaged = Evaluations.write, []

    def damage_first(self: Evaluations, folder: Path) -> None:
        write(self, folder)
        if folder not in damaged:
            (folder / FILE).write_text("nothing")
            damaged.append(folder)

    monkeypatch.setattr(Evaluations, "write", damage_first)
    run = federate("fedavg", 1, grid=owned(**{"state-dir": str(tmp_path / "states")}))
    assert json.loads((run / "summary.json").read_text())["rounds"] == 2
    assert len(damaged) == 5
    for folder in damaged:
        assert (folder / f"{FILE}.unreadable").read_text() == "nothing"
        found = Evaluations.read(folder)
        assert found is not None
        assert [entry.round for entry in found.entries] == [1, 1, 2, 2]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    kept = Evaluations(client=7, experiment="e", method="m", dataset="d", classes=["a", "b"])
    kept = kept.added(evaluation(1, auc=math.nan), [[0, 0, 1], [0, 1, 2]])
    kept.write(tmp_path / "client-00007")
    found = Evaluations.read(tmp_path / "client-00007")
    assert found is not None
    assert math.isnan(found.entries[0].scores["auc"])
    assert found.confusion == {"personalized": [[0, 0, 1], [0, 1, 2]]}
    assert json.loads((tmp_path / "client-00007" / FILE).read_text())["entries"][0]["auc"] is None
    assert Evaluations.read(tmp_path) is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"entries": [{}]}')
    with pytest.raises(StateError, match=re.escape(f"{tmp_path / FILE} is not a file of evaluations")):
        Evaluations.read(tmp_path)


def test_a_node_without_the_run(states: tuple[Path, Path], call: Call) -> None:
    code, _, err = call("report", states[1], "--run", "ffff")
    assert code == 2
    assert "has no evaluations of the run 'ffff'; it has those of" in err
    code, _, err = call("report", states[0], "--run", "ffff")
    assert code == 2
    assert "--run is for the folder of a node; leave it out" in err


def test_predictions_tell_training_samples(states: tuple[Path, Path], call: Call) -> None:
    """Of a file with all of client 3's samples, the node knows those that its model was trained on."""
    run, folder = states
    data = load_federated_data(RunConfig.from_flat(settings_of(run)).data_settings())
    train, test = data.train_indices(3), data.test_indices(3)
    images = np.concatenate([data.dataset.train.images[train], data.dataset.test.images[test]])
    labels = np.concatenate([data.dataset.train.labels[train], data.dataset.test.labels[test]])
    np.savez("all.npz", images=images, labels=labels)
    code, out, err = call("predict", folder, "--client", "3", "--data", "all.npz", "-o", "node.csv")
    assert code == 0, err
    (row,) = [row for row in read_metrics(run) if (row["kind"], row["round"], row.get("client")) == ("client", 2, 3)]
    first, second = out.splitlines()[:2]
    assert first.startswith(
        f"accuracy {100 * row['personalized_accuracy']:.2f} % of {len(test)} samples (95 % interval "
    )
    known = "of client 3's training samples (those of others are not known here)"
    assert first.endswith(f"), none of them {known}")
    assert f"of {len(train)} samples, all {known}, which says little about others" in second
    assert "most often taken for" in out
    with Path("node.csv").open() as file:
        parts = [line["part"] for line in csv.DictReader(file)]
    assert parts == ["train"] * len(train) + ["other"] * len(test)


def test_what_is_not_defined_is_read_back_and_shown(tmp_path: Path) -> None:
    """The file is strict JSON; a label of no sample, and a target that is not finite, have a dash on the page."""
    rows = {"multi-label": [[0.0, math.nan, 1.0, math.nan]], "regression": [[-math.inf, math.inf, 1.0]]}
    scores = {
        "multi-label": {"balanced_accuracy": 0.5, "macro_f1": math.nan, "auc": math.nan, "majority_share": 1.0},
        "regression": {"rmse": math.inf, "mae": 1.0},
    }
    for task, details in rows.items():
        entry = Evaluation(
            round=1, kind="personalized", samples=4, loss=1.0, score=0.5, interval=None, scores=scores[task]
        )
        kept = Evaluations(client=0, experiment="e", method="fedavg", dataset="x", classes=["a"], task=task)
        kept.added(entry, details).write(tmp_path)

        def refuse(name: str) -> None:
            raise ValueError(name)

        json.loads((tmp_path / "evaluations.json").read_text(), parse_constant=refuse)
        found = Evaluations.read(tmp_path)
        assert found is not None
        (row,) = ClientPart.of(found).outputs
        assert row[0] == "a"
        assert "–" in row
        assert "nan" not in "".join(row)


def test_a_page_without_test_samples_has_no_classes() -> None:
    entry = replace(evaluation(1), samples=0, score=math.nan, interval=None)
    kept = Evaluations(client=0, experiment="e", method="fedavg", dataset="x", classes=["a", "b"])
    assert ClientPart.of(kept.added(entry, [])).outputs == []


def test_the_nodes_log_has_a_line_for_each_round(
    federate: Federate, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are those of the run; a simulated node, which has no owner, writes none."""
    monkeypatch.setattr(FLOWER_LOGGER, "propagate", True)
    with caplog.at_level("INFO"):
        run = federate("fedavg", 1, grid=owned(**{"state-dir": str(tmp_path / "states")}))
    lines = [record.getMessage() for record in caplog.records if ", sends " in record.getMessage()]
    rows = [row for row in read_metrics(run) if row["kind"] == "client" and row["round"] == 2]
    assert [line.partition(":")[0] for line in lines] == ["round 1", "round 2", "round 2"]  # and the last evaluation
    for row in rows:
        shown = f"client {row['client']}: accuracy personalized {100 * row['personalized_accuracy']:.2f} %, received "
        assert shown in lines[1]
    for row in (row for row in read_metrics(run) if row["kind"] == "client-aggregate"):
        assert f"received model {100 * row['aggregate_accuracy']:.2f} %" in lines[row["round"]]
    assert re.search(r"; \d+\.\d s, received \d\.\d{3} MB, sends \d\.\d{3} MB$", lines[1])
    caplog.clear()
    with caplog.at_level("INFO"):
        federate("fedavg", 1)
    assert not [record for record in caplog.records if ", sends " in record.getMessage()]


def test_a_line_counts_failures_and_more_than_ten_clients(tmp_path: Path) -> None:
    twelve = list(range(12))
    request = Request(
        round=3, experiment="e" * 16, run_directory="", clients=twelve, versions=[2] * 12, kept_versions=[2] * 12
    )
    message = Message(RecordDict({CONFIG: request.to_record()}), 1, "train")
    failed = Report(failures=[Failure(client=client, reason="diverged") for client in (1, 11)])
    Evaluations(client=0, experiment="e", method="fedavg", dataset="x", classes=["a"]).added(
        replace(evaluation(3), score=math.nan, samples=0), []
    ).write(tmp_path / "client-00000")
    reply = Message(RecordDict({CLIENTS: failed.to_record()}), reply_to=message)
    line = round_line(tmp_path, message, reply, 1.0)
    assert line.startswith("round 3: client 0: no test samples; client 1: failed; client 2: not evaluated; ")
    assert "client 9: not evaluated; and 2 more clients, 1 of them failed; 1.0 s, received " in line


def test_a_line_that_cannot_be_written_changes_no_reply(
    federate: Federate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise PermissionError

    monkeypatch.setattr(round_line_module, "round_line", fail)
    run = federate("fedavg", 1, grid=owned(**{"state-dir": str(tmp_path / "states")}))
    assert json.loads((run / "summary.json").read_text())["test_accuracy_num_clients"] == 5
