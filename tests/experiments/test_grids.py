"""Grids of a study: every row with each value, validation data only, and the best value in bold."""

import json
import tomllib
from dataclasses import replace

import pytest

from experiments.collect import Entry, collect
from experiments.records import find_records, read_records, restore
from experiments.runner import run_cells
from experiments.study import load_study
from experiments.study_folder import StudyManifest, open_study_folder
from experiments.tables import latex, markdown, with_metric
from experiments.units import best_of, unit_of
from hyperfl_flwr import ROOT
from hyperfl_flwr.core.errors import ConfigError, RunFailedError

RATES = (0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.3)


def test_a_grid_makes_a_row_for_each_value():
    """A row's name selects all of its values, and no cell uses test data."""
    study = load_study("tuning")
    cells = study.cells(rows=["hyperfl"], columns=["cifar10"])
    assert [cell.row for cell in cells] == [f"hyperfl@{rate}" for rate in RATES]
    assert [cell.config.learning_rate for cell in cells] == list(RATES)
    assert {cell.config.data.validation_fraction for cell in study.cells()} == {0.2}
    assert [cell.row for cell in study.cells(rows=["hyperfl@0.1"], columns=["cifar10"])] == ["hyperfl@0.1"]
    both = study.cells(rows=["fedrep@0.1,hyperfl@0.01 "], columns=["cifar10, fashion-mnist"], seeds=1)
    assert {cell.row for cell in both} == {"fedrep@0.1", "hyperfl@0.01"}
    assert {cell.column for cell in both} == {"cifar10", "fashion-mnist"}
    for wrong, name in (("fedrep,hyperfll", "hyperfll"), (",", ",")):
        with pytest.raises(ConfigError, match=f"there is no row '{name}'; known: "):
            study.cells(rows=[wrong])
    odd = replace(study, rows=[replace(study.rows[0], name="a,b", run="a,b")])
    assert {cell.row for cell in odd.cells(rows=["a,b"])} == {"a,b"}
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
    assert "; on validation data in the place of test data" in markdown(collected)
    assert f"| FedRep, learning-rate 0.01 | **{accuracy:.1f} (1) [" in markdown(collected)
    assert "| FedRep, learning-rate 0.3 | failed |" in markdown(collected)
    assert rf"\textbf{{{accuracy:.1f} (1) [" in latex(collected)


@pytest.mark.parametrize(
    ("metric", "best"),
    [("test_accuracy_aggregate", max), ("seconds_per_round", min), ("test_accuracy_std", None)],
)
def test_the_best_of_a_grid_depends_on_the_number(metric, best, tmp_path):
    """Of a spread none is bold, and the caption does not promise it."""
    study, records = load_study("tuning"), read_records(find_records("tuning"))
    chosen = [place for place in records.cells if place[0].startswith("fedavg@") and place[1] == "digits"]
    cells = {place: records.cells[place] for place in chosen}
    restore(study, replace(records, cells=cells), tmp_path)
    text = markdown(collect(with_metric(study, metric), records.study_manifest, tmp_path, mix=True))
    assert ("the best of each grid in bold" in text) == (best is not None)
    bold = {line.partition(" | ")[0] for line in text.splitlines() if "**" in line}
    if best is None:
        assert not bold
        return
    values = {row: cell["summary"][metric] for (row, *_), cell in cells.items()}
    (best_row,) = [row for row in values if values[row] == best(values.values())]
    assert bold == {f"| FedAvg, learning-rate {best_row.partition('@')[2]}"}


