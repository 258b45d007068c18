"""Novel clients in studies: runs shared by rows and columns, standard errors, divergences and figures."""

import csv
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.cell_settings import differences
from experiments.collect import collect
from experiments.figures import novel_pictures
from experiments.figures.curves import draw
from experiments.figures.novel import curves, divergence_points, nearest_divergence, quintiles
from experiments.study import load_study
from experiments.study_axes import read_lines, with_grid
from experiments.study_file import LineTable
from experiments.study_folder import StudyManifest, open_study_folder
from experiments.table_numbers import comma_separated
from experiments.tables import latex, markdown, with_metric
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.runs.novel_results import NovelRecord, flat_means
from hyperfl_flwr.runs.run_directory import RunDirectory

WAYS = {"fedavg": ("global",), "pfedhn": ("sampled", "ensemble", "nearest"), "it-pfl": ("descriptor",)}
CORRUPTIONS = ("none", "blur", "contrast")
ACCURACIES = {
    (way, corruption): (0.25 + 0.125 * a, 0.5 + 0.03125 * b)
    for a, way in enumerate(way for ways in WAYS.values() for way in ways)
    for b, corruption in enumerate(CORRUPTIONS)
}
"""Accuracies of two novel clients, different for each way and corruption."""


def write_run(path, settings, records, label_counts):
    """Write a run folder, with the run's own writer, with the files that tables and figures read."""
    directory = RunDirectory.create(path)
    code = {"commit": "a" * 40, "dirty": False}
    manifest = {"status": "completed", "problem": "", "settings": settings, "code": code, "resumed": []}
    manifest["experiment"] = "0" * 32
    directory.write_json("manifest.json", manifest | {"label_counts": {"train": label_counts}})
    directory.write_json("novel.json", [record.to_json() for record in records])
    directory.write_json("summary.json", flat_means(records))
    directory.close()


def record(way, client, accuracy, corruption="none", **others):
    costs = {"num_examples": 32, "bytes_down": 1000, "models": 1}
    return NovelRecord(way=way, client=client, corruption=corruption, accuracy=accuracy, **{**costs, **others})


@pytest.fixture
def corrupted(tmp_path):
    """Return the study of Table 3 in its quick form and a folder with its three runs."""
    study, begun = load_study("it-pfl-table-3"), StudyManifest(study="it-pfl-table-3", quick=True, changes={})
    folder = tmp_path / "study"
    open_study_folder(folder, begun)
    cells = study.cells(quick=True)
    assert [str(cell) for cell in cells] == [f"{row}, clean, seed 0" for row in WAYS]  # no cell twice
    for cell in cells:
        records = [
            record(way, 4 + number, accuracy, corruption)
            for way in WAYS[cell.row]
            for corruption in CORRUPTIONS
            for number, accuracy in enumerate(ACCURACIES[way, corruption])
        ]
        write_run(cell.folder(folder), cell.settings, records, [[1, 2]] * 6)
    return study, begun, folder


