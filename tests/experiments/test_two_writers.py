"""Several processes that work on one study's folder: each cell is trained once, and a folder has one description."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from experiments.claims import TAKEN, claimed
from experiments.runner import run_cells
from experiments.study import load_study
from experiments.study_folder import StudyManifest, is_finished, open_study_folder, read_study_manifest
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.files import folder_lock
from hyperfl_flwr.runs.run_directory import read_manifest

WRITERS = 8


@pytest.mark.parametrize("others", [{}, {"num-rounds": 3}], ids=["the same study", "two variants"])
def test_writers_that_begin_together_agree_on_the_settings(tmp_path: Path, others: dict[str, int]) -> None:
    """All begin in the same moment; those of the variant that came second are refused, and no other one."""
    manifests = [StudyManifest(study="table-1", quick=True, changes=others if n % 2 else {}) for n in range(WRITERS)]
    begin = Barrier(WRITERS)

    def write(manifest: StudyManifest) -> bool:
        begin.wait()
        try:
            open_study_folder(tmp_path / "study", manifest)
        except RunDirectoryError:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as pool:
        accepted = list(pool.map(write, manifests))
    kept = read_study_manifest(tmp_path / "study")
    assert accepted == [manifest == kept for manifest in manifests]


def test_a_cell_that_another_process_trains_is_skipped(tmp_path: Path) -> None:
    """Nothing is started, the note says why, and without the other process the cell is free again."""
    study, notes = load_study("table-1"), []
    (cell,) = study.cells(quick=True, rows=["local"])
    open_study_folder(tmp_path, StudyManifest(study="table-1", quick=True, changes={}))

    def finish(_: object, problem: str) -> None:
        assert problem == ""

    with claimed(tmp_path, cell.folder(tmp_path)) as is_ours:
        assert is_ours
        run_cells(study, [cell], tmp_path, 1, finish, quick=True, on_note=lambda _, note: notes.append(note))
    assert notes == [TAKEN]
    assert not cell.folder(tmp_path).exists()
    with claimed(tmp_path, cell.folder(tmp_path)) as is_ours:
        assert is_ours


def test_cells_whose_names_are_equal_with_hyphens_are_claimed_apart(tmp_path: Path) -> None:
    with (
        claimed(tmp_path, tmp_path / "hyperfl" / "iid-digits" / "seed-0") as one,
        claimed(tmp_path, tmp_path / "hyperfl-iid" / "digits" / "seed-0") as other,
    ):
        assert (one, other) == (True, True)


@pytest.mark.slow
@pytest.mark.extended
def test_two_commands_share_the_cells_of_a_study(tmp_path: Path) -> None:
    """Two processes with the same command both succeed, and train each cell once."""
    command = [sys.executable, "-m", "hyperfl_flwr", "study", "table-1", "--quick", "--jobs", "1"]
    command += ["--rows", "fedavg,local", "--output", str(tmp_path / "study")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    printed = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    cells = load_study("table-1").cells(quick=True, rows=["fedavg", "local"])
    assert all(is_finished(cell, tmp_path / "study") for cell in cells)
    assert all(read_manifest(cell.folder(tmp_path / "study"))["resumed"] == [] for cell in cells)
    assert "".join(printed).count(TAKEN) >= 1  # both start with the first cell


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", no_locks)
    with pytest.raises(RunDirectoryError, match=r"must have file locks, got: No locks available; mount it with them"):
        folder_lock.lock_folder(tmp_path)
