"""Studies: settings are valid, each cell is run once, and tables show what was measured."""

import csv
import json
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.attack_settings import PREFIX
from experiments.collect import collect
from experiments.figures.curves import draw
from experiments.runner import run_cells
from experiments.study import FOLDER, load_study, study_names
from experiments.study_folder import StudyManifest, is_finished, open_study_folder, read_study_manifest, seeds_in
from experiments.study_results import StudyResults
from experiments.table_numbers import comma_separated
from experiments.tables import latex, markdown
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.metrics.intervals import of_crossed_means
from hyperfl_flwr.runs.run_directory import read_manifest

QUICK = StudyManifest(study="table-1", quick=True, changes={})
ROWS = ("fedavg", "hyperfl")


@pytest.mark.parametrize("name", study_names())
@pytest.mark.parametrize("quick", [True, False])
def test_every_cell_of_every_study_has_valid_settings(name, quick):
    """`cells` validates settings; there is one cell per row, column and seed, except missing ones."""
    study = load_study(name)
    cells = study.cells(quick=quick)
    rows = [
        row for row in study.rows if not row.missing and (not quick or row.family in (study.quick_rows or row.family))
    ]
    columns = [
        column for column in study.columns
        if not column.missing and (not quick or column.name in (study.quick_columns or column.name))
    ]  # fmt: skip
    runs = {(row.run, column.run) for row in rows for column in columns if not row.why_missing(column)}
    assert len(cells) == len(runs) * (1 if quick else study.seeds) > 0
    assert len({cell.folder(FOLDER) for cell in cells}) == len(cells)
    settings = default_settings()
    for line in (*study.rows, *study.columns):
        if line.missing:  # it may have settings of a method that is not there yet
            continue
        plain = {key for key in set(line.settings).union(*line.on.values()) if not key.startswith(PREFIX)}
        assert plain <= set(settings), line.name
        assert set(line.on) <= {column.name for column in study.columns}
    plain = {key for key in {**study.settings, **study.quick} if not key.startswith(PREFIX)}
    assert plain <= set(settings)


HYPERFL_STUDIES = (
    "ablation", "audit-defences", "audit-head-gradient", "audit-sums", "audit-table-3", "dual-cost", "figure-4",
    "figure-8", "table-1", "table-4",
)  # fmt: skip
"""Studies that use the rates of HyperFL's paper unless a row has its own."""


@pytest.mark.parametrize("name", study_names())
def test_no_study_leaves_its_learning_rates_to_this_version(name):
    """HyperFL's paper has 0.01 on EMNIST and Fashion-MNIST and 0.02 on CIFAR-10; similar data sets use the same."""
    study = load_study(name)
    own = {row.name for row in study.rows if "learning-rate" in row.settings or row.on}
    for cell in study.cells():
        assert cell.config.learning_rate != "auto"
        if name in HYPERFL_STUDIES and cell.row not in own:
            assert cell.config.learning_rate == (0.02 if cell.config.dataset in ("cifar10", "cinic10") else 0.01)


@pytest.mark.parametrize("name", study_names())
def test_every_number_of_a_paper_has_its_place_and_its_source(name):
    study = load_study(name)
    rows, columns = ({line.name for line in lines} for lines in (study.rows, study.columns))
    for (row, column), expected in study.paper.items():
        assert row in rows
        assert column in columns
        is_computed = study.reference == "the computed number" and expected.source.startswith("computed")
        assert "Table" in expected.source or is_computed
        assert expected.value > 0


def test_numbers_of_table_1():
    """Some of its numbers equal those in the paper."""
    paper = load_study("table-1").paper
    assert len(paper) == 7 * 8
    for row, column, value in (
        ("local", "emnist-20", 73.41), ("fedavg", "cifar10-20", 70.02), ("pfedhn", "fashion-mnist-100", 89.80),
        ("ppsgd", "cinic10-100", 52.91), ("hyperfl", "fashion-mnist-20", 88.28), ("hyperfl", "cifar10-100", 78.73),
    ):  # fmt: skip
        assert paper[row, column].value == value


