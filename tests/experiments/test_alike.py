"""Results that do not belong into one table or figure: of other code, data, weights or settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.alike import require_alike
from experiments.cell_settings import changes_of, differences
from experiments.collect import collect
from experiments.figures.curves import draw
from experiments.golden import fingerprints
from experiments.recording import record
from experiments.runner import run_cells
from experiments.study import FINGERPRINTS, Cell, load_study
from experiments.study_folder import StudyManifest
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.models import provenance
from hyperfl_flwr.runs.run_directory import read_manifest

pytestmark = pytest.mark.slow

STUDY, QUICK = load_study("table-1"), StudyManifest(study="table-1", quick=True, changes={})
CELLS = STUDY.cells(quick=True, rows=["fedavg", "local"])


def change(cell: Cell, folder: Path, **entries: Mapping[str, Any]) -> None:
    """Add to entries of a cell's manifest."""
    file = cell.folder(folder) / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {key: manifest.get(key, {}) | value for key, value in entries.items()}))


def test_cells_that_are_alike_are_accepted(folder: Path) -> None:
    require_alike(CELLS, folder)


@pytest.mark.parametrize("entry", ["data", "model"])
def test_other_data_and_weights_are_refused(entry: str, folder: Path) -> None:
    """Of one column, and of one target network."""
    for number, cell in enumerate(CELLS):
        change(cell, folder, **{entry: {"sha256": str(number) * 64}})
    with pytest.raises(RunDirectoryError, match=f"another SHA-256 than those of {CELLS[0]}; they have changed"):
        require_alike(CELLS, folder)
    change(CELLS[1], folder, **{entry: {"sha256": "0" * 64}})
    require_alike(CELLS, folder)


def test_cells_of_code_with_other_numbers_are_refused_and_named(folder: Path) -> None:
    """As their records are: the golden run of the method has changed since. `hyperfl study` says so, and skips them."""
    (file,) = (cell.folder(folder) / FINGERPRINTS for cell in CELLS if cell.row == "fedavg")
    before = json.loads(file.read_text())
    assert before["fedavg"] == fingerprints({"method": "fedavg"})["fedavg"]
    file.write_text(json.dumps(before | {"fedavg": "0" * 12}))
    with pytest.raises(RunDirectoryError, match="the golden run of fedavg has other numbers by now"):
        collect(STUDY, QUICK, folder)
    with pytest.raises(RunDirectoryError, match="the golden run of fedavg has other numbers by now"):
        draw(STUDY, QUICK, folder, "train_loss")
    assert collect(STUDY, QUICK, folder, mix=True).entries["fedavg", "fashion-mnist-20"].values
    notes: list[str] = []
    run_cells(
        STUDY, CELLS, folder, 1, lambda cell, problem: None, quick=True,
        on_note=lambda cell, note: notes.append(f"{cell.row}: {note}"),
    )  # fmt: skip
    (note,) = notes
    assert note.startswith("fedavg: finished earlier: the golden run of fedavg has other numbers by now; remove")


def test_weights_of_a_named_file_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell with another file is not that run; with `auto` the weights are those of the body's own download."""
    change(CELLS[0], folder, model={"body": "torchvision/resnet18", "sha256": "1" * 64})
    manifest = read_manifest(CELLS[0].folder(folder))
    hashes = {"/one": "1" * 64, "/two": "2" * 64}
    monkeypatch.setattr("experiments.cell_settings.body_hash", lambda target, weights: hashes[weights])
    assert provenance.recorded_body(manifest) == "1" * 64
    for weights, expected in (
        ("auto", []),
        ("/one", []),
        ("/two", ["weights 111111111111 of cnn instead of 222222222222"]),
    ):
        (cell,) = STUDY.cells(quick=True, rows=[CELLS[0].row], changes={"lpm.weights": weights})
        assert differences(cell, manifest) == expected


def test_limits_that_decide_which_replies_count_belong_to_a_run(folder: Path) -> None:
    """A run in which replies were refused has other results than one in which they were not."""
    manifest = read_manifest(CELLS[0].folder(folder))
    for key, value in (("max-update-ratio", 0.25), ("exclusion-rounds", 7)):
        assert changes_of(STUDY, {key: value, "threads": 2}) == {key: value}
        (cell,) = STUDY.cells(quick=True, rows=[CELLS[0].row], changes={key: value})
        (problem,) = differences(cell, manifest)
        assert problem.startswith(f"{key} ")


def test_what_was_recorded_is_returned(folder: Path, tmp_path: Path) -> None:
    """Restored cells are not recorded again: their record is elsewhere."""
    assert len(record(STUDY, folder, tmp_path / "one.jsonl")) == 2
    (CELLS[0].folder(folder) / "restored-from-a-record").touch()
    assert [cell.row for cell in record(STUDY, folder, tmp_path / "two.jsonl")] == [CELLS[1].row]
