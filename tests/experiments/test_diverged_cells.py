"""Cells of which the training has diverged: a result, which records keep and tables name."""

import json
from pathlib import Path

import pytest

from experiments.collect import FAILED, collect
from experiments.number_formats import in_percent
from experiments.page_tables import GridTable, Table
from experiments.recording import record
from experiments.records import read_records, restore, stale_cells
from experiments.runner import StudyManifest, is_finished, open_study_folder, read_study_manifest, task_of
from experiments.study import Study, load_study
from experiments.tables import markdown
from experiments.worker import problem_of
from hyperfl_flwr.protocol.arrays import DIVERGED
from hyperfl_flwr.protocol.update_norms import TOO_LONG

STUDY = """
title = "FedAvg at three rates"
metric = "test_accuracy"
unit = "%"
seeds = 1
num-nodes = 1

[settings]
method = "fedavg"
dataset = "digits"
target = "mlp"
num-clients = 2
num-rounds = 2
local-epochs = 3
data.train-samples = 40
data.test-samples = 20

[grid]
learning-rate = [0.05, 10, 1e30]

[rows.fedavg]
label = "FedAvg"

[columns.digits]
label = "digits"
"""

SOUND, FAR, WILD = "fedavg@0.05", "fedavg@10", "fedavg@1e+30"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    path = tmp_path / "rates.toml"
    path.write_text(STUDY)
    found = load_study(str(path))
    monkeypatch.setattr("experiments.page_tables.load_study", lambda _: found)
    return found


@pytest.fixture
def runs(study: Study, tmp_path: Path) -> Path:
    """Return the study's folder with a run at each rate; the two larger ones have diverged, one of them to NaN."""
    folder = tmp_path / "study"
    open_study_folder(folder, StudyManifest(study=study.name, quick=False, changes={}))
    problems = {cell.row: problem_of(json.loads(task_of(cell, folder, 1)), lambda _: None) for cell in study.cells()}
    assert problems[SOUND] == ""
    assert TOO_LONG in problems[FAR]
    assert DIVERGED in problems[WILD]
    return folder


def test_a_record_has_the_reason_and_a_table_the_word(study: Study, runs: Path, tmp_path: Path) -> None:
    """Restored, the cell has failed as it had before: tables say so, and `hyperfl study` would run it again."""
    file, restored = tmp_path / "records.jsonl", tmp_path / "restored"
    assert [cell.row for cell in record(study, runs, file)] == [SOUND, FAR, WILD]
    records = read_records(file)
    assert stale_cells(study, records) == {}
    assert DIVERGED in records.cells[WILD, "digits", 0]["manifest"]["problem"]
    assert restore(study, records, restored) == {}
    assert [is_finished(cell, restored) for cell in study.cells()] == [True, False, False]
    for folder in (runs, restored):
        collected = collect(study, read_study_manifest(folder), folder)
        assert [collected.entries[row, "digits"].missing for row in (SOUND, FAR, WILD)] == ["", FAILED, FAILED]
        assert markdown(collected).count(f"| {FAILED} |") == 2
    before = file.read_text()
    record(study, restored, file)
    assert file.read_text() == before


def test_the_pages_say_that_it_has_failed(study: Study, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    record(study, runs, file)
    numbers = {"accuracy": ("test_accuracy", in_percent), "ε": ("privacy.epsilon", in_percent)}
    text = "\n".join(Table(records=str(file), column="digits", numbers=numbers).lines())
    assert f"learning-rate 1e+30 | {FAILED} | {FAILED} |" in text
    grid = GridTable(
        records=str(file), column="digits", setting="learning-rate",
        number="test_accuracy", second="test_accuracy_aggregate",
    )  # fmt: skip
    (line,) = [line for line in grid.lines() if line.startswith("| FedAvg")]
    assert line.endswith(f" | {FAILED} | {FAILED} |")
    assert line.startswith("| FedAvg | **")


def test_other_failures_are_no_results(study: Study, runs: Path, tmp_path: Path) -> None:
    """A run without its data, or one that was stopped, says nothing of a method."""
    path = next(cell for cell in study.cells() if cell.row == WILD).folder(runs) / "manifest.json"
    manifest = json.loads(path.read_text())
    for other in ({"problem": "every client failed: no space left on device"}, {"status": "stopped"}):
        path.write_text(json.dumps({**manifest, **other}))
        assert [cell.row for cell in record(study, runs, tmp_path / "records.jsonl")] == [SOUND, FAR]


def test_a_run_that_has_not_diverged_replaces_it(study: Study, runs: Path, tmp_path: Path) -> None:
    """The record of a cell is that of its last run."""
    file = tmp_path / "records.jsonl"
    record(study, runs, file)
    sound, _, wild = (cell.folder(runs) for cell in study.cells())
    for name in ("summary.json", "metrics.jsonl"):
        (wild / name).write_bytes((sound / name).read_bytes())
    manifest = json.loads((wild / "manifest.json").read_text())
    (wild / "manifest.json").write_text(json.dumps({**manifest, "status": "completed", "problem": ""}))
    record(study, runs, file)
    found = read_records(file).cells[WILD, "digits", 0]
    assert (found["manifest"]["status"], "problem" in found["manifest"]) == ("completed", False)
    assert found["summary"]["test_accuracy"] > 0
