"""Comparisons of methods: accuracy against bytes, and rounds to a target accuracy."""

import csv
import dataclasses
import itertools
import json
import shutil

import pytest

from experiments.collect import collect
from experiments.figures import attackers
from experiments.figures.accuracy_bytes import LABEL_HEIGHT, draw_panel
from experiments.figures.curves import draw
from experiments.figures.results import new_figure, save_with_numbers
from experiments.records import find_records, read_records, restore
from experiments.study import load_study
from experiments.study_folder import StudyManifest
from experiments.tables import markdown, with_metric
from hyperfl_flwr.core.errors import RunDirectoryError

pytestmark = pytest.mark.slow

ENDS = ("", "_low", "_high")
"""Endings of the names of a number and of the ends of its interval."""


def quick(study):
    return StudyManifest(study=study, quick=True, changes={})


def summary_of(folder, row):
    (path,) = folder.glob(f"{row}/*/seed-0/summary.json")
    return path, json.loads(path.read_text())


def test_accuracies_are_drawn_against_the_bytes_of_both_ways(quick_study, tmp_path):
    """FedPer keeps the classifier and sends less than FedAvg; a run without an aggregate has one accuracy."""
    folder = shutil.copytree(quick_study("personalized"), tmp_path / "study")
    path, fedper = summary_of(folder, "fedper")
    path.write_text(json.dumps(fedper | {"test_accuracy_aggregate": None}))
    (picture,) = draw(load_study("personalized"), quick("personalized"), folder, "accuracy-bytes")
    assert picture.name == "figure-accuracy-bytes.png"
    assert picture.stat().st_size > 10_000
    with picture.with_suffix(".csv").open(newline="") as stream:
        points = {point["row"]: point for point in csv.DictReader(stream)}
    assert points.keys() == {"fedavg", "fedper"}
    for row, point in points.items():
        _, summary = summary_of(folder, row)
        both_ways = summary["bytes_up_per_client_round"] + summary["bytes_down_per_client_round"]
        assert float(point["bytes"]) == both_ways
        assert float(point["test_accuracy"]) == pytest.approx(summary["test_accuracy"])
    assert points["fedper"]["test_accuracy_aggregate"] == ""
    assert float(points["fedavg"]["test_accuracy_aggregate"]) > 0
    assert float(points["fedper"]["bytes"]) < float(points["fedavg"]["bytes"])


def test_numbers_of_points_do_not_cover_each_other():
    """Of methods with the same bytes and accuracies, those on one side are a line apart, in the order of the points."""
    panel = new_figure(8, 4).subplots()
    points = [(number, 1e6, 0.9 + 1e-4 * number) for number in range(1, 13)] + [(13, 0.0, 0.5), (14, 4e6, 0.9)]
    draw_panel(panel, points)
    texts = {int(text.get_text()): text for text in panel.texts}
    assert sorted(texts) == [number for number, *_ in points]
    for side in (1, 2):
        numbers = range(side, 13, 2)
        assert len({texts[number].get_ha() for number in numbers}) == 1
        heights = [texts[number].xyann[1] for number in numbers]
        assert min(after - before for before, after in itertools.pairwise(heights)) >= LABEL_HEIGHT - 1e-9
    low, high = panel.get_ylim()
    assert texts[13].xyann[1] == pytest.approx((0.5 - low) / (high - low))


def test_what_attackers_find_is_drawn_against_the_accuracy_without_an_attack(tmp_path):
    """A point is the strongest attack's result above its control; a row without an accuracy has none."""
    study, records = load_study("what-to-choose"), read_records(find_records("what-to-choose"))
    without = {place: cell for place, cell in records.cells.items() if place[:2] != ("fedrep", "accuracy")}
    restore(study, dataclasses.replace(records, cells=without), tmp_path)
    with pytest.raises(RunDirectoryError, match="by 3 versions of the code: "):
        draw(study, records.study_manifest, tmp_path, "leakage-accuracy")
    (picture,) = draw(study, records.study_manifest, tmp_path, "leakage-accuracy", mix=True)
    assert picture.stat().st_size > 10_000
    with picture.with_suffix(".csv").open(newline="") as stream:
        points = {(point["row"], point["column"]): point for point in csv.DictReader(stream)}
    assert {column for _, column in points} == {"image", "round", "malicious-server", "membership"}
    assert not {"local", "fedrep"} & {row for row, _ in points}
    expected = {"fedavg": "no defence", "fedavg-secure": "secure sums", "fedavg-records": "noise on records",
                "fedavg-clients": "noise on clients", "fedavg-both": "secure sums, noise on clients"}  # fmt: skip
    assert {row: points[row, "image"]["defence"] for row in expected} == expected
    summary = records.cells["fedavg", "image", 0]["summary"]
    assert float(points["fedavg", "image"]["found"]) == pytest.approx(summary["psnr"] - summary["control_psnr"])
    members = records.cells["fedavg", "membership", 0]["summary"]
    assert members["server_lira_auc_low"] > members["server_loss_auc_low"]
    above = members["server_lira_auc"] - members["server_control_auc"]
    assert float(points["fedavg", "membership"]["found"]) == pytest.approx(above)
    accuracy = records.cells["fedavg", "accuracy", 0]["summary"]["test_accuracy"]
    assert float(points["fedavg", "image"]["accuracy"]) == pytest.approx(accuracy)


