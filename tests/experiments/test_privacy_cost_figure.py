"""The figure of what privacy of whole clients costs: its curves, level lines, colours, and what it refuses."""

import csv
import dataclasses
import json

import pytest

from experiments.figures import privacy_cost
from experiments.figures.privacy_cost import draw_privacy_cost
from experiments.records import find_records, read_records, restore
from experiments.study import load_study
from hyperfl_flwr.core.errors import RunDirectoryError


@pytest.fixture
def cost_panels(tmp_path, monkeypatch):
    """Return a function that draws the records of the study `client-privacy`, and returns the figure's panels."""
    study, records = load_study("client-privacy"), read_records(find_records("client-privacy"))
    restore(study, records, tmp_path, with_stale=True)
    figures = []
    monkeypatch.setattr(privacy_cost, "save_with_numbers", lambda figure, *others: figures.append(figure) or [])

    def panels(left_out=()):
        cells = [cell for cell in study.cells(seeds=1) if (cell.row, cell.column) not in left_out]
        found = [cell for cell in cells if (cell.folder(tmp_path) / "summary.json").is_file()]
        privacy_cost.draw_privacy_cost(study, records.study_manifest, found, tmp_path)
        return study, figures[-1], found

    return panels


def test_every_run_without_an_epsilon_is_a_level_line(cost_panels, tmp_path):
    """Those of a little noise have none, and are not that without noise."""
    study, figure, found = cost_panels()
    for panel in figure.axes:
        drawn = {round(float(line.get_ydata()[0]), 6) for line in panel.lines if len(set(line.get_ydata())) == 1}
        column = next(column.name for column in study.columns if column.label == panel.get_title())
        expected = set()
        for cell in found:
            summary = json.loads((cell.folder(tmp_path) / "summary.json").read_text())
            if cell.column == column and summary["privacy"]["epsilon"] is None:
                numbers = ["test_accuracy"] + (["test_accuracy_aggregate"] if cell.config.method != "local" else [])
                expected |= {round(summary[number], 6) for number in numbers}
        assert drawn == expected


def test_a_method_has_one_colour_in_all_panels(cost_panels):
    """Also if another method is missing in some."""
    study, _, found = cost_panels()
    methods = {cell.config.method for cell in found} - {"local"}
    first = min(methods)
    last_column = study.columns[-1].name
    left_out = {(cell.row, cell.column) for cell in found if cell.config.method == first and cell.column == last_column}
    _, figure, _ = cost_panels(left_out)
    colours = {}
    for panel in figure.axes:
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True):
            colours.setdefault(label.rpartition(",")[0], set()).add(line.get_color())
    assert all(len(several) == 1 for several in colours.values())
    assert len(set.union(*colours.values())) == len(colours)


def test_rows_that_differ_in_more_than_the_noise_are_no_curve(tmp_path):
    study, records = load_study("client-privacy"), read_records(find_records("client-privacy"))
    restore(study, records, tmp_path, with_stale=True)
    one, other = cells = study.cells(rows=["fedrep-0.015", "fedrep-0.05"], columns=["n20-r10"])
    (picture,) = draw_privacy_cost(study, records.study_manifest, cells, tmp_path)
    with picture.with_suffix(".csv").open(newline="") as stream:
        assert {line["method"] for line in csv.DictReader(stream)} == {"fedrep"}
    privacy = other.config.privacy.model_copy(update={"clip_norm": 7.0})
    changed = dataclasses.replace(other, config=other.config.model_copy(update={"privacy": privacy}))
    with pytest.raises(RunDirectoryError, match=r"015 and fedrep-0\.05 of fedrep are no .*privacy\.clip-norm; draw"):
        draw_privacy_cost(study, records.study_manifest, [one, changed], tmp_path)