def test_rows_and_columns_show_numbers_of_one_run(corrupted):
    """Three runs fill five rows and three columns; other columns stay empty.

    One of the paper's numbers gets an error, as all in its Table 1 have.
    """
    study, begun, folder = corrupted
    (key,) = (key for key in study.expected if key[:2] == ("pfedhn-ensemble", "blur"))
    study = replace(study, expected={**study.expected, key: replace(study.expected[key], error=0.04)})
    collected = collect(study, begun, folder)
    rows = {"fedavg": "global", "pfedhn": "sampled", "pfedhn-ensemble": "ensemble", "pfedhn-nearest": "nearest"}
    for row, way in {**rows, "it-pfl": "descriptor"}.items():
        for column, corruption in (("clean", "none"), ("blur", "blur"), ("contrast", "contrast")):
            accuracies, entry = ACCURACIES[way, corruption], collected.entries[row, column]
            assert entry.values == [pytest.approx(50 * sum(accuracies))]
            assert entry.error == pytest.approx(100 * abs(accuracies[0] - accuracies[1]) / 2)  # two numbers
            assert math.isnan(entry.deviation)
        assert not collected.entries[row, "rotation"].values
    mean, sem = 50 * sum(ACCURACIES["ensemble", "blur"]), 50 * abs(np.diff(ACCURACIES["ensemble", "blur"])[0])
    text = f"{mean:.1f} ± {sem:.1f} (1) / 38.00 ± 0.04"
    assert text in markdown(collected)
    assert "± standard error over the novel clients" in markdown(collected)
    assert text.replace("±", r"$\pm$") in latex(collected)
    (line,) = (
        line for line in csv.DictReader(comma_separated(collected).splitlines())
        if (line["row"], line["column"]) == ("pfedhn-ensemble", "blur")
    )  # fmt: skip
    assert (line["metric"], line["unit"], line["n"], line["std"]) == ("novel_ensemble_blur", "%", "1", "")
    assert (float(line["sem"]), float(line["paper_sem"])) == (pytest.approx(sem), 0.04)


def test_several_seeds_have_a_deviation_in_the_place_of_the_error(corrupted):
    """The second seed's accuracies are larger by an eighth."""
    study, begun, folder = corrupted
    for cell in study.cells(quick=True, rows=["it-pfl"], seeds=2)[1:]:
        records = [record("descriptor", 4 + n, each + 0.125) for n, each in enumerate(ACCURACIES["descriptor", "none"])]
        write_run(cell.folder(folder), cell.settings, records, [[1, 2]] * 6)
    entry = collect(study, begun, folder).entries["it-pfl", "clean"]
    assert entry.spread == entry.deviation == pytest.approx(statistics.stdev((0, 12.5)))


def test_another_number_is_shown_by_the_way_of_each_row(corrupted):
    """`{way}` is replaced by each row's way; a number that no run has is refused."""
    study, begun, folder = corrupted
    collected = collect(with_metric(study, "novel_{way}_blur"), begun, folder)
    for row, way in (("pfedhn", "sampled"), ("pfedhn-nearest", "nearest")):
        assert collected.entries[row, "clean"].values == [pytest.approx(50 * sum(ACCURACIES[way, "blur"]))]
    with pytest.raises(RunDirectoryError, match=r"no run has the metric nonsense; the keys of summary.json are "):
        collect(with_metric(study, "nonsense"), begun, folder)


def test_a_row_that_shows_anothers_runs_selects_them():
    """Any of the rows selects the run, whose settings are those of the row that has it."""
    study = load_study("it-pfl-table-1")
    cells = study.cells(rows=["pfedhn-nearest", "pfedhn-ensemble"], columns=["cifar100-0.5"])
    assert [str(cell) for cell in cells] == ["pfedhn, cifar100-0.5, seed 0"]
    assert (cells[0].config.method, cells[0].config.num_clients, cells[0].config.novel.clients) == ("pfedhn", 90, 10)
    assert len(study.cells()) == 3 * 8


def lines_of(tables):
    return read_lines({name: LineTable.model_validate(table) for name, table in tables.items()})


def test_lines_that_show_no_runs_are_refused():
    for wrong in ({"run": "z"}, {"run": "b"}, {"run": "a", "momentum": 0.5}):
        with pytest.raises(ConfigError, match="c must show the runs of a line that has runs"):
            lines_of({"a": {}, "b": {"run": "a"}, "c": wrong})
    rows = with_grid(lines_of({"a": {}, "b": {"run": "a"}}), {"momentum": [0.1, 0.5]})
    assert [(row.name, row.run) for row in rows] == [
        (name, run) for name, run in (("a@0.1", "a@0.1"), ("a@0.5", "a@0.5"), ("b@0.1", "a@0.1"), ("b@0.5", "a@0.5"))
    ]
    assert [row.settings for row in rows] == [{"momentum": 0.1}, {"momentum": 0.5}, {}, {}]


