"""Study cells next to other runs and runs of earlier versions, and their failures and kills."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import eventually

from experiments.cell_settings import differences, without_machine_settings
from experiments.runner import run_cells, task_of
from experiments.study import Cell, Study, load_study, parse_study
from experiments.study_folder import StudyManifest, is_finished, open_study_folder, read_study_manifest
from experiments.worker import problem_of
from hyperfl_flwr.core.errors import RunDirectoryError, RunFailedError
from hyperfl_flwr.launch.core_locks import WAITING, CoreSlots, usable_cores
from hyperfl_flwr.launch.processes import descendants, process_table
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.runs.run_directory import RunDirectory, read_manifest

QUICK = StudyManifest(study="table-1", quick=True, changes={})


@pytest.mark.slow
def test_a_cell_that_waits_for_a_core_says_so(tmp_path):
    """All cores are held until the cell reports that it waits; then it runs to its end."""
    study, notes = load_study("table-1"), []
    cells = study.cells(quick=True, rows=["local"])
    open_study_folder(tmp_path / "study", QUICK)
    with CoreSlots() as slots:
        slots.acquire(len(usable_cores()))

        def on_note(cell, note):
            notes.append((str(cell), note))
            slots.release()

        run_cells(study, cells, tmp_path / "study", 1, lambda cell, problem: None, quick=True, on_note=on_note)
    assert notes == [(str(cells[0]), WAITING)]
    assert is_finished(cells[0], tmp_path / "study")


@pytest.mark.slow
def test_a_cell_does_not_run_a_package_of_the_working_directory(tmp_path, monkeypatch):
    """A user's package `experiments` in the working directory, which would leave a file, is not imported."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("open('mark', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    study = load_study("table-1")
    cells = study.cells(quick=True, rows=["local"])
    open_study_folder(tmp_path / "study", QUICK)
    run_cells(study, cells, tmp_path / "study", 1, lambda cell, problem: None, quick=True)
    assert is_finished(cells[0], tmp_path / "study")
    assert not (tmp_path / "mark").exists()


def test_a_setting_that_an_older_run_did_not_know_counts_as_its_default():
    """An earlier version's run still belongs to the cell, unless the cell has another value for the setting."""
    study = load_study("table-1")
    (cell,) = study.cells(quick=True, rows=["fedavg"])
    older = {key: value for key, value in cell.settings.items() if not key.startswith("privacy.")}
    assert differences(cell, {"settings": older}) == []
    (other,) = study.cells(quick=True, rows=["fedavg"], changes={"privacy.clip-norm": 1.0})
    assert differences(other, {"settings": older}) == ["privacy.clip-norm 0.0 instead of 1.0"]


@pytest.mark.slow
@pytest.mark.extended
def test_a_process_that_dies_is_replaced(tmp_path, monkeypatch):
    """The first cell's process is killed from within: its cell is named, and the next cell gets a new process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if sys.argv[:1] == ['-m'] and not os.path.exists(os.environ['MARK']):\n"
        "    open(os.environ['MARK'], 'w').close()\n"
        "    print('out of memory', file=sys.stderr, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    study, told = load_study("table-1"), []
    cells = study.cells(quick=True, rows=["fedavg", "local"])
    open_study_folder(tmp_path / "study", QUICK)
    with pytest.raises(RunFailedError, match=r"1 of 2 cells failed(.|\n)*exit code -9: out of memory"):
        run_cells(study, cells, tmp_path / "study", 1, lambda cell, problem: told.append(bool(problem)))
    assert told == [True, False]
    run_cells(study, cells, tmp_path / "study", 1, lambda cell, problem: told.append(bool(problem)))
    assert told[2:] == [False, False]


@pytest.mark.slow
def test_cells_end_with_the_process_that_runs_them(tmp_path):
    """After kill -9 of `hyperfl study` in a long cell, none of its processes is left, and its run is released."""
    folder = tmp_path / "study"
    changes = {"num-rounds": "100000", "checkpoint-every": "1"}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "hyperfl_flwr", "study", "table-1", "--quick", "--rows", "fedavg"]
    with subprocess.Popen([*command, "--output", str(folder), *words]) as process:
        eventually(lambda: list(folder.glob("fedavg/*/*/checkpoints/round-*.npz")) or process.poll(), "a checkpoint")
        assert process.poll() is None
        below = descendants([process.pid], process_table())
        assert any("experiments.worker" in each.command for each in below.values())
        process.kill()
    (run,) = (path.parent for path in folder.glob("fedavg/*/*/manifest.json"))

    def is_released() -> bool:
        try:
            RunDirectory(run).close()  # refused while another process is writing
        except RunDirectoryError:
            return False
        return True

    eventually(is_released, "the run's release")
    eventually(lambda: not any(pid in process_table() for pid in below), "the end of its processes")


@pytest.mark.slow
def test_a_cell_that_fails_is_named_and_the_others_go_on(tmp_path):
    """One cell's data are missing: the error names the cell and the reason, and the other cell is finished."""
    study = load_study("table-1")
    good, bad = study.cells(quick=True, rows=["fedavg", "local"])
    bad = Cell(
        row=bad.row, column=bad.column, seed=0, config=bad.config.model_copy(update={"dataset": "npz:/nowhere.npz"})
    )
    folder, told = tmp_path / "study", []
    open_study_folder(folder, QUICK)

    def on_finished(cell, problem):
        told.append((cell.row, bool(problem)))

    with pytest.raises(RunFailedError, match=r"1 of 2 cells failed(.|\n)*/nowhere\.npz"):
        run_cells(study, [bad, good], folder, 1, on_finished, quick=True)
    assert told == [(bad.row, True), (good.row, False)]
    assert is_finished(good, folder)