def test_leakage_needs_rows_with_an_accuracy_and_an_attack(quick_study):
    with pytest.raises(RunDirectoryError, match=r"no row in .* has finished both the column accuracy and one of ima"):
        draw(load_study("personalized"), quick("personalized"), quick_study("personalized"), "leakage-accuracy")


def test_cells_of_changed_data_have_no_common_table(quick_study, tmp_path):
    """The user's data file may be written anew between two runs of a command; its hash is in each run's manifest."""
    study, begun = load_study("priv-hfl-table-5"), quick("priv-hfl-table-5")
    folder = shutil.copytree(quick_study(study.name), tmp_path / "study")
    for row, sha256 in (("fedavg", "a" * 64), ("fedprox", "b" * 64)):
        path = summary_of(folder, row)[0].with_name("manifest.json")
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps(manifest | {"data": manifest["data"] | {"sha256": sha256}}))
    with pytest.raises(RunDirectoryError, match=r"fedprox.*its data have another SHA-256 than those of fedavg"):
        collect(study, begun, folder)
    assert collect(study, begun, folder, mix=True).entries


def test_a_target_that_was_not_reached_is_in_the_table(quick_study, tmp_path):
    """It is no number of rounds; in a study without a target, the number is missing."""
    study, begun = load_study("priv-hfl-table-5"), quick("priv-hfl-table-5")
    folder = shutil.copytree(quick_study(study.name), tmp_path / "study")
    path, fedprox = summary_of(folder, "fedprox")
    path.write_text(json.dumps(fedprox | {"rounds_to_target_aggregate": None}))
    lines = {line.split(" | ")[0]: line for line in markdown(collect(study, begun, folder)).splitlines()}
    _, fedavg = summary_of(folder, "fedavg")
    assert f"| {fedavg['rounds_to_target_aggregate']:.2f} (1) / 425.33 ± 61.67 |" in lines["| FedAvg"]
    assert lines["| FedProx"].endswith("| not reached (1 of 1) / 391.67 ± 13.33 |")
    path.write_text(json.dumps(fedprox | {"rounds_to_target_aggregate": 40, "rounds_to_target_0.46_aggregate": 31}))
    (line,) = [line for line in markdown(collect(study, begun, folder)).splitlines() if line.startswith("| FedProx")]
    assert "| 31.0 (1) / 143.67 ± 0.33 | 40.0 (1) / 391.67 ± 13.33 |" in line  # two targets of one run
    path.write_text(json.dumps(fedprox | {"rounds_to_target_0.46_aggregate": None}))
    (line,) = [line for line in markdown(collect(study, begun, folder)).splitlines() if line.startswith("| FedProx")]
    assert "| not reached (1 of 1) / 143.67" in line
    assert "rounds_to_target_0.01" in fedprox
    again = path.parent.with_name("seed-1")
    shutil.copytree(path.parent, again)
    manifest = json.loads((again / "manifest.json").read_text())
    manifest["settings"] |= {"seed": 1, "target-accuracy": 0.02}
    (again / "manifest.json").write_text(json.dumps(manifest))
    (again / "summary.json").write_text(json.dumps(fedprox | {"rounds_to_target_aggregate": 1}))
    path.write_text(json.dumps(fedprox | {"rounds_to_target_aggregate": 1}))
    with pytest.raises(RunDirectoryError, match=r"the seeds of fedprox, final have different targets, 0\.01 and 0\.02"):
        collect(study, begun, folder, mix=True)
    shutil.rmtree(again)
    with pytest.raises(RunDirectoryError, match=r"no run has the metric rounds_to_target_0\.9; the keys of"):
        collect(with_metric(study, "rounds_to_target_0.9"), begun, folder)
    other = quick_study("personalized")
    with pytest.raises(
        RunDirectoryError, match="no run has the metric rounds_to_target; run the study with target-accuracy"
    ):
        collect(with_metric(load_study("personalized"), "rounds_to_target"), quick("personalized"), other)


def test_a_number_that_one_row_lacks_leaves_the_table_of_the_others(quick_study, tmp_path):
    """A number that no run has, or that is a text, is refused; a similar name is suggested."""
    study, begun = load_study("personalized"), quick("personalized")
    folder = shutil.copytree(quick_study(study.name), tmp_path / "study")
    path, fedper = summary_of(folder, "fedper")
    path.write_text(json.dumps({name: value for name, value in fedper.items() if name != "peak_memory_mb"}))
    shutil.copytree(path.parent, path.parent.with_name("seed-0-old"))
    table = markdown(collect(with_metric(study, "peak_memory_mb"), begun, folder))
    lines = {line.split(" | ")[0]: line for line in table.splitlines()}
    assert lines["| FedPer"].endswith("| not measured | – | – |")
    assert f"| {summary_of(folder, 'fedavg')[1]['peak_memory_mb']:.1f} (1) |" in lines["| FedAvg"]
    with pytest.raises(RunDirectoryError, match=r"no run has the metric test_acuracy;.*did you mean test_accuracy"):
        collect(with_metric(study, "test_acuracy"), begun, folder)
    with pytest.raises(RunDirectoryError, match="method of fedavg, fashion-mnist is no number: 'fedavg'"):
        collect(with_metric(study, "method"), begun, folder)


