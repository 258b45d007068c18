"""Sweeps and studies from Python: what is run, what is not run again, and what their results hold."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from federations import Call

import hyperfl_flwr as hyperfl
from experiments.study import load_study
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar

TINY: dict[str, Scalar] = {"data.train-samples": 20, "data.test-samples": 10, "local-epochs": 1, "batch-size": 10}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> hyperfl.StudyResults:
    """Return the results of two methods on three clients, after one round."""
    output = tmp_path_factory.mktemp("sweep")
    rates = np.array([0.1])
    return hyperfl.run_sweep(
        "fedavg, local", grid={"learning-rate": rates}, num_rounds=1, num_clients=3, settings=TINY, output=output,
        jobs=2, progress=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_sweep_has_its_runs_and_numbers(swept: hyperfl.StudyResults) -> None:
    assert list(swept.runs) == [("fedavg@0.1", "digits", 0), ("local@0.1", "digits", 0)]
    summary = swept.runs["fedavg@0.1", "digits", 0].summary
    lines = {(line["row"], line["column"]): line for line in swept.numbers()}
    assert list(lines) == [
        (row, column) for row in ("fedavg@0.1", "local@0.1") for column in ("digits", "digits-aggregate")
    ]
    line = lines["fedavg@0.1", "digits"]
    assert line["mean"] == pytest.approx(100 * summary["test_accuracy"], rel=1e-12)
    assert (line["n"], line["std"], line["paper"]) == (1, None, None)
    assert lines["fedavg@0.1", "digits-aggregate"]["mean"] == pytest.approx(100 * summary["test_accuracy_aggregate"])
    (other,) = {line["mean"] for line in swept.numbers("num_clients") if line["row"] == "local@0.1"}
    assert other == 3
    assert repr(swept) == f"StudyResults('sweep', {str(swept.folder)!r})"


@pytest.mark.slow
def test_tables_hold_the_same_numbers(swept: hyperfl.StudyResults) -> None:
    """The files of `hyperfl table` have six digits; what is not known is empty there, and None here."""
    for against in ("", "local@0.1"):
        paths = {path.suffix: path for path in swept.write_tables(against=against)}
        assert paths[".md"].read_text() == swept.table(against=against)
        with paths[".csv"].open(newline="") as file:
            written = list(csv.DictReader(file))
        for texts, line in zip(written, swept.numbers(against=against), strict=True):
            assert list(texts) == list(line)
            for key, value in line.items():
                if isinstance(value, float):
                    assert float(texts[key]) == pytest.approx(value, rel=1e-5)
                else:
                    assert texts[key] == ("" if value is None else str(value))
    differences = [line["difference"] for line in swept.numbers(against="local@0.1") if line["row"] == "fedavg@0.1"]
    means = {(line["row"], line["column"]): line["mean"] for line in swept.numbers()}
    assert differences == [
        pytest.approx(means["fedavg@0.1", column] - means["local@0.1", column])
        for column in ("digits", "digits-aggregate")
    ]


@pytest.mark.slow
def test_a_figure_is_drawn(swept: hyperfl.StudyResults) -> None:
    pictures = swept.draw("personalized_accuracy")
    assert pictures
    assert all(picture.is_file() and picture.is_relative_to(swept.folder) for picture in pictures)


@pytest.mark.slow
def test_the_command_runs_what_is_not_finished(swept: hyperfl.StudyResults, tmp_path: Path, call: Call) -> None:
    """It prints the table; repeated it runs nothing anew, and its file is a study that can be changed."""
    stamps = {path: path.stat().st_mtime_ns for path in swept.folder.rglob("summary.json")}
    words = ["sweep", "--methods", "fedavg,local", "--grid", "learning-rate=0.1", "--num-rounds", "1", "--jobs", "1"]
    words += ["--num-clients", "3", "--output", str(swept.folder)]
    words += [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    code, table, problem = call(*words)
    assert code == 0, problem
    assert swept.table() in table
    assert "| local, learning-rate 0.1 |" in table
    assert "digits, personalized" in table
    assert {path: path.stat().st_mtime_ns for path in swept.folder.rglob("summary.json")} == stamps
    code, _, problem = call(*words, "--set", "momentum=0.25")
    assert code == 2
    assert "momentum 0.5 instead of 0.25" in problem
    mine = tmp_path / "mine.toml"
    mine.write_text((swept.folder / "sweep.toml").read_text())
    assert next(str(cell) for cell in load_study(str(mine)).cells()) == "fedavg@0.1, digits, seed 0"
    opened = hyperfl.open_study(swept.folder / "sweep.toml", swept.folder)
    assert opened.numbers() == swept.numbers()
    code, _, problem = call("sweep", "--methods", "locall", "--output", tmp_path / "other")
    assert code == 2
    assert "local" in problem
    assert not (tmp_path / "other").exists()


def test_a_study_is_opened_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = hyperfl.open_study("fedgen-mnist", records="fedgen-mnist")
    assert results.folder == tmp_path / "runs" / "studies" / "fedgen-mnist-records"
    known = {place: run.summary["test_accuracy_aggregate"] for place, run in results.runs.items()}
    assert known
    recorded = {(line["row"], line["column"]): line["mean"] for line in results.numbers("test_accuracy_aggregate")}
    for row, column in recorded:
        values = [100 * value for place, value in known.items() if place[:2] == (row, column)]
        assert recorded[row, column] == (pytest.approx(np.mean(values)) if values else None)


def test_a_finished_study_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its cells are restored from records."""
    monkeypatch.setattr("experiments.runner._run_claimed", None)
    line = json.loads((hyperfl.ROOT / "experiments" / "records" / "fedgen-mnist.jsonl").read_text().splitlines()[2])
    results = hyperfl.run_study(
        "fedgen-mnist", rows=line["row"], columns=line["column"], seeds=1, records="fedgen-mnist", output=tmp_path,
        progress=False,
    )  # fmt: skip
    assert (line["row"], line["column"], 0) in results.runs


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: hyperfl.run_study("fedgen-mnits"), r"there is no study 'fedgen-mnits' .*did you mean fedgen-mnist\?"),
        (lambda: hyperfl.run_study("fedgen-mnist", rows="fedavgg"), "there is no row 'fedavgg'; .*did you mean fedavg"),
        (lambda: hyperfl.run_study("fedgen-mnist", seeds=0), "seeds must be at least 1, got 0"),
        (lambda: hyperfl.run_sweep("local", jobs=0), "jobs must be at least 1, got 0"),
        (lambda: hyperfl.run_sweep("local", settings={"dataset": "digits"}), "a sweep takes dataset from --datasets"),
        (lambda: hyperfl.run_sweep("local", ["digits", "digits"]), "the data set digits is given twice"),
        (lambda: hyperfl.run_sweep(["local"], grid={"momentum": [None]}),  # type: ignore[list-item]
          "momentum must be a string, a number or a"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(
    call: Callable[[], object], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        call()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_study_has_no_results(tmp_path: Path) -> None:
    results = hyperfl.open_study("fedgen-mnist", tmp_path)
    for access in (results.numbers, lambda: results.runs):
        with pytest.raises(RunDirectoryError, match=f"{tmp_path} is not a study's folder; run `hyperfl study` first"):
            access()