def test_rows_columns_and_seeds_are_chosen_by_name():
    """A data set's name selects all of its columns; machine settings apply to every run."""
    study = load_study("table-1")
    cells = study.cells(rows=["hyperfl"], columns=["cifar10"], seeds=3, changes={"data-root": "/data"})
    assert [str(cell) for cell in cells] == [
        f"hyperfl, {column}, seed {seed}" for seed in range(3) for column in ("cifar10-20", "cifar10-100")
    ]
    assert {(cell.config.dataset, cell.config.data_root) for cell in cells} == {("cifar10", "/data")}
    assert [cell.config.num_rounds for cell in cells] == [200] * 6
    for wrong, text in (
        ({"rows": ["hyperfi"]}, "no row 'hyperfi'.*did you mean hyperfl"),
        ({"columns": ["x"]}, "no column"),
    ):
        with pytest.raises(ConfigError, match=text):
            study.cells(**wrong)
    for key, value in (("seed", 7), ("method", "local"), ("resume", "/x"), ("dataset", "mnist")):
        with pytest.raises(ConfigError, match=f"{key} cannot be set for all runs"):
            study.cells(changes={key: value})
    with pytest.raises(ConfigError, match="none of the chosen cells can be run; dense: cannot be run: not offered"):
        load_study("dual-cost").cells(rows=["dense"])
    with pytest.raises(ConfigError, match=r"no study 'table-11'.*did you mean table-1"):
        load_study("table-11")


def test_columns_beside_the_papers_say_what_they_are():
    """They have no numbers of the paper; fonts replace EMNIST, with its sizes, and the label says so."""
    study = load_study("table-1")
    columns = {column.name: column for column in study.columns}
    assert not {"chars74k-20", "omniglot-20"} & {column for _, column in study.paper}
    for text in ("Chars74K", "EMNIST's place", "printed", "62 classes"):
        assert text in columns["chars74k-20"].label
    fonts, emnist = ({**columns[name].settings, "dataset": ""} for name in ("chars74k-20", "emnist-20"))
    assert fonts == emnist
    (cell,) = study.cells(rows=["hyperfl"], columns=["omniglot"], seeds=1)
    sizes = (cell.config.data.partition, cell.config.data.train_samples, cell.config.data.test_samples)
    assert (cell.config.num_clients, *sizes) == (20, "natural", "auto", "auto")


def test_a_folder_of_before_a_setting_was_renamed_is_the_same_study(tmp_path):
    changed = StudyManifest(study="table-1", quick=True, changes={"ppsgd.classifier-learning-rate": 0.2})
    open_study_folder(tmp_path, changed)
    file = tmp_path / "study.json"
    file.write_text(file.read_text().replace("ppsgd.classifier-learning-rate", "ppsgd.head-learning-rate"))
    open_study_folder(tmp_path, changed)
    assert read_study_manifest(tmp_path) == changed