def test_each_game_has_its_own_mark_and_interval(tmp_path, monkeypatch):
    """Two seeds and two columns: no two marks are at the same place, and an interval is that of one game."""
    study, records = load_study("property"), read_records(find_records("property"))
    (upload,) = (column for column in study.columns if column.name == "upload")
    study = dataclasses.replace(study, columns=[upload, dataclasses.replace(upload, name="again", run="again")])
    cells, number = {}, "upload_regression_r2"
    for row, column, seed in itertools.product(("fedavg", "fedrep"), ("upload", "again"), (0, 1)):
        cell = records.cells[row, "upload", 0]
        value = 0.125 * len(cells) / 8
        summary = {number: value, f"{number}_low": value - 0.25, f"{number}_high": value + 0.5}
        cells[row, column, seed] = cell | {
            "column": column, "seed": seed, "settings": cell["settings"] | {"seed": seed},
            "summary": cell["summary"] | summary,
        }  # fmt: skip
    assert restore(study, dataclasses.replace(records, cells=cells), tmp_path) == {}
    kept = []
    monkeypatch.setattr(
        attackers,
        "save_with_numbers",
        lambda figure, *others: kept.append(figure) or save_with_numbers(figure, *others),
    )
    (picture,) = draw(study, records.study_manifest, tmp_path, "property")
    with picture.with_suffix(".csv").open(newline="") as stream:
        lines = [line for line in csv.DictReader(stream) if line["attacker"] == "upload"]
    found = {
        (line["row"], line["column"], int(line["seed"])): tuple(float(line[key]) for key in ("r2", "low", "high"))
        for line in lines
        if line["attack"] == "regression"
    }
    assert found == {place: tuple(cell["summary"][number + end] for end in ENDS) for place, cell in cells.items()}
    panel = kept[0].axes[0]
    assert [text.get_text() for text in panel.get_yticklabels()] == [
        f"{label}, {upload.label}" for label in ("FedAvg", "FedRep") for _ in range(2)
    ]
    marks = [mark for container in panel.containers for mark in container[0].get_xydata()]
    places = [round(float(place), 6) for _, place in marks]
    assert len(places) == len(set(places)) == len(lines)
    counted = [sum(abs(place - line) < 0.45 for place in places) for line in range(4)]
    assert counted == [
        sum((line["row"], line["column"]) == of_line for line in lines)
        for of_line in itertools.product(("fedavg", "fedrep"), ("upload", "again"))
    ]
    drawn = [tuple(segment[:, 0]) for segment in panel.containers[0][2][0].get_segments()]
    assert sorted(drawn) == sorted((low, high) for _, low, high in found.values())


def test_the_caption_has_the_rounds_that_were_trained(quick_study, tmp_path):
    """A run may end early; a deviation has as many digits as its mean."""
    study, begun = load_study("personalized"), quick("personalized")
    folder = shutil.copytree(quick_study(study.name), tmp_path / "study")
    path, fedper = summary_of(folder, "fedper")
    path.write_text(json.dumps(fedper | {"rounds": 7}))
    collected = collect(study, begun, folder)
    assert "; after 1 and 7 rounds;" in markdown(collected)
    place = ("fedper", "fashion-mnist")
    for values, text in (([0.448, 0.393], "0.42 ± 0.04 (2)"), ([44.8, 39.3], "42.0 ± 3.9 (2)")):
        entry = dataclasses.replace(collected.entries[place], values=values, scores={}, paper=None)
        changed = dataclasses.replace(collected, entries={**collected.entries, place: entry})
        assert f"| FedPer | {text} |" in markdown(changed)


def test_points_at_one_place_are_refused(quick_study, tmp_path):
    """Two columns of one data set, in both of which the setting has the same value, would be one point."""
    study, begun = load_study("personalized"), quick("personalized")
    folder = shutil.copytree(quick_study(study.name), tmp_path / "study")
    (column,) = folder.glob("fedavg/fashion-mnist")
    shutil.copytree(column, column.with_name("again"))
    kind = "test_accuracy@momentum"
    assert draw(study, begun, folder, kind)
    columns = [study.columns[0], dataclasses.replace(study.columns[0], name="again", run="again")]
    study = dataclasses.replace(study, columns=columns, quick_columns=[])
    with pytest.raises(RunDirectoryError, match=r"several columns of digits have momentum 0\.5: one point would "):
        draw(study, begun, folder, kind)
