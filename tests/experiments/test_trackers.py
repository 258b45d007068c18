"""MLflow and Weights & Biases receive the numbers of metrics.jsonl, offline, and no numbers twice."""

import importlib.util
import json
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import Call
from waiting import eventually

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.core.errors import ConfigError, InstallationError
from hyperfl_flwr.launch import trackers
from hyperfl_flwr.launch.follow import RunCallbacks
from hyperfl_flwr.launch.trackers import FILE, require_tracker, track_during_run
from hyperfl_flwr.runs.run_directory import read_metrics

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the services' packages
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("mlflow", "wandb"))), reason="needs the packages mlflow-skinny and wandb"
    ),
]

Curves = dict[str, dict[int, float]]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both services write files below the test's folder."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def replayed(run: Path, to: Path, name: str, *, rounds: int, known: Path | None = None) -> list[str]:
    """Follow a run that ends after some rounds, from the lines of a finished one; return the notes."""
    notes: list[str] = []
    to.mkdir()
    shutil.copy(run / "manifest.json", to)
    if known is not None:
        shutil.copy(known / FILE, to)
    lines = list(read_metrics(run))
    observer = RunCallbacks(on_note=notes.append)
    with track_during_run(to, name, observer) as followed:
        for number in range(1, rounds + 1):
            written = [line for line in lines if line["round"] + (line["kind"].endswith("aggregate")) <= number]
            (to / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
            followed.on_round(number, rounds, None)
        if rounds == lines[-1]["round"]:  # with the last evaluation
            shutil.copy(run / "metrics.jsonl", to)
            shutil.copy(run / "summary.json", to)
    return notes


def mlflow_curves(run: Path) -> tuple[Any, Curves]:
    from mlflow import MlflowClient

    client, entry = MlflowClient(), json.loads((run / FILE).read_text())["mlflow"]["id"]
    found = client.get_run(entry)
    histories = {name: client.get_metric_history(entry, name) for name in found.data.metrics}
    assert all(len({each.step for each in history}) == len(history) for history in histories.values())
    return found, {name: {each.step: each.value for each in history} for name, history in histories.items()}


def mlflow_history(run: Path, name: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric in the order in which they were sent; the last one of a step counts."""
    from mlflow import MlflowClient

    entry = json.loads((run / FILE).read_text())["mlflow"]["id"]
    return [(each.step, each.value) for each in MlflowClient().get_metric_history(entry, name)]


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's file, a LevelDB log: blocks of 32 KiB of chunks, each with CRC, length and type."""
    assert content[:4] == b":W&B"
    position, parts = 7, b""
    while position + 7 <= len(content):
        left = 32_768 - position % 32_768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last chunk
            yield parts
            parts = b""


def wandb_curves(run: Path) -> tuple[str, Curves]:
    """Read the file that `wandb sync` would send; W&B's own process may still be writing it when a run has ended."""
    from wandb.proto import wandb_internal_pb2

    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")

    def written() -> "list[wandb_internal_pb2.Record]":
        return [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(file.read_bytes())]

    eventually(lambda: any(record.WhichOneof("record_type") == "exit" for record in written()), f"{file}'s last record")
    records = written()
    found: Curves = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                found.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    config = "".join(str(record.run.config) for record in records if record.WhichOneof("record_type") == "run")
    return config, found


def expected(run: Path, kind: str, name: str) -> dict[int, float]:
    return {row["round"]: row[name] for row in read_metrics(run) if row["kind"] == kind}


def test_mlflow_has_every_round_once_also_of_a_resumed_run(federate: Federate, tmp_path: Path) -> None:
    """The second part repeats the first rounds of the file, and continues the same entry."""
    run = federate("hyperfl", num_rounds=4)
    first, second = tmp_path / "first", tmp_path / "second"
    assert replayed(run, first, "mlflow", rounds=2) == []
    entry, curves = mlflow_curves(first)
    assert entry.info.status == "FAILED"  # it ended without a summary
    assert curves["accuracy/personalized"].keys() == {1, 2}
    assert replayed(run, second, "mlflow", rounds=4, known=first) == []
    again, curves = mlflow_curves(second)
    assert (again.info.run_id, again.info.status) == (entry.info.run_id, "FINISHED")
    assert curves["accuracy/personalized"] == expected(run, "train", "personalized_accuracy")
    assert curves["accuracy/aggregate"] == expected(run, "aggregate", "aggregate_accuracy")
    summary = json.loads((run / "summary.json").read_text())
    assert curves["result/test_accuracy"] == {0: summary["test_accuracy"]}
    assert again.data.params["method"] == "hyperfl"
    assert not set(again.data.params) & trackers.OF_THIS_MACHINE
    assert not any("client 0" in name for name in curves)


def test_the_path_of_ones_own_data_is_not_sent(
    federate: Federate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "patients.npz", images=rng.random((200, 8, 8, 1)), labels=np.tile(np.arange(4), 50))
    run = federate("fedavg", num_rounds=1, dataset=f"npz:{tmp_path / 'patients.npz'}")
    assert replayed(run, tmp_path / "sent", "mlflow", rounds=1) == []
    entry, _ = mlflow_curves(tmp_path / "sent")
    assert entry.data.params["dataset"] == "npz:PATH"
    assert not [value for value in entry.data.params.values() if str(tmp_path) in value]


def test_the_name_of_ones_own_data_is_not_sent(
    federate: Federate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the name of the entry, nor in what W&B finds out by itself: the command's words."""
    rng = np.random.default_rng(0)
    file = tmp_path / "ward7.npz"
    np.savez(file, images=rng.random((200, 8, 8, 1)), labels=np.tile(np.arange(4), 50))
    run, to = federate("fedavg", num_rounds=1, dataset=f"npz:{file}"), tmp_path / "2026-fedavg-ward7-seed0-ab12"
    monkeypatch.setattr(sys, "argv", ["hyperfl", "run", "--dataset", f"npz:{file}"])
    assert replayed(run, to, "wandb", rounds=1) == []
    wandb_curves(to)  # waits for its last record
    (sent,) = to.glob("wandb/offline-run-*/run-*.wandb")
    assert b"2026-fedavg-npz-seed0-ab12" in sent.read_bytes()
    assert b"ward7" not in sent.read_bytes()


def test_wandb_has_every_round(federate: Federate, tmp_path: Path) -> None:
    run = federate("fedavg", num_rounds=3)
    assert replayed(run, tmp_path / "run", "wandb", rounds=3) == []
    config, curves = wandb_curves(tmp_path / "run")
    assert curves["accuracy/personalized"] == pytest.approx(expected(run, "train", "personalized_accuracy"))
    assert curves["accuracy/aggregate"] == pytest.approx(expected(run, "aggregate", "aggregate_accuracy"))
    assert "num-rounds" in config
    assert str(tmp_path / "run-") not in config


DRAWN: dict[str, Any] = {"fraction-train": 0.4, "last-round": "all"}


def with_other_times(run: Path, to: Path) -> Path:
    """Return a copy of a run of which every round took longer, as if it had been repeated."""
    shutil.copytree(run, to)
    lines = [
        {key: value + 1 if "seconds" in key else value for key, value in line.items()} for line in read_metrics(run)
    ]
    (to / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return to


def test_mlflow_gets_a_round_again_that_is_repeated_with_other_clients(federate: Federate, tmp_path: Path) -> None:
    """The last round of a shorter run is of all clients. Its repetition replaces it; a round in other time is none."""
    short, long = (federate("fedavg", num_rounds=number, **DRAWN) for number in (2, 4))
    assert replayed(short, tmp_path / "first", "mlflow", rounds=2) == []
    slower = with_other_times(long, tmp_path / "slower")
    assert replayed(slower, tmp_path / "second", "mlflow", rounds=4, known=tmp_path / "first") == []
    second = tmp_path / "second"
    assert mlflow_history(second, "clients/trained") == [(1, 2), (2, 5), (2, 2), (3, 2), (4, 5)]
    # A global state is evaluated by the clients of the next round.
    assert [step for step, _ in mlflow_history(second, "accuracy/aggregate")] == [0, 1, 2, 1, 2, 3, 4]


def test_an_evaluation_is_not_sent_twice(federate: Federate, tmp_path: Path) -> None:
    """That of the last round is in a finished run's file, and again in that of the run that goes on."""
    short, long = (federate("fedavg", num_rounds=number) for number in (2, 4))
    assert replayed(short, tmp_path / "first", "mlflow", rounds=2) == []
    assert replayed(long, tmp_path / "second", "mlflow", rounds=4, known=tmp_path / "first") == []
    history = mlflow_history(tmp_path / "second", "accuracy/aggregate")
    assert history == list(expected(long, "aggregate", "aggregate_accuracy").items())


def test_wandb_names_rounds_that_it_cannot_replace(federate: Federate, tmp_path: Path) -> None:
    short, long = (federate("fedavg", num_rounds=number, **DRAWN) for number in (2, 3))
    assert replayed(short, tmp_path / "first", "wandb", rounds=2) == []
    (note,) = replayed(long, tmp_path / "second", "wandb", rounds=3, known=tmp_path / "first")
    assert note.startswith("wandb keeps the earlier numbers of these rounds, as its steps cannot go back: 1, 2. The")


def test_an_entry_of_an_earlier_version_is_continued(federate: Federate, tmp_path: Path) -> None:
    """Its tracking.json has the last round only: what was sent is not sent again."""
    run = federate("fedavg", num_rounds=4)
    assert replayed(run, tmp_path / "first", "mlflow", rounds=2) == []
    file = tmp_path / "first" / FILE
    entry = json.loads(file.read_text())["mlflow"]
    file.write_text(json.dumps({"mlflow": {key: entry[key] for key in ("id", "round")}}))
    assert replayed(run, tmp_path / "second", "mlflow", rounds=4, known=tmp_path / "first") == []
    _, curves = mlflow_curves(tmp_path / "second")
    assert curves["accuracy/personalized"] == expected(run, "train", "personalized_accuracy")


def test_a_service_that_fails_stops_nothing(
    federate: Federate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one note, and the run goes on."""

    class Broken:
        def begin(self, *_: object) -> str:
            raise ConnectionError("nobody answers")

    monkeypatch.setitem(trackers.TRACKERS, "mlflow", (Broken, "mlflow", ""))  # type: ignore[arg-type]
    notes = replayed(federate("local"), tmp_path / "run", "mlflow", rounds=2)
    assert notes == ["nothing more is sent to mlflow: ConnectionError: nobody answers"]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="--track must be mlflow or wandb, got 'aim'"):
        require_tracker("aim")
    text = "--track wandb needs the package wandb, which is not installed: python -m pip install 'wandb>=0.19.11,<1'"
    with pytest.raises(InstallationError, match=re.escape(text)):
        require_tracker("wandb", lambda _: None)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Return the command for a small run."""
    settings = {"local-epochs": 1, "data.train-samples": 40, "data.test-samples": 20}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [
        "run",
        "--method",
        "fedavg",
        "--num-clients",
        "2",
        "--num-rounds",
        "1",
        *words,
        "--output",
        str(tmp_path / "r"),
    ]


def test_run_logs_to_a_tracker(arguments: list[str], tmp_path: Path, call: Call) -> None:
    code, _, err = call(*arguments, "--track", "mlflow")
    assert code == 0, err
    entry, curves = mlflow_curves(tmp_path / "r")
    assert entry.info.status == "FINISHED"
    assert curves["accuracy/personalized"].keys() == {1}
    code, _, err = call("run", "--track", "aim")
    assert code == 2
    assert "--track must be mlflow or wandb, got 'aim'" in err