def problem(cell: Cell, folder: Path) -> str:
    """Run a cell of a study of two nodes in this process, and return the problem."""
    return problem_of(json.loads(task_of(cell, folder, 2)), lambda note: None)


def test_the_settings_of_a_cell_may_have_a_number_of_nodes(tmp_path):
    """As with `hyperfl sweep --set num-nodes=3`; it counts, and not that of the study."""
    own = {"num-nodes": 3}
    (cell,) = load_study("table-1").cells(quick=True, rows=["fedavg"], changes=own)
    assert problem(cell, tmp_path) == ""
    assert len(read_manifest(cell.folder(tmp_path))["nodes"]) == 3
    (cell,) = load_study("table-1").cells(
        quick=True, rows=["fedavg"], changes=own | {"secagg.enabled": True, "num-nodes": 1}
    )
    assert "--num-nodes must be 3 to" in problem(cell, tmp_path / "secure")


def test_an_attack_after_training_may_have_a_number_of_nodes(tmp_path):
    cell = load_study("audit-head-gradient").cells(quick=True, changes={"num-nodes": 3})[0]
    assert cell.attack["attack.rounds-before"] == 1
    assert problem(cell, tmp_path) == ""


def test_an_attack_with_an_automatic_learning_rate_is_finished(tmp_path):
    """Its manifest has the rate that the method used, so that the study does not take it for another one."""
    (cell, *_) = load_study("audit-head-gradient").cells(quick=True, rows=["fedrep"], changes={"learning-rate": "auto"})
    assert cell.config.learning_rate == "auto"
    assert problem(cell, tmp_path) == ""
    assert is_finished(cell, tmp_path)
    assert read_manifest(cell.folder(tmp_path))["resolved"]["learning-rate"] == METHODS["fedrep"].learning_rate


ROBUST = """\
[settings]
dataset = "digits"
num-clients = 6
num-rounds = 1
local-epochs = 1
target = "mlp"
data.train-samples = 20
data.test-samples = 10
robust.reduction = "{rule}"

[rows.fedavg]
method = "fedavg"
"""


def study_with(rule: str, folder: Path) -> Study:
    return parse_study(ROBUST.format(rule=rule), folder / "robust.toml")


def test_num_nodes_of_a_robust_cell_count(tmp_path: Path) -> None:
    """A finished cell of another number of nodes is refused, by `auto`, too; with means it is taken for any number."""
    for rule, matters in (("median", True), ("mean", False)):
        study, folder = study_with(rule, tmp_path), tmp_path / rule
        three, six, auto = (study.cells(changes={"num-nodes": number} if number else {})[0] for number in (3, 6, None))
        assert problem_of(json.loads(task_of(three, folder, study.num_nodes)), lambda note: None) == ""
        manifest = read_manifest(three.folder(folder))
        assert differences(three, manifest) == []
        expected = ["num-nodes 3 instead of 6"] if matters else []
        assert differences(six, manifest) == differences(auto, manifest) == expected
        assert without_machine_settings(manifest["settings"]).get("num-nodes") == (3 if matters else None)
        if matters:
            with pytest.raises(RunDirectoryError, match=r"other settings \(num-nodes 3 instead of 6\); choose"):
                is_finished(six, folder)
        else:
            assert is_finished(six, folder)
    # Six clients have six nodes with `auto`; a run that recorded `auto` has the number beside its settings.
    automatic = {"settings": auto.settings | {"robust.reduction": "median"}, "resolved": {"num-nodes": 3}}
    (robust,) = study_with("median", tmp_path).cells()
    assert differences(robust, automatic) == ["num-nodes 3 instead of 6"]
    assert differences(robust, automatic | {"resolved": {"num-nodes": 6}}) == []


def test_a_folder_remembers_num_nodes_if_a_row_depends_on_them(tmp_path: Path) -> None:
    """Otherwise `hyperfl table` would expect another number than that of the folder's cells."""
    begun = [StudyManifest(study="robust", quick=False, changes={"num-nodes": number}) for number in (3, 6)]
    open_study_folder(tmp_path / "robust", begun[0], study_with("median", tmp_path))
    assert read_study_manifest(tmp_path / "robust").changes == {"num-nodes": 3}
    with pytest.raises(RunDirectoryError, match="was created with num-nodes 3 instead of 6; choose"):
        open_study_folder(tmp_path / "robust", begun[1], study_with("median", tmp_path))
    malicious = StudyManifest(study="robust", quick=False, changes={"adversary.attack": "ipm", "num-nodes": 3})
    for folder, study_manifest, remembered in (("malicious", malicious, malicious.changes), ("plain", begun[0], {})):
        open_study_folder(tmp_path / folder, study_manifest, study_with("mean", tmp_path))
        assert read_study_manifest(tmp_path / folder).changes == remembered
    open_study_folder(tmp_path / "plain", begun[1], study_with("mean", tmp_path))


def test_settings_of_a_method_of_the_user_s_own_hinder_no_other_row() -> None:
    """They may stand among the settings of all runs; whichever rows are chosen, only that method's runs have them."""
    text = """
[settings]
dataset = "digits"
clipped.norm = 0.5
[rows.fedavg]
method = "fedavg"
[rows.own]
method = "own_method:CLIPPED"
[columns.digits]
label = "digits"
"""
    study = parse_study(text, Path("own.toml"))
    for rows in (["fedavg"], ["own"], []):
        found = {cell.row: cell.settings.get("clipped.norm") for cell in study.cells(rows=rows)}
        assert found == {row: {"fedavg": None, "own": 0.5}[row] for row in rows or ("fedavg", "own")}
