"""Differences between the rows of a study: the same clients with the same seeds, and their intervals."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from federations import Call

from experiments.collect import OUT_OF_DATE, Collected, collect
from experiments.finished import NO_SCORES
from experiments.paired import pair
from experiments.recording import record
from experiments.records import find_records, read_records, restore
from experiments.runner import task_of
from experiments.study import Study, load_study, parse_study
from experiments.study_folder import StudyManifest, open_study_folder, read_study_manifest
from experiments.table_numbers import comma_separated
from experiments.tables import latex, markdown, with_metric
from experiments.worker import problem_of
from hyperfl_flwr import ROOT
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.metrics.intervals import of_crossed_means
from hyperfl_flwr.results.differences import Difference

TEXT = """
title = "Two rows"
seeds = 2

[settings]
num-clients = 4
num-rounds = 1
local-epochs = 1
dataset = "digits"
data.train-samples = 30
data.test-samples = 20

[rows.local]
method = "local"

[rows.fedavg]
label = "FedAvg"
method = "fedavg"
"""

SHIFTED = """
[rows.shifted]
method = "fedavg"
data.seed = 1
data.iid-fraction = 0.5
"""

COLUMN = "all"


def run(study: Study, folder: Path, rows: list[str], seeds: int) -> None:
    for cell in study.cells(rows=rows, seeds=seeds):
        assert problem_of(json.loads(task_of(cell, folder, study.num_nodes)), lambda note: None) == "", cell


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    file = tmp_path_factory.mktemp("two") / "two.toml"
    file.write_text(TEXT)
    return parse_study(TEXT, file)


@pytest.fixture(scope="module")
def finished(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the study's folder with all cells, and one of a row with other clients that only `SHIFTED` has."""
    folder = tmp_path_factory.mktemp("study") / "two"
    open_study_folder(folder, StudyManifest(study="two", quick=False, changes={}))
    run(study, folder, [], 2)
    run(parse_study(TEXT + SHIFTED, Path("two.toml")), folder, ["shifted"], 1)
    return folder


def collected(study: Study, folder: Path) -> Collected:
    return collect(study, read_study_manifest(folder), folder)


def scores(folder: Path, row: str, metric: str = "test_accuracy") -> np.ndarray:
    """Return the scores of the row's clients in percent, [S, C]."""
    paths = sorted(folder.glob(f"{row}/{COLUMN}/seed-*/summary.json"))
    return 100 * np.array([json.loads(path.read_text())[f"{metric}_per_client"] for path in paths])