def test_how_novel_clients_are_assessed_belongs_to_a_study():
    """These settings may change when a run is resumed, but must match in a study's cell."""
    (cell,) = load_study("it-pfl-figure-4").cells(quick=True)
    other = {**cell.settings, "novel.epsilons": "none", "device": "cpu"}
    assert differences(cell, {"settings": other}) == ["novel.epsilons 'none' instead of 'none,1,30'"]


def test_divergence_against_scipy_and_by_hand():
    """It is that to the nearest of thirty clients, with one sample added per class; equal counts give 0."""
    rng = np.random.default_rng(0)
    training, novel = rng.integers(0, 40, size=(30, 10)), rng.integers(0, 40, size=10)
    wanted = min(stats.entropy((novel + 1) / (novel + 1).sum(), (row + 1) / (row + 1).sum()) for row in training)
    assert nearest_divergence(novel, training) == pytest.approx(wanted, rel=1e-12)
    assert nearest_divergence([3, 0, 1], [[9, 9, 9], [3, 0, 1]]) == 0
    # (3 + 1) / 6 and 2 / 6 against 1 / 5 and 4 / 5; with the arguments swapped the result differs.
    by_hand = 4 / 6 * math.log(4 / 6 * 5) + 2 / 6 * math.log(2 / 6 * 5 / 4)
    assert nearest_divergence([3, 1], [[0, 3]]) == pytest.approx(by_hand)


def test_fifths_hold_all_points_in_order():
    """Eleven points form groups of 2, 2, 3, 2 and 2; with fewer points than groups some stay empty."""
    points = [(float(x), x / 16) for x in range(11)]
    found = quintiles(points[::-1])
    assert [x for x, _ in found] == [0.5, 2.5, 5, 7.5, 9.5]
    assert [level.mean for _, level in found] == [x / 16 for x, _ in found]
    assert found[2][1].sem == pytest.approx(1 / 16 / math.sqrt(3))
    assert [(x, level.mean, level.sem) for x, level in quintiles([(1.0, 0.5)])] == [(1.0, 0.5, None)]


@pytest.fixture
def far(tmp_path):
    """Return Figure 3's quick form: novel client 4 has a training client's labels, client 5 has other ones."""
    study, begun = load_study("it-pfl-figure-3"), StudyManifest(study="it-pfl-figure-3", quick=True, changes={})
    folder = tmp_path / "study"
    open_study_folder(folder, begun)
    counts = [[8, 0], [7, 1], [6, 2], [8, 0], [7, 1], [0, 8]]
    for place, cell in enumerate(study.cells(quick=True)):
        records = [record(WAYS[cell.row][0], 4, 0.75), record(WAYS[cell.row][0], 5, 0.5 - 0.125 * place)]
        records += [record(WAYS[cell.row][0], 4, 0.0, "blur"), record(WAYS[cell.row][0], 4, 0.0, epsilon=1.0)]
        records += [record(WAYS[cell.row][0], 4, 0.0, samples=1, all_samples=False)]
        write_run(cell.folder(folder), cell.settings, records, counts)
    return study, begun, folder


def test_points_of_figure_3(far):
    """Novel clients are compared with training clients, using only their plain accuracy."""
    study, begun, folder = far
    cell = study.cells(quick=True)[0]
    # Divergence of (1, 9) / 10 from (7, 3) / 10, the nearest client.
    apart = 0.1 * math.log(1 / 7) + 0.9 * math.log(9 / 3)
    assert divergence_points(cell.folder(folder), "global") == {4: (0, 0.75), 5: (pytest.approx(apart), 0.5)}
    assert divergence_points(cell.folder(folder), "sampled") == {}
    (picture,) = draw(study, begun, folder, "novel-divergence")
    assert picture.name == "figure-novel-divergence.png"
    assert picture.stat().st_size > 10_000
    lines = list(csv.reader(picture.with_suffix(".csv").read_text().splitlines()))
    assert lines[0] == ["row", "column", "divergence", "accuracy"]
    assert [(row, float(accuracy)) for row, _, _, accuracy in lines[1:]] == [
        ("fedavg", 0.75), ("fedavg", 0.5), ("pfedhn", 0.75), ("pfedhn", 0.375), ("it-pfl", 0.75), ("it-pfl", 0.25),
    ]  # fmt: skip