def test_a_folder_belongs_to_one_study(tmp_path):
    """It may be continued with the same or other machine settings; other changes are refused."""
    open_study_folder(tmp_path / "a", QUICK)
    open_study_folder(
        tmp_path / "a", StudyManifest(study="table-1", quick=True, changes={"data-root": "/data", "device": "cpu"})
    )
    expected = r"a was created with num-rounds the study's own value instead of 3; choose another --output$"
    with pytest.raises(RunDirectoryError, match=expected):
        open_study_folder(tmp_path / "a", StudyManifest(study="table-1", quick=True, changes={"num-rounds": 3}))
    with pytest.raises(
        RunDirectoryError, match="created with study table-1 instead of ablation, quick True instead of F"
    ):
        open_study_folder(tmp_path / "a", StudyManifest(study="ablation", quick=False, changes={}))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").touch()
    with pytest.raises(RunDirectoryError, match="is neither empty nor a study's folder"):
        open_study_folder(tmp_path / "b", QUICK)
    for command in ("table", "figure"):
        result = CliRunner().invoke(cli, [command, "table-1", "--output", str(tmp_path / "b")])
        assert isinstance(result.exception, RunDirectoryError)
    for damaged in ('{"study": "table', "[]", '{"study": "table-1"}'):
        (tmp_path / "a" / "study.json").write_text(damaged)
        for read in (lambda: read_study_manifest(tmp_path / "a"), lambda: open_study_folder(tmp_path / "a", QUICK)):
            with pytest.raises(RunDirectoryError, match=r"study.json is damaged .*; remove the file and repeat"):
                read()
    (tmp_path / "a" / "study.json").unlink()
    open_study_folder(tmp_path / "a", QUICK)


@pytest.fixture(scope="module")
def finished(quick_study, tmp_path_factory):
    """Return a copy of the quick runs of two rows, with a second seed added, two cells at a time."""
    folder = tmp_path_factory.mktemp("finished") / "table-1"
    others = [row.name for row in load_study("table-1").rows if row.name not in ROWS]
    shutil.copytree(quick_study("table-1"), folder, ignore=shutil.ignore_patterns(*others, "table.*", "*.png"))
    open_study_folder(folder, QUICK)
    study, told = load_study("table-1"), []
    cells = study.cells(quick=True, rows=ROWS, seeds=2)
    run_cells(study, cells, folder, 2, lambda cell, problem: told.append((str(cell), problem)))
    assert sorted(told) == sorted((str(cell), "") for cell in cells)
    return folder


def accuracies(folder, row):
    files = sorted(folder.glob(f"{row}/*/seed-*/summary.json"))
    return [100 * json.loads(file.read_text())["test_accuracy"] for file in files]


@pytest.mark.slow
@pytest.mark.extended
def test_finished_cells_are_skipped_and_broken_ones_resumed(finished):
    """Finished runs are not touched; a run without its end is resumed and gives the same results."""
    study = load_study("table-1")
    cells = study.cells(quick=True, rows=ROWS, seeds=2)
    assert all(is_finished(cell, finished) for cell in cells)
    assert seeds_in(finished) == 2
    broken = cells[0].folder(finished)
    before = (broken / "summary.json").read_text()
    manifest = read_manifest(broken)
    (broken / "manifest.json").write_text(json.dumps(manifest | {"status": "running"}))
    (broken / "summary.json").unlink()
    (broken / "checkpoints" / "round-000002.npz").unlink()
    stamps = {path: path.stat().st_mtime_ns for path in finished.rglob("summary.json")}
    run_cells(study, cells, finished, 1, lambda *_: None)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert len(read_manifest(broken)["resumed"]) == 1
    for name in ("test_accuracy", "test_accuracy_aggregate", "test_accuracy_per_client"):
        assert json.loads((broken / "summary.json").read_text())[name] == json.loads(before)[name]
    other = study.cells(quick=True, rows=ROWS, seeds=1, changes={"num-rounds": 3})[0]
    with pytest.raises(RunDirectoryError, match=r"was run with other settings \(num-rounds 2 instead of 3\)"):
        is_finished(other, finished)


