"""Records of a study: small files with which tables and figures are made without the runs."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.collect import collect
from experiments.golden import fingerprint, fingerprints, write_fingerprints
from experiments.recording import record
from experiments.records import Records, find_records, read_records, restore, shipped_records, stale_cells
from experiments.study import load_study
from experiments.study_folder import StudyManifest, is_finished, read_study_manifest
from experiments.table_numbers import comma_separated
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.core.errors import RunDirectoryError, StateError
from hyperfl_flwr.results.compare import compare
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.failures import has_diverged
from hyperfl_flwr.runs.run_directory import read_metrics

STUDY = load_study("table-1")


def table_of(folder: Path) -> str:
    return comma_separated(collect(STUDY, read_study_manifest(folder), folder))


def test_a_table_of_records_is_that_of_the_runs(folder: Path, tmp_path: Path) -> None:
    """Restored cells count as finished; recorded again, they leave the file as it is."""
    file = tmp_path / "records.jsonl"
    cells = record(STUDY, folder, file)
    assert [cell.row for cell in cells] == ["local", "fedavg"]
    restored = tmp_path / "restored"
    assert restore(STUDY, read_records(file), restored) == {}
    assert all(is_finished(cell, restored) for cell in cells)
    assert table_of(restored) == table_of(folder)
    before = file.read_text()
    record(STUDY, restored, file)
    assert file.read_text() == before
    assert file.stat().st_size < 20_000
    assert str(tmp_path) not in before
    assert str(Path.cwd()) not in before


def test_records_keep_the_means_over_the_clients(folder: Path, tmp_path: Path) -> None:
    """Numbers of single clients are only those of summary.json."""
    file = tmp_path / "records.jsonl"
    cell = record(STUDY, folder, file)[-1]
    restore(STUDY, read_records(file), tmp_path / "restored")
    whole, kept = (list(read_metrics(cell.folder(path))) for path in (folder, tmp_path / "restored"))
    rounds = [line for line in whole if line["kind"] in ("train", "aggregate")]
    assert [(line["kind"], line["round"]) for line in kept] == [(line["kind"], line["round"]) for line in rounds]
    for before, after in zip(rounds, kept, strict=True):
        assert after.items() >= {"kind": before["kind"], "round": before["round"]}.items()
        accuracies = [key for key in before if key.endswith("_accuracy")]
        assert accuracies
        for key in accuracies:
            assert after[key] == pytest.approx(before[key], rel=1e-5)
    summaries = [
        json.loads((cell.folder(path) / "summary.json").read_text()) for path in (folder, tmp_path / "restored")
    ]
    lists = [{key: summary.pop(key) for key in list(summary) if key.endswith("_per_client")} for summary in summaries]
    assert summaries[0] == summaries[1]
    assert {"test_accuracy_per_client", "test_accuracy_aggregate_per_client"} <= set(lists[0])
    for key, values in lists[0].items():
        assert lists[1][key] == pytest.approx(values, rel=1e-5)


def test_restored_cells_are_compared_as_runs_are_and_have_no_report(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    cells = record(STUDY, folder, file)
    restore(STUDY, read_records(file), tmp_path / "restored")
    of_runs, of_records = (compare([cell.folder(path) for cell in cells]) for path in (folder, tmp_path / "restored"))
    for run, recorded in zip(of_runs.groups, of_records.groups, strict=True):
        assert recorded.label == run.label
        for name, spread in run.numbers.items():
            assert recorded.numbers[name].mean == pytest.approx(spread.mean, rel=1e-5)
    paired, recorded = of_runs.groups[1].difference, of_records.groups[1].difference
    assert paired is not None
    assert recorded is not None
    assert (recorded.mean, recorded.clients) == (pytest.approx(paired.mean, rel=1e-4), paired.clients)
    with pytest.raises(RunDirectoryError, match=r"was restored from a record.*give the folder of the original run"):
        write_report(cells[0].folder(tmp_path / "restored"))
    (cells[0].folder(tmp_path / "restored") / "summary.json").write_text("{")
    with pytest.raises(StateError, match=r"summary.json is damaged \(JSONDecodeError"):
        compare([cell.folder(tmp_path / "restored") for cell in cells])


def test_a_run_replaces_the_record_of_its_cell(folder: Path, tmp_path: Path) -> None:
    """Cells that are not in the folder stay in the file, in the order of the study."""
    file = tmp_path / "records.jsonl"
    record(STUDY, folder, file)
    shutil.rmtree(folder / "local")
    summary = next(folder.glob("fedavg/*/seed-0/summary.json"))
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"test_accuracy": 0.125}))
    assert len(record(STUDY, folder, file)) == 1
    cells = read_records(file).cells
    assert [row for row, _, _ in cells] == ["local", "fedavg"]
    assert [cell["summary"]["test_accuracy"] for cell in cells.values()][1] == 0.125


def test_a_record_of_other_settings_is_stale(folder: Path, tmp_path: Path) -> None:
    """It is named with the difference and not restored, so that the study runs the cell again."""
    file = tmp_path / "records.jsonl"
    record(STUDY, folder, file)
    (tmp_path / "stale.jsonl").write_text(file.read_text().replace('"momentum": 0.5', '"momentum": 0.25'))
    records = read_records(tmp_path / "stale.jsonl")
    places = [("local", "fashion-mnist-20", 0), ("fedavg", "fashion-mnist-20", 0)]
    expected = dict.fromkeys(places, "momentum 0.25 instead of 0.5")
    assert stale_cells(STUDY, records) == expected
    assert restore(STUDY, records, tmp_path / "restored") == expected
    assert not list((tmp_path / "restored").glob("*/*/*"))
    unknown = Records(
        study_manifest=records.study_manifest, bases=records.bases,
        cells={("gone", "fashion-mnist-20", 0): records.cells[places[0]]},
    )  # fmt: skip
    assert stale_cells(STUDY, unknown) == {("gone", "fashion-mnist-20", 0): "the study has no such cell"}


def test_a_record_of_code_that_has_changed_since_is_stale(folder: Path, tmp_path: Path) -> None:
    """A record has the fingerprints of the code that ran the cell, and needs those of the method and its noise."""
    file = tmp_path / "records.jsonl"
    record(STUDY, folder, file)
    records = read_records(file)
    place = ("fedavg", "fashion-mnist-20", 0)
    assert records.cells[place]["golden"] == {"fedavg": fingerprints({"method": "fedavg"})["fedavg"]}
    assert stale_cells(STUDY, records) == {}
    for golden, reason in (
        ({"fedavg": "0" * 12}, "the golden run of fedavg has other numbers by now"),
        ({}, "no golden run of fedavg is recorded"),
    ):
        changed = {**records.cells, place: {**records.cells[place], "golden": golden}}
        other = Records(study_manifest=records.study_manifest, bases=records.bases, cells=changed)
        assert stale_cells(STUDY, other) == {place: reason}
    noisy = {"method": "fedavg", "dp.epsilon": 4.0, "privacy.unit": "none", "attack.name": "ig"}
    assert set(fingerprints(noisy)) == {"fedavg", "fedavg with noisy steps", "ig"}
    assert fingerprints({"method": "mine:METHOD"}) == {}


def test_restored_cells_follow_their_records(folder: Path, tmp_path: Path) -> None:
    """Restored cells of changed records are replaced, those of stale records removed; runs stay."""
    file, restored = tmp_path / "records.jsonl", tmp_path / "restored"
    record(STUDY, folder, file)
    records = read_records(file)
    place = ("fedavg", "fashion-mnist-20", 0)
    path = restored / "fedavg" / "fashion-mnist-20" / "seed-0"

    def restore_with(**entries: object) -> None:
        changed = {**records.cells, place: {**records.cells[place], **entries}}
        restore(STUDY, Records(study_manifest=records.study_manifest, bases=records.bases, cells=changed), restored)

    restore_with()
    restore_with(summary={**records.cells[place]["summary"], "test_accuracy": 0.125})
    assert json.loads((path / "summary.json").read_text())["test_accuracy"] == 0.125
    (path / "manifest.json").unlink()  # an interrupted command
    restore_with()
    assert table_of(restored) == table_of(folder)
    restore_with(golden={})
    assert not path.exists()
    shutil.copytree(folder / "fedavg", restored / "fedavg", dirs_exist_ok=True)
    restore_with(golden={})
    assert table_of(restored) == table_of(folder)


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the commits of a repository in which fedavg's golden numbers have changed and pfedhn's have not."""
    repository = tmp_path / "repository"
    file = repository / "experiments" / "expected" / "golden.json"
    file.parent.mkdir(parents=True)

    def git(*words: str) -> str:
        command = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    found = []
    for number in range(2):
        file.write_text(json.dumps({"runs": {"fedavg": {"numbers": {"a": number}}, "pfedhn": {"numbers": {"a": 5}}}}))
        git("add", ".")
        git("commit", "--quiet", "--message", str(number))
        found.append(git("rev-parse", "HEAD"))
    monkeypatch.setattr("experiments.golden.ROOT", repository)
    monkeypatch.setattr("experiments.golden.FILE", file)
    return found