def test_a_client_counts_once_however_many_seeds_there_are(far, monkeypatch):
    """Three seeds have the same novel clients: the fifths, and their standard errors, are of means over the seeds."""
    study, begun, folder = far
    counts = [[8, 0], [7, 1], [6, 2], [8, 0], *[[8 - number, number] for number in range(9)]]
    cells = study.cells(quick=True, rows=["fedavg"], seeds=3)
    for cell in cells:
        records = [record("global", 4 + number, 0.25 + number / 16 + cell.config.seed / 32) for number in range(9)]
        shutil.rmtree(cell.folder(folder), ignore_errors=True)
        write_run(cell.folder(folder), cell.settings, records, counts)
    drawn, draw_means = {}, novel_pictures._draw_means

    def draw_and_keep(panel, means, place, label):
        drawn[label] = means
        draw_means(panel, means, place, label)

    monkeypatch.setattr(novel_pictures, "_draw_means", draw_and_keep)
    (picture,) = draw(study, begun, folder, "novel-divergence")
    points = divergence_points(cells[1].folder(folder), "global")  # the seed in the middle has the means
    assert len(points) == 9
    expected = quintiles(list(points.values()))
    assert [level for _, level in drawn["FedAvg"]] == [level for _, level in expected]
    assert [x for x, _ in drawn["FedAvg"]] == pytest.approx([x for x, _ in expected])
    lines = list(csv.DictReader(picture.with_suffix(".csv").read_text().splitlines()))
    assert sum(line["row"] == "fedavg" for line in lines) == 27


def test_curves_of_figure_4(tmp_path):
    """Levels are grouped by samples and epsilon; 30 and 31 samples are both shown as 30 (half to even)."""
    study, begun = load_study("it-pfl-figure-4"), StudyManifest(study="it-pfl-figure-4", quick=True, changes={})
    open_study_folder(tmp_path / "study", begun)
    (cell,) = study.cells(quick=True)
    path: Path = cell.folder(tmp_path / "study")
    records = [
        record("descriptor", client, 0.5 + 0.25 * bonus + 0.125 * (client - 4), samples=samples, epsilon=epsilon,
               all_samples=samples >= 30)
        for client, everything in ((4, 30), (5, 31))
        for samples in (everything, 10)
        for bonus, epsilon in enumerate((1.0, None))
    ]  # fmt: skip
    write_run(path, cell.settings, [*records, record("descriptor", 4, 0.0, "blur", samples=30)], [[1, 2]] * 6)
    found = curves(path, "descriptor")
    assert list(found) == [10, 30]
    for levels in found.values():
        assert {epsilon: (level.mean, level.sem) for epsilon, level in levels.items()} == {
            1.0: (0.5625, pytest.approx(0.0625)), None: (0.8125, pytest.approx(0.0625)),
        }  # fmt: skip
    (picture,) = draw(study, begun, tmp_path / "study", "novel-epsilon")
    lines = [tuple(line.split(",")) for line in picture.with_suffix(".csv").read_text().splitlines()[1:]]
    assert {line[1:5] for line in lines} == {
        ("100", samples, epsilon, mean)
        for samples in ("10", "30") for epsilon, mean in (("1.0", "0.5625"), ("none", "0.8125"))
    }  # fmt: skip
    assert picture.stat().st_size > 10_000
    (path / "novel.json").unlink()
    with pytest.raises(RunDirectoryError, match="no finished cell has assessed novel clients"):
        draw(study, begun, tmp_path / "study", "novel-epsilon")