def row_of(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("metric", ["test_accuracy", "test_accuracy_aggregate"])
def test_differences_are_of_the_same_clients_and_seeds(study: Study, finished: Path, metric: str) -> None:
    """Mean, interval and counts follow from the lists of summary.json; the list of the aggregate has its mean, too."""
    found = collected(with_metric(study, metric), finished)
    pairing = pair(found, "fedavg")
    differences = scores(finished, "local", metric) - scores(finished, "fedavg", metric)
    low, high = map(float, of_crossed_means(differences))
    of_clients = differences.mean(0)
    counts = f"{(of_clients > 0).sum()}/{(of_clients < 0).sum()} of 4"
    cell = f"{differences.mean():+.1f} [{low:+.1f}, {high:+.1f}], {counts}"
    page = markdown(found, pairing)
    assert row_of(page, "local") == ["local", cell]
    assert row_of(page, "FedAvg") == ["FedAvg", "reference"]
    assert "its 95 % interval over clients and seeds (2)" in page
    assert cell in latex(found, pairing)
    ours, reference = csv.DictReader(comma_separated(found, pairing).splitlines())
    assert float(ours["difference"]) == pytest.approx(differences.mean(), rel=1e-5, abs=1e-9)
    assert (float(ours["low"]), float(ours["high"])) == (pytest.approx(low, rel=1e-5), pytest.approx(high, rel=1e-5))
    assert (ours["clients"], ours["seeds"], reference["missing"]) == ("4", "2", "reference")
    assert found.entries["local", COLUMN].mean - found.entries["fedavg", COLUMN].mean == pytest.approx(
        differences.mean()
    )


def test_only_common_seeds_are_paired(study: Study, finished: Path, tmp_path: Path) -> None:
    """With one seed the interval is over the clients, and the caption says what it does not cover."""
    folder = Path(shutil.copytree(finished, tmp_path / "study"))
    shutil.rmtree(folder / "local" / COLUMN / "seed-1")
    found = collected(study, folder)
    difference = pair(found, "fedavg").differences["local", COLUMN]
    assert difference is not None
    assert difference.seeds == 1
    assert difference.mean == pytest.approx((scores(finished, "local")[0] - scores(finished, "fedavg")[0]).mean())
    assert "over the clients, with one seed: it does not cover other seeds" in markdown(found, pair(found, "fedavg"))
    shutil.rmtree(folder / "local")
    assert (
        row_of(markdown(collected(study, folder), pair(collected(study, folder), "fedavg")), "FedAvg")[1] == "reference"
    )


def test_a_mean_that_is_not_over_all_clients_says_so(study: Study, finished: Path, tmp_path: Path) -> None:
    """A client failed in one of two runs: that row looks better if it was a hard one. The others show nothing."""
    folder = Path(shutil.copytree(finished, tmp_path / "study"))
    summary = json.loads((path := folder / "local" / COLUMN / "seed-1" / "summary.json").read_text())
    path.write_text(json.dumps(summary | {"test_accuracy_num_clients": 3}))
    found = collected(study, folder)
    local, fedavg = (row_of(markdown(found), label)[1] for label in ("local", "FedAvg"))
    assert "(2; 4 of 4 and 3 of 4 clients)" in local
    assert "(2)" in fedavg
    assert "where a mean is not over all clients" in markdown(found)
    lines = csv.DictReader(comma_separated(found).splitlines())
    assert [line["clients"] for line in lines] == ["4 of 4 and 3 of 4", ""]
    other = collected(with_metric(study, "test_accuracy_aggregate"), folder)
    assert "clients" not in "".join(row_of(markdown(other), "local"))
    assert "where a mean is not over all clients" not in markdown(other)


def test_rows_with_other_clients_are_refused(finished: Path) -> None:
    """The error names the settings that differ."""
    found = collected(parse_study(TEXT + SHIFTED, Path("two.toml")), finished)
    with pytest.raises(
        RunDirectoryError, match=r"data\.iid-fraction 0\.2 and 0\.5; data\.seed 0 and 1; choose another"
    ):
        pair(found, "shifted")
    with pytest.raises(ConfigError, match=r"--against must be a row of the study, got 'fedavk'.*did you mean fedavg"):
        pair(found, "fedavk")


def test_seeds_with_other_clients_are_refused(study: Study, finished: Path, tmp_path: Path) -> None:
    """The clients of all seeds are compared, not only the first one's: `--mix` accepts runs of other settings."""
    folder = Path(shutil.copytree(finished, tmp_path / "study"))
    file = folder / "local" / COLUMN / "seed-1" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["settings"]["data.iid-fraction"] = 0.5
    file.write_text(json.dumps(manifest))
    found = collect(study, read_study_manifest(folder), folder, mix=True)
    with pytest.raises(RunDirectoryError, match=r"data\.iid-fraction 0\.2 and 0\.5; choose another"):
        pair(found, "fedavg")


def test_numbers_without_single_clients_have_no_differences(study: Study, finished: Path, tmp_path: Path) -> None:
    """The caption then has no interval, and the reason does not depend on whether the cells were restored."""
    file = tmp_path / "records.jsonl"
    record(study, finished, file)
    restore(study, read_records(file), tmp_path / "restored")
    for folder in (finished, tmp_path / "restored"):
        found = collected(with_metric(study, "test_accuracy_worst"), folder)
        page = markdown(found, pair(found, "fedavg"))
        assert row_of(page, "local") == ["local", NO_SCORES]
        assert "test_accuracy_worst in percentage points; after 1 rounds" in page
        assert "interval" not in page


def test_means_that_differ_by_rounding_are_equal() -> None:
    """Six digits of 43/60 and 41/60, and of 39/60 and 41/60 in another seed, do not add up to a zero."""
    ours = {(0, (0, 0)): 0.716667, (1, (0, 0)): 0.65, (0, (0, 1)): 0.5, (1, (0, 1)): 0.5}
    reference = {(0, (0, 0)): 0.683333, (1, (0, 0)): 0.683333, (0, (0, 1)): 0.5, (1, (0, 1)): 0.483333}
    found = Difference.of(ours, reference)
    assert found is not None
    assert (found.clients, found.better, found.worse) == (2, 1, 0)


def test_numbers_are_in_the_unit_that_the_study_gives(finished: Path) -> None:
    """With `%` they are multiplied by 100, whatever they are; with another unit they are as in summary.json."""
    f1 = [json.loads(path.read_text())["test_macro_f1"] for path in finished.glob(f"fedavg/{COLUMN}/*/summary.json")]
    for metric, unit, factor in (("test_macro_f1", "%", 100), ("test_macro_f1", "", 1), ("test_accuracy", "1", 1)):
        text = f'metric = "{metric}"\nunit = "{unit}"\n{TEXT}'
        found = collected(parse_study(text, Path("two.toml")), finished)
        own = np.mean(f1) if metric == "test_macro_f1" else scores(finished, "fedavg").mean() / 100
        entry = found.entries["fedavg", COLUMN]
        assert entry.mean == pytest.approx(factor * own)
        (line,) = [each for each in csv.DictReader(comma_separated(found).splitlines()) if each["row"] == "fedavg"]
        assert (line["unit"], float(line["mean"])) == (unit, pytest.approx(factor * own, rel=1e-4))
    ours = collected(parse_study(f'metric = "test_accuracy"\nunit = "1"\n{TEXT}', Path("two.toml")), finished)
    low, high = ours.entries["fedavg", COLUMN].interval or (0, 0)
    assert (low + high) / 2 == pytest.approx(scores(finished, "fedavg").mean() / 100)


def test_a_table_of_rows_has_intervals(study: Study, finished: Path) -> None:
    """They are over the clients, of which each has its mean over the seeds; the deviation is over the seeds."""
    page = markdown(collected(study, finished))
    low, high = map(float, of_crossed_means(scores(finished, "fedavg").mean(0, keepdims=True)))
    assert row_of(page, "FedAvg")[1].endswith(f"(2) [{low:.1f}, {high:.1f}]")
    assert "in brackets the 95 % interval of the mean over clients;" in page


def test_an_old_record_has_no_values_of_single_clients(study: Study, finished: Path, tmp_path: Path) -> None:
    """Records keep them with six digits; older ones, without them, show means and say why there is no difference."""
    file = tmp_path / "records.jsonl"
    record(study, finished, file)

    def page_of(file: Path, metric: str) -> str:
        restore(study, read_records(file), tmp_path / file.stem)
        found = collected(with_metric(study, metric), tmp_path / file.stem)
        return markdown(found, pair(found, "fedavg"))

    for metric in ("test_accuracy", "test_accuracy_aggregate"):
        direct = collected(with_metric(study, metric), finished)
        assert page_of(file, metric) == markdown(direct, pair(direct, "fedavg"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line.get("summary", {}).pop("test_accuracy_aggregate_per_client", None)
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(old, "test_accuracy_aggregate")
    assert row_of(page, "local") == ["local", f"{NO_SCORES} in this record"]
    assert page_of(old, "test_accuracy") == page_of(file, "test_accuracy")


def test_table_against_prints_and_writes_the_differences(
    study: Study, finished: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints and writes the differences; a row without a number says that its record is out of date."""
    (tmp_path / "two.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(finished, tmp_path / "study")
    found = collected(study, finished)
    code, text, _ = call("table", "two.toml", "--output", folder, "--against", "fedavg")
    assert (code, text.startswith(markdown(found, pair(found, "fedavg")))) == (0, True)
    assert (folder / "table-against-fedavg.csv").read_text() == comma_separated(found, pair(found, "fedavg"))
    assert {path.name for path in folder.glob("table*")} == {
        f"table-against-fedavg.{end}" for end in ("md", "csv", "tex")
    }
    record(study, finished, tmp_path / "kept.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    for line in lines:
        if line.get("row") == "local" or (line.get("row"), line.get("seed")) == ("fedavg", 1):
            line["golden"][line["row"]] = "0" * 12
    (tmp_path / "kept.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, text, errors = call("table", "two.toml", "--records", "kept.jsonl")
    assert code == 0
    assert row_of(text, "local") == ["local", OUT_OF_DATE]
    assert f" (1; others {OUT_OF_DATE}) [" in row_of(text, "FedAvg")[1]
    assert "local, all, 0: the record is out of date: the golden run of local has other numbers by now" in errors


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs a checkout of the project")
def test_a_difference_of_fewer_seeds_than_others_says_so(tmp_path: Path) -> None:
    """Of `personalized` on CIFAR-10, FedDyn has the reference's two seeds and MOON one."""
    study, records = load_study("personalized"), read_records(find_records("personalized"))
    cells = {place: cell for place, cell in records.cells.items() if place[1] == "cifar10"}
    restore(study, replace(records, cells=cells), tmp_path)
    collected = collect(study, records.study_manifest, tmp_path, mix=True)
    lines = {line.split(" | ")[0]: line for line in markdown(collected, pair(collected, "fedavg")).splitlines()}
    assert "(1 seed), " in lines["| MOON"]
    assert "seed" not in lines["| FedDyn"]