def test_a_resumed_cell_has_the_fingerprints_of_all_its_commits(folder: Path, commits: list[str]) -> None:
    """The last commit's alone would make earlier rounds look as if the current code had run them."""
    (cell,) = (path.parent for path in folder.glob("fedavg/*/seed-0/manifest.json"))
    manifest = json.loads((cell / "manifest.json").read_text())
    current = {"fedavg": fingerprint({"a": 1}), "pfedhn": fingerprint({"a": 5})}

    def kept(*codes: tuple[str, bool]) -> list[str]:
        first, *resumed = ({**manifest, "code": {"commit": commit, "dirty": dirty}} for commit, dirty in codes)
        (cell / "manifest.json").write_text(json.dumps({**first, "resumed": resumed}))
        write_fingerprints(cell, current)
        found = json.loads((cell / "golden.json").read_text())
        assert found.items() <= current.items()
        return list(found)

    old, new = commits
    assert kept((new, False), (new, False)) == ["fedavg", "pfedhn"]
    assert kept((old, False), (new, False)) == ["pfedhn"]
    assert kept((old, True), (new, False)) == []
    for unknown in ("0" * 40, ""):
        assert kept((unknown, False), (new, False)) == []


def test_files_of_something_else_are_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    with pytest.raises(RunDirectoryError, match="there is no file of records nothing; known: "):
        find_records("nothing")
    for text in ("", "no JSON", '{"study": "table-1"}', '{"study": "table-1", "quick": true, "changes": {}}\n{}'):
        file.write_text(text)
        with pytest.raises(RunDirectoryError, match="is not a file of records"):
            read_records(file)
    file.unlink()
    record(STUDY, folder, file)
    with pytest.raises(RunDirectoryError, match="these are records of table-1, not of table-4"):
        restore(load_study("table-4"), read_records(file), tmp_path / "restored")
    text = file.read_text().replace('"quick": true', '"quick": false', 1)
    file.write_text(text)
    with pytest.raises(RunDirectoryError, match="choose another file"):
        record(STUDY, folder, file)