@pytest.mark.slow
def test_tables_hold_our_numbers_and_the_papers(finished):
    """Mean, standard deviation and n are those of the summaries, followed by the paper's number."""
    collected = collect(load_study("table-1"), QUICK, finished)
    entry = collected.entries["hyperfl", "fashion-mnist-20"]
    ours = accuracies(finished, "hyperfl")
    assert list(entry.values) == ours
    assert (entry.mean, entry.deviation) == (statistics.mean(ours), statistics.stdev(ours))
    files = sorted(finished.glob("hyperfl/*/seed-*/summary.json"))
    of_clients = [json.loads(file.read_text())["test_accuracy_per_client"] for file in files]
    low, high = of_crossed_means(100 * np.array(of_clients).mean(0, keepdims=True))
    assert entry.interval == (pytest.approx(low), pytest.approx(high))
    text = f"{entry.mean:.1f} ± {entry.deviation:.1f} (2) [{low:.1f}, {high:.1f}] / 88.28"
    page = markdown(collected)
    assert "digits for Fashion-MNIST, 20" in page
    assert text in page
    assert re.search(r"\| DP-FedAvg \| [^|]*/ 35\.12", page)
    assert "QUICK" in page
    assert text.replace("±", r"$\pm$") in latex(collected)
    rows = list(csv.DictReader(comma_separated(collected).splitlines()))
    (row,) = [row for row in rows if (row["row"], row["column"]) == ("hyperfl", "fashion-mnist-20")]
    assert (float(row["low"]), float(row["high"])) == (pytest.approx(low, rel=1e-5), pytest.approx(high, rel=1e-5))
    assert (float(row["mean"]), row["n"], row["paper"]) == (pytest.approx(entry.mean, rel=1e-5), "2", "88.28")
    results = StudyResults(study=load_study("table-1"), folder=finished)
    assert [path.name for path in results.write_tables()] == ["table.md", "table.csv", "table.tex"]


@pytest.mark.slow
def test_cells_of_two_commits_are_not_mixed_unasked(finished):
    path = load_study("table-1").cells(quick=True, rows=["fedavg"])[0].folder(finished) / "manifest.json"
    before = path.read_text()
    manifest = json.loads(before)
    manifest["code"] |= {"commit": "0" * 40, "dirty": True}
    manifest["settings"]["momentum"] = 0.25
    path.write_text(json.dumps(manifest))
    try:
        with pytest.raises(RunDirectoryError, match=r"momentum 0\.25 instead of 0\.5(.|\n)*by 2 versions"):
            collect(load_study("table-1"), QUICK, finished)
        mixed = collect(load_study("table-1"), QUICK, finished, mix=True).commits
        assert len(mixed) == 2
        assert mixed[0].startswith("0" * 12 + "-dirty")
        with pytest.raises(RunDirectoryError, match=r"momentum 0\.25 instead of 0\.5"):
            draw(load_study("table-1"), QUICK, finished, "train_loss")
        assert draw(load_study("table-1"), QUICK, finished, "train_loss", mix=True)
    finally:
        path.write_text(before)


@pytest.mark.slow
def test_a_figure_is_drawn(finished):
    """The PNG has more than 10 kB; a number that no run has is refused."""
    (picture,) = draw(load_study("table-1"), QUICK, finished, "train_loss")
    assert picture.name == "figure-train-loss.png"
    assert picture.stat().st_size > 10_000
    with pytest.raises(RunDirectoryError, match="has recorded nonsense"):
        draw(load_study("table-1"), QUICK, finished, "nonsense")


@pytest.mark.slow
@pytest.mark.parametrize("name", study_names())
def test_every_study_runs_quickly_and_renders(name, quick_study):
    """Run by the command line, every cell of the quick form has a number in the table."""
    folder = quick_study(name)
    for command in (["table", name], ["figure", name, "--open-private-state"]):
        result = CliRunner().invoke(cli, [*command, "--output", str(folder)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    with (folder / "table.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["n"] == "1"]
    study = load_study(name)
    runs = {(cell.row, cell.column) for cell in study.cells(quick=True)}
    assert {(row["row"], row["column"]) for row in rows} == {
        (row.name, column.name) for row in study.rows for column in study.columns
        if (row.run, column.run) in runs and column.name in (study.quick_columns or column.name)
    }  # fmt: skip
    pictures = [line for line in result.output.split() if line.endswith(".png")]
    assert len(pictures) >= len(load_study(name).figures)
    assert all(Path(picture).is_file() for picture in pictures)
