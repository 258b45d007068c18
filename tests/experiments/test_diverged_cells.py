"""Cells of which the training has diverged: a result, which records keep and tables name."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from experiments.collect import FAILED, collect
from experiments.matrix import WHAT_TO_CHOOSE, Matrix
from experiments.number_formats import in_percent, short
from experiments.recording import record
from experiments.records import find_records, read_records, restore, stale_cells
from experiments.restored import is_restored
from experiments.runner import run_cells, task_of
from experiments.study import Place, Study, load_study, parse_study
from experiments.study_folder import StudyManifest, is_finished, open_study_folder, read_study_manifest
from experiments.tables import markdown
from experiments.worker import problem_of
from hyperfl_flwr.core.errors import DivergedError, RunDirectoryError, RunFailedError
from hyperfl_flwr.launch.settings import check_resume
from hyperfl_flwr.protocol.arrays import DIVERGED
from hyperfl_flwr.protocol.update_norms import TOO_LONG
from hyperfl_flwr.results.compare import compare
from hyperfl_flwr.runs.failures import run_failed
from scripts.page_numbers import value_of
from scripts.page_tables import GridTable, Table

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
    monkeypatch.setattr("scripts.page_tables.load_study", lambda _: found)
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


@pytest.fixture
def file(study: Study, runs: Path, tmp_path: Path) -> Path:
    """Return a file of the records of all three."""
    path = tmp_path / "records.jsonl"
    assert [cell.row for cell in record(study, runs, path)] == [SOUND, FAR, WILD]
    return path


def with_cells(file: Path, cells: Mapping[Place, str]) -> Path:
    """Return a file with the records of some rows in other places."""
    records, lines = read_records(file), file.read_text().splitlines()
    kept = [line for line in lines if "row" not in json.loads(line)]
    for (row, column, seed), source in cells.items():
        found = copy.deepcopy(records.cells[source, "digits", 0])
        rate = float(row.partition("@")[2])
        found["settings"] |= {"seed": seed, "learning-rate": rate}
        kept.append(json.dumps({**found, "row": row, "column": column, "seed": seed}))
    path = file.with_name("changed.jsonl")
    path.write_text("\n".join(kept) + "\n")
    return path


def grid(file: Path) -> str:
    """Return the only line of the table of the rates."""
    table = GridTable(
        records=str(file), column="digits", setting="learning-rate",
        number="test_accuracy", second="test_accuracy_aggregate",
    )  # fmt: skip
    (line,) = [line for line in table.lines() if line.startswith("| FedAvg")]
    return line


def test_a_record_has_the_reason_and_a_table_the_word(study: Study, runs: Path, file: Path, tmp_path: Path) -> None:
    """Restored, the cell has failed as it had before, and the tables of both say so."""
    records, restored = read_records(file), tmp_path / "restored"
    assert stale_cells(study, records) == {}
    assert DIVERGED in records.cells[WILD, "digits", 0]["manifest"]["problem"]
    assert str(tmp_path) not in file.read_text()
    assert restore(study, records, restored) == {}
    assert [is_finished(cell, restored) for cell in study.cells()] == [True, False, False]
    for folder in (runs, restored):
        collected = collect(study, read_study_manifest(folder), folder)
        assert [collected.entries[row, "digits"].missing for row in (SOUND, FAR, WILD)] == ["", FAILED, FAILED]
        assert markdown(collected).count(f"| {FAILED} |") == 2
    before = file.read_text()
    record(study, restored, file)
    assert file.read_text() == before


def test_a_restored_cell_is_run_again(study: Study, file: Path, tmp_path: Path) -> None:
    """The record has nothing to resume from; the run takes its place, and is recorded as a run."""
    restored = tmp_path / "restored"
    restore(study, read_records(file), restored)
    *_, wild = study.cells()
    with pytest.raises(RunFailedError, match=rf"1 of 1 cells failed(.|\n)*{DIVERGED}"):
        run_cells(study, [wild], restored, 1, lambda cell, problem: None, quick=True)
    assert not is_restored(wild.folder(restored))
    assert [cell.row for cell in record(study, restored, tmp_path / "again.jsonl")] == [WILD]


def test_the_pages_say_that_it_has_failed(file: Path) -> None:
    """Also of a study of which all cells have; where they are compared with another row, the reason is the same."""
    numbers = {"accuracy": ("test_accuracy", in_percent), "ε": ("privacy.epsilon", in_percent)}
    text = "\n".join(Table(records=str(file), column="digits", numbers=numbers, against=SOUND).lines())
    assert f"learning-rate 1e+30 | {FAILED} | {FAILED} | {FAILED} |" in text
    assert grid(file).startswith("| FedAvg | **")
    assert grid(file).endswith(f" | {FAILED} | {FAILED} |")
    alone = with_cells(file, {(WILD, "digits", 0): WILD})
    text = "\n".join(Table(records=str(alone), column="digits", numbers=numbers, against=WILD).lines())
    assert f"| {FAILED} | {FAILED} | {FAILED} |" in text


def test_seeds_that_have_failed_are_counted(study: Study, file: Path, tmp_path: Path) -> None:
    """A rate at which one seed fails is not the best of its line, and a number that no run has is not called failed."""
    cells = {(SOUND, "digits", 0): WILD, (SOUND, "digits", 1): SOUND, (FAR, "digits", 0): SOUND}
    changed = with_cells(file, {**cells, (FAR, "digits", 1): SOUND})
    records, places = read_records(changed), [(SOUND, "digits", 0), (SOUND, "digits", 1)]
    assert value_of(records, places, "test_accuracy", in_percent).endswith(" (1 of 2 seeds)")
    assert value_of(records, places, "privacy.epsilon", short) == "none"
    assert grid(changed).count("**") == 2
    assert " (1 of 2 seeds) | **" in grid(changed)
    restore(study, records, tmp_path / "restored")
    shown = markdown(collect(study, read_study_manifest(tmp_path / "restored"), tmp_path / "restored"))
    (line,) = [line for line in shown.splitlines() if line.startswith("| FedAvg, learning-rate 0.05")]
    assert "(1; others failed)" in line
    assert "**" not in line


def test_the_limits_of_failures_belong_to_the_result(file: Path) -> None:
    """With another budget the run would not have failed, and its numbers would be others."""
    changed = parse_study(STUDY.replace("[settings]", "[settings]\nfailure-budget = 1.0"), Path("rates.toml"))
    stale = stale_cells(changed, read_records(file))
    assert set(stale) == {(FAR, "digits", 0), (WILD, "digits", 0)}
    assert stale[WILD, "digits", 0] == "failure-budget 0.25 instead of 1.0"


def test_a_failed_run_of_other_settings_is_refused(runs: Path) -> None:
    changed = parse_study(STUDY.replace("local-epochs = 3", "local-epochs = 2"), Path("rates.toml"))
    with pytest.raises(RunDirectoryError, match=r"fedavg@1e\+30, digits, seed 0: local-epochs 3 instead of 2"):
        collect(changed, read_study_manifest(runs), runs)


def test_other_failures_are_no_results(study: Study, runs: Path, tmp_path: Path) -> None:
    """A run without its data, or one that was stopped, says nothing of a method."""
    path = next(cell for cell in study.cells() if cell.row == WILD).folder(runs) / "manifest.json"
    manifest = json.loads(path.read_text())
    for other in ({"diverged": False}, {"status": "stopped"}):
        path.write_text(json.dumps({**manifest, **other}))
        assert [cell.row for cell in record(study, runs, tmp_path / "records.jsonl")] == [SOUND, FAR]


@pytest.mark.parametrize(
    ("reasons", "diverged"),
    [
        ([DIVERGED, TOO_LONG], True),
        ([DIVERGED, "labels out of range"], False),
        (["labels out of range", DIVERGED], False),
        ([], False),
    ],
)
def test_a_run_has_diverged_if_all_failures_in_training_are_of_that_kind(
    reasons: list[str], diverged: bool, tmp_path: Path
) -> None:
    """Whichever client comes first; failures in evaluation do not count."""
    (tmp_path / "failures").mkdir()
    for client, reason in enumerate(reasons):
        (tmp_path / "failures" / f"round-000001-client-{client:05d}.txt").write_text(f"ValueError: {reason}\n")
    (tmp_path / "failures" / "round-000001-evaluation-client-00009.txt").write_text("no space left\n")
    assert isinstance(run_failed(tmp_path, "too many"), DivergedError) == diverged


def test_a_retry_that_cannot_start_does_not_make_it_a_result_of_this_code(
    study: Study, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wild = next(cell for cell in study.cells() if cell.row == WILD)
    golden = wild.folder(runs) / "golden.json"
    golden.write_text('{"fedavg": "000000000000"}')

    def refused(*_: object, **__: object) -> None:
        raise RunFailedError("node 0 cannot take part: it has no data")

    monkeypatch.setattr("experiments.worker.run", refused)
    assert "cannot take part" in problem_of(json.loads(task_of(wild, runs, 1)), lambda _: None)
    assert golden.read_text() == '{"fedavg": "000000000000"}'


def test_a_run_that_has_not_diverged_replaces_it(study: Study, runs: Path, file: Path) -> None:
    """The record of a cell is that of its last run."""
    sound, _, wild = (cell.folder(runs) for cell in study.cells())
    for name in ("summary.json", "metrics.jsonl"):
        (wild / name).write_bytes((sound / name).read_bytes())
    manifest = json.loads((wild / "manifest.json").read_text())
    ended = {"status": "completed", "problem": "", "diverged": False}
    (wild / "manifest.json").write_text(json.dumps({**manifest, **ended}))
    record(study, runs, file)
    found = read_records(file).cells[WILD, "digits", 0]
    assert (found["manifest"]["status"], "problem" in found["manifest"]) == ("completed", False)
    assert found["summary"]["test_accuracy"] > 0


def test_commands_name_the_reason(study: Study, file: Path, tmp_path: Path) -> None:
    """A restored cell that has failed has no numbers to compare, and no state to resume from."""
    restore(study, read_records(file), tmp_path / "restored")
    sound, _, wild = study.cells()
    path = wild.folder(tmp_path / "restored")
    with pytest.raises(RunDirectoryError, match="restored from the record of a run that has diverged; leave it out"):
        compare([path, sound.folder(tmp_path / "restored")])
    with pytest.raises(RunDirectoryError, match="was restored from a record and has no state to go on from"):
        check_resume(wild.config.model_copy(update={"resume": str(path)}))


def test_the_table_of_many_attacks_has_the_word_too(tmp_path: Path) -> None:
    lines = find_records("what-to-choose").read_text().splitlines()
    number = next(number for number, line in enumerate(lines) if '"row": "fedavg", "column": "accuracy"' in line)
    cell = json.loads(lines[number])
    cell["manifest"] |= {"status": "failed", "diverged": True, "problem": DIVERGED}
    lines[number] = json.dumps({**cell, "summary": {}})
    (tmp_path / "failed.jsonl").write_text("\n".join(lines))
    shown = {"accuracy, %": WHAT_TO_CHOOSE["accuracy, %"]}
    table = Matrix(records=str(tmp_path / "failed.jsonl"), shown=shown).lines()
    assert sum(f" {FAILED} |" in line for line in table) == 1