def test_table_and_figure_need_only_what_record_writes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`record` writes the file, and `table` and `figure` need nothing else."""
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    for words, text in (
        (["record", "table-1", "kept.jsonl", "--output", str(folder)], "2 cells in kept.jsonl"),
        (["table", "table-1", "--quick", "--records", "kept.jsonl"], "| FedAvg |"),
        (["figure", "table-1", "--quick", "--records", "kept.jsonl"], "figure-personalized-accuracy.png"),
    ):
        result = runner.invoke(cli, words, catch_exceptions=False)
        assert (result.exit_code, text in result.output) == (0, True), result.output
    made = tmp_path / "runs" / "studies" / "table-1-quick-records"
    assert (made / "figure-personalized-accuracy.png").stat().st_size > 10_000
    assert table_of(made) == table_of(folder)


@pytest.mark.parametrize("name", shipped_records())
def test_the_project_s_own_records_belong_to_its_studies(name: str) -> None:
    """Every cell has its study, a summary unless it has diverged, and a commit without uncommitted changes."""
    records = read_records(find_records(name))
    assert isinstance(records.study_manifest, StudyManifest)
    assert not records.study_manifest.quick
    stale = stale_cells(load_study(records.study_manifest.study), records)
    assert "the study has no such cell" not in stale.values()
    for recorded in records.cells.values():
        code = [recorded["manifest"]["code"], *(each["code"] for each in recorded["manifest"]["resumed"])]
        assert all(each["commit"] and not each["dirty"] for each in code)
        assert bool(recorded["summary"]) != has_diverged(recorded["manifest"])
