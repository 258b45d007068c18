"""Comparisons of methods: accuracy against bytes, and rounds to a target accuracy."""

import csv
import json
import shutil

import pytest

from experiments.collect import collect, with_metric
from experiments.figures.curves import draw
from experiments.runner import StudyManifest
from experiments.study import load_study
from experiments.tables import markdown
from hyperfl_flwr.core.errors import RunDirectoryError

pytestmark = pytest.mark.slow


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
    other = quick_study("personalized")
    with pytest.raises(RunDirectoryError, match="has no rounds_to_target"):
        collect(with_metric(load_study("personalized"), "rounds_to_target"), quick("personalized"), other)
