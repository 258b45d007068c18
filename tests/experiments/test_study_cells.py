"""Cells of studies among other runs, and among those of earlier versions."""

import pytest

from experiments.cells import Begun, begin, differences, is_finished, run_cells
from experiments.cores import WAITING, CoreSlots, usable_cores
from experiments.studies import load_study

QUICK = Begun(study="table-1", quick=True, changes={})


@pytest.mark.slow
def test_a_cell_that_waits_for_a_core_says_so(tmp_path):
    """All cores are held until it has said so; then it runs to its end."""
    study, notes = load_study("table-1"), []
    cells = study.cells(quick=True, rows=["local"])
    begin(tmp_path / "study", QUICK)
    with CoreSlots() as slots:
        slots.acquire(len(usable_cores()))

        def on_note(cell, note):
            notes.append((str(cell), note))
            slots.release()

        run_cells(study, cells, tmp_path / "study", 1, lambda cell, problem: None, quick=True, on_note=on_note)
    assert notes == [(str(cells[0]), f"{WAITING} for one")]
    assert is_finished(cells[0], tmp_path / "study")


def test_a_setting_that_an_older_run_did_not_know_counts_as_its_default():
    """The run of an earlier version is still the cell's, unless the cell asks for another value."""
    study = load_study("table-1")
    (cell,) = study.cells(quick=True, rows=["fedavg"])
    older = {key: value for key, value in cell.settings.items() if not key.startswith("privacy.")}
    assert differences(cell, {"settings": older}) == []
    (other,) = study.cells(quick=True, rows=["fedavg"], changes={"privacy.clip-norm": 1.0})
    assert differences(other, {"settings": older}) == ["privacy.clip-norm 0.0 instead of 1.0"]
