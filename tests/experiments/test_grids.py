"""Grids of a study: every row with each value, validation data only, and the best value in bold."""

import json
import tomllib
from dataclasses import replace

import pytest

from experiments.collect import collect
from experiments.runner import StudyManifest, open_study_folder, run_cells
from experiments.study import load_study
from experiments.tables import latex, markdown
from hyperfl_flwr import ROOT
from hyperfl_flwr.core.errors import RunFailedError

RATES = (0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.3)


def test_a_grid_makes_a_row_for_each_value():
    """A row's name selects all of its values, and no cell uses test data."""
    study = load_study("tuning")
    cells = study.cells(rows=["hyperfl"], columns=["cifar10"])
    assert [cell.row for cell in cells] == [f"hyperfl@{rate}" for rate in RATES]
    assert [cell.config.learning_rate for cell in cells] == list(RATES)
    assert {cell.config.data.validation_fraction for cell in study.cells()} == {0.2}
    assert [cell.row for cell in study.cells(rows=["hyperfl@0.1"], columns=["cifar10"])] == ["hyperfl@0.1"]
    with (ROOT / "experiments" / "studies" / "tuning.toml").open("rb") as file:
        declared = tomllib.load(file)
    assert len(study.cells()) == len(RATES) * len(declared["rows"]) * len(declared["columns"])


def test_a_row_may_change_in_one_column_only():
    """A row's setting for one column overrides its general setting, which other columns keep."""
    study = load_study("ablation")
    row = replace(study.rows[0], settings={"learning-rate": 0.5}, on={"cifar10": {"learning-rate": 0.25}})
    cells = replace(study, rows=[row]).cells(seeds=1)
    assert {cell.column: cell.config.learning_rate for cell in cells} == {"fashion-mnist": 0.5, "cifar10": 0.25}


@pytest.mark.slow
def test_the_best_of_a_grid_is_in_bold_and_what_failed_says_so(tmp_path):
    """One of two rates diverges; numbers are of validation data, a fifth of 60 samples, 12 per client."""
    study, begun = load_study("tuning"), StudyManifest(study="tuning", quick=True, changes={})
    open_study_folder(tmp_path, begun)
    cells = study.cells(quick=True, rows=["fedrep@0.01", "fedrep@0.3"])
    wild = cells[1].config.model_copy(update={"learning_rate": 1e30, "local_epochs": 3})
    with pytest.raises(RunFailedError, match="1 of 2 cells failed"):
        run_cells(
            study, [cells[0], replace(cells[1], config=wild)], tmp_path, 1, lambda cell, problem: None, quick=True
        )
    manifest = json.loads((cells[0].folder(tmp_path) / "manifest.json").read_text())
    counts = manifest["label_counts"]
    assert [sum(row) for row in counts["train"]] == [48] * 4
    assert [sum(row) for row in counts["test"]] == [12] * 4
    collected = collect(study, begun, tmp_path, mix=True)
    accuracy = 100 * json.loads((cells[0].folder(tmp_path) / "summary.json").read_text())["test_accuracy"]
    assert f"| FedRep, learning-rate 0.01 | **{accuracy:.1f} (1) [" in markdown(collected)
    assert "| FedRep, learning-rate 0.3 | failed |" in markdown(collected)
    assert rf"\textbf{{{accuracy:.1f} (1) [" in latex(collected)
