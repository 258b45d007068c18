"""TensorBoard's event files contain the values of metrics.jsonl, each step once, also for a resumed run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from federations import Call, small_settings

import hyperfl_flwr.app.server
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.grids import KilledError, KilledGrid, Settings, plain_grid
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.launch.follow import RunCallbacks
from hyperfl_flwr.launch.tensorboard import FOLDER, EventFiles, write_during_run, write_event_files
from hyperfl_flwr.runs.run_directory import read_metrics

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", exc_type=ImportError)

Curves = dict[str, list[tuple[int, float]]]


def curves(folder: Path) -> Curves:
    """Return what TensorBoard shows: tag -> [(step, value)]."""
    shown = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    return {
        name: [(event.step, event.value) for event in shown.Scalars(name)] for name in sorted(shown.Tags()["scalars"])
    }


def recorded(run: Path, kind: str, name: str) -> list[tuple[int, float]]:
    rows = [row for row in read_metrics(run) if row["kind"] == kind]
    return [(row["round"], pytest.approx(row[name], rel=1e-6)) for row in rows]  # events hold float32


def test_every_number_of_a_round_is_shown(federate: Federate) -> None:
    run = federate("hyperfl", num_clients=2)
    shown = curves(write_event_files(run))
    assert shown["accuracy/personalized"] == recorded(run, "train", "personalized_accuracy")
    assert shown["accuracy/aggregate"] == recorded(run, "aggregate", "aggregate_accuracy")
    assert shown["loss/train"] == recorded(run, "train", "train_loss")
    assert shown["bytes/on_wire"] == recorded(run, "train", "bytes_on_wire")
    assert shown["bytes/up_per_client"] == recorded(run, "train", "bytes_up_per_client")
    assert shown["seconds/all"] == recorded(run, "train", "seconds")
    assert shown["clients/trained"] == [(1, 2.0), (2, 2.0)]
    assert shown["clients/failed"] == [(1, 0.0), (2, 0.0)]
    result = json.loads((run / "summary.json").read_text())["test_accuracy"]
    assert shown["result/test_accuracy"] == [(2, pytest.approx(result))]
    assert not any(name.startswith("client ") for name in shown)


def test_clients_have_curves_on_request(federate: Federate) -> None:
    run = federate("local", num_clients=2)
    shown = curves(write_event_files(run, per_client=True))
    rows = [row for row in read_metrics(run) if row["kind"] == "client" and row["client"] == 1]
    expected = [(row["round"], pytest.approx(row["personalized_accuracy"])) for row in rows]
    assert shown["client 00001/personalized_accuracy"] == expected


def test_writing_again_takes_the_place_of_what_was_there(federate: Federate) -> None:
    run = federate("local", num_clients=2)
    first = curves(write_event_files(run, per_client=True))
    second = curves(write_event_files(run))
    assert second == {name: curve for name, curve in first.items() if not name.startswith("client ")}


def test_a_resumed_run_has_each_step_once(make_settings: Callable[..., Settings]) -> None:
    """A run killed in round 4 with a checkpoint of round 2 records round 3, drops it and records it again."""
    settings = make_settings("local", num_rounds=4, checkpoint_every=2) | {"num-clients": 2}
    run = Path(str(settings["output"]))
    files = EventFiles(run)
    files.update()  # the run has written nothing yet
    with pytest.raises(KilledError):
        hyperfl_flwr.app.server.run(KilledGrid(1, settings, in_round=4), RunConfig.from_flat(settings))
    files.update()
    assert [step for step, _ in curves(run / FOLDER)["accuracy/personalized"]] == [1, 2, 3]
    again = settings | {"resume": str(run), "output": ""}
    hyperfl_flwr.app.server.run(plain_grid(1, again), RunConfig.from_flat(again))
    files.finish()
    shown = curves(run / FOLDER)
    assert shown["accuracy/personalized"] == recorded(run, "train", "personalized_accuracy")
    assert [step for step, _ in shown["accuracy/personalized"]] == [1, 2, 3, 4]


def test_files_grow_with_the_run(federate: Federate) -> None:
    """After each round the files are up to date, and the wrapped observer is still called."""
    heard: list[int] = []
    run = federate("local", num_clients=2)
    with write_during_run(run, RunCallbacks(on_round=lambda finished, *_: heard.append(finished))) as observer:
        observer.on_round(2, 2, 0.5)
        assert [step for step, _ in curves(run / FOLDER)["accuracy/personalized"]] == [1, 2]
    assert heard == [2]


def test_tensorboard_prints_the_folder_of_its_files(federate: Federate, call: Call, tmp_path: Path) -> None:
    run = federate("local", num_clients=2)
    assert call("tensorboard", run)[:2] == (0, f"{run / FOLDER}\n")
    code, _, problem = call("tensorboard", tmp_path)
    assert code == 2
    assert "is not a run's folder" in problem


@pytest.mark.slow
def test_along_with_a_simulation(call: Call, tmp_path: Path) -> None:
    """`hyperfl run --tensorboard` writes the curves while the run goes on."""
    run = tmp_path / "run"
    words = [f"--set={key}={json.dumps(value)}" for key, value in small_settings(num_clients=2).items() if value != ""]
    code, _, problem = call(
        "run", "--method", "local", "--output", run, "--engine", "in-process", "--tensorboard", *words
    )
    assert code == 0, problem
    assert curves(run / FOLDER)["accuracy/personalized"] == recorded(run, "train", "personalized_accuracy")


def test_a_run_without_metrics_is_told(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"settings": {}, "experiment": "00"}')
    with pytest.raises(RunDirectoryError, match=r"holds no metrics\.jsonl yet"):
        write_event_files(tmp_path)