def test_all_that_share_the_best_value_are_in_bold(tmp_path):
    """Two rates of the same accuracy: neither is better than the other."""
    study, records = load_study("tuning"), read_records(find_records("tuning"))
    cells = {place: cell for place, cell in records.cells.items()
             if place[0].startswith("fedavg@") and place[1] == "digits"}  # fmt: skip
    *_, second, first = sorted(cells, key=lambda place: cells[place]["summary"]["test_accuracy"])
    cells[second] = cells[second] | {"summary": cells[first]["summary"]}
    restore(study, replace(records, cells=cells), tmp_path, with_stale=True)
    text = markdown(collect(study, records.study_manifest, tmp_path, mix=True))
    bold = {line.partition(" | ")[0] for line in text.splitlines() if "**" in line}
    assert bold == {f"| FedAvg, learning-rate {row.partition('@')[2]}" for row, *_ in (first, second)}


def test_a_value_with_fewer_seeds_than_others_is_not_the_best(tmp_path):
    """The grid is not finished: all rates but the best one have a second seed."""
    study, records = load_study("tuning"), read_records(find_records("tuning"))
    cells = {place: cell for place, cell in records.cells.items()
             if place[0].startswith("fedavg@") and place[1] == "digits"}  # fmt: skip
    ranked = sorted(cells, key=lambda place: cells[place]["summary"]["test_accuracy"])
    second = {(row, column, 1): cells[row, column, 0] | {"seed": 1} for row, column, _ in ranked[:-1]}
    restore(study, replace(records, cells=cells | second), tmp_path, with_stale=True)
    text = markdown(collect(study, records.study_manifest, tmp_path, mix=True))
    bold = {line.partition(" | ")[0] for line in text.splitlines() if "**" in line}
    assert bold == {f"| FedAvg, learning-rate {ranked[-2][0].partition('@')[2]}"}


def test_which_value_of_a_number_is_the_best():
    highest = (
        "test_accuracy", "test_r2_aggregate", "test_macro_f1", "test_auc", "test_accuracy_worst_decile",
        "global_test_accuracy_aggregate", "best_accuracy", "validation_accuracy", "novel_descriptor", "novel_ft_blur",
    )  # fmt: skip
    lowest = (
        "test_rmse", "test_mae_aggregate", "validation_mse", "rounds_to_target", "rounds_to_target_aggregate",
        "rounds_to_target_0.46",
        "seconds_per_round", "unmask_seconds_per_round", "bytes_on_wire_per_round", "client_state_bytes",
        "peak_memory_mb", "novel_descriptor_bytes_down", "novel_descriptor_models", "train_loss",
    )  # fmt: skip
    neither = (
        "test_accuracy_std", "test_accuracy_sem", "test_accuracy_num_clients", "novel_descriptor_sem", "best_round",
        "psnr", "server_lira_auc", "upload_regression_r2", "attack_seconds", "images_recovered", "backdoor_success",
        "test_majority_share", "saturated", "rounds",
    )  # fmt: skip
    for names, best in ((highest, max), (lowest, min), (neither, None)):
        assert {name: best_of(name) for name in names} == dict.fromkeys(names, best)


def test_units_of_counts():
    """Numbers of clients are no shares, although they have a score in their names."""
    assert [unit_of(f"test_accuracy{part}") for part in ("", "_aggregate", "_num_clients")] == ["%", "%", ""]


def test_an_interval_is_of_all_seeds_of_its_mean():
    """Records of an earlier version lack the numbers of single clients, and a new run beside them has these."""
    scores = {(1, (1, client)): value for client, value in enumerate((69.0, 70.0, 71.0))}
    assert Entry(values=[60.0, 70.0], paper=None, missing="", scores=scores).interval is None
    low, high = Entry(values=[70.0], paper=None, missing="", scores=scores).interval
    assert low < 70 < high


def test_an_interval_is_around_its_mean():
    """Also where a client is in the mean of one seed only, as others were drawn with the next one."""
    scores = {(0, (0, 0)): 60.0, (0, (0, 1)): 70.0, (1, (0, 1)): 71.0, (1, (0, 2)): 95.0}
    entry = Entry(values=[65.0, 83.0], paper=None, missing="", scores=scores)
    low, high = entry.interval
    assert (low + high) / 2 == pytest.approx(entry.mean)
    assert high - low > 10
