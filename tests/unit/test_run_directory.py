"""The run folder: it has a single writer, lines can be removed again, and nothing is overwritten."""

import gc
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hyperfl_flwr.core.errors import RunDirectoryError, StateError
from hyperfl_flwr.protocol.messages import Failure
from hyperfl_flwr.runs.run_directory import (
    RunDirectory,
    new_run_name,
    read_manifest,
    read_metrics,
    refuse_used_directory,
)


@pytest.fixture
def directory(tmp_path: Path):
    made = RunDirectory.create(tmp_path / "runs" / "a")
    yield made
    made.close()


def line(kind: str, number: int) -> dict[str, object]:
    return {"kind": kind, "round": number, "value": number / 3}


def test_a_new_folder_has_its_subfolders(tmp_path: Path) -> None:
    """The folder has its subfolders; only the owner can use that of the clients, whatever the umask."""
    old = os.umask(0)
    try:
        directory = RunDirectory.create(tmp_path / "a")
    finally:
        os.umask(old)
    directory.close()
    assert all((directory.path / name).is_dir() for name in ("checkpoints", "clients", "failures", "plots"))
    assert stat.S_IMODE((directory.path / "clients").stat().st_mode) == 0o700


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    refuse_used_directory(tmp_path / "a")
    refuse_used_directory(tmp_path / "none")
    RunDirectory.create(tmp_path / "a").close()


def test_a_folder_of_a_run_without_a_manifest_may_be_used(tmp_path: Path) -> None:
    """A process that was killed early leaves a lock and empty folders; one that still runs keeps its folder."""
    directory = RunDirectory.create(tmp_path / "a")
    with pytest.raises(RunDirectoryError, match="another process is writing"):
        RunDirectory.create(tmp_path / "a")
    directory.close()
    RunDirectory.create(tmp_path / "a").close()
    (tmp_path / "a" / "checkpoints" / "file").touch()
    with pytest.raises(RunDirectoryError, match="not empty"):
        RunDirectory.create(tmp_path / "a")


def test_a_used_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".hidden").touch()
    (tmp_path / "b").touch()
    for path, text in (
        (tmp_path / "a", "not empty"),
        (tmp_path / "b", "b is a file"),
        (tmp_path / "b" / "c", "b is a file"),
    ):
        with pytest.raises(RunDirectoryError, match=text):
            RunDirectory.create(path)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [".hidden"]


def test_a_second_writer_is_refused(directory: RunDirectory) -> None:
    """A second writer in the same process is refused and leaves no file open; the first one's lock stays."""
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match="another process is writing"):
            RunDirectory(directory.path)
        gc.collect()
    directory.close()
    RunDirectory(directory.path).close()


def test_another_process_is_refused_until_the_first_one_is_done(directory: RunDirectory) -> None:
    program = (
        "import sys; from pathlib import Path; from hyperfl_flwr.core.errors import RunDirectoryError\n"
        "from hyperfl_flwr.runs.run_directory import RunDirectory\n"
        "try: RunDirectory(Path(sys.argv[1])).close()\n"
        "except RunDirectoryError as error: sys.exit(7)\n"
    )
    root = Path(__file__).resolve().parents[2]

    def try_it() -> int:
        return subprocess.run([sys.executable, "-c", program, str(directory.path)], cwd=root, check=False).returncode

    assert try_it() == 7
    directory.close()
    assert try_it() == 0


def test_lines_come_back_as_they_were(directory: RunDirectory) -> None:
    assert list(read_metrics(directory.path)) == []
    lines = [line("train", 1), line("client", 1)]
    directory.append(lines[:1])
    directory.append(lines[1:])
    assert list(read_metrics(directory.path)) == lines


@pytest.mark.parametrize("dataset", ["npz:own.npz", "npz:/data/own.npz", "npz:here/own.npz", "own", "folder:/x/own"])
def test_a_run_is_named_after_its_data(dataset: str) -> None:
    """The name of the data lacks what folder names should not have: the prefix, a path, a colon."""
    assert "-fedavg-own-seed3-" in new_run_name("fedavg", dataset, 3)


def test_a_line_that_was_cut_off_is_left_out(directory: RunDirectory) -> None:
    """A line that was being written at a crash is not read, and is removed when the run continues."""
    directory.append([line("train", 1), line("train", 2)])
    file = directory.path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert list(read_metrics(directory.path)) == [line("train", 1)]
    directory.rewind(1)
    directory.append([line("train", 2)])
    assert list(read_metrics(directory.path)) == [line("train", 1), line("train", 2)]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (0, []),
        (1, ["aggregate 0", "train 1", "client 1"]),
        (2, ["aggregate 0", "train 1", "client 1", "aggregate 1", "client-aggregate 1", "train 2"]),
        (3, ["aggregate 0", "train 1", "client 1", "aggregate 1", "client-aggregate 1", "train 2", "aggregate 2"]),
    ],
)
def test_rewind_drops_what_was_measured_after_a_round(directory: RunDirectory, last: int, expected: list[str]) -> None:
    """The aggregate of round r is measured by the clients of round r + 1, so it is dropped with that round."""
    names = ["aggregate 0", "train 1", "client 1", "aggregate 1", "client-aggregate 1", "train 2", "aggregate 2"]
    directory.append([line(name.split()[0], int(name.split()[1])) for name in names])
    for number in (1, 2, 11):
        directory.write_failures(f"round-{number:06d}", [Failure(client=3, reason="x", details="y")])
    directory.rewind(last)
    assert [f"{record['kind']} {record['round']}" for record in read_metrics(directory.path)] == expected
    left = sorted(int(path.name.split("-")[1]) for path in (directory.path / "failures").iterdir())
    assert left == [number for number in (1, 2, 11) if number <= last]


def test_rewind_drops_the_result_and_the_failures_after_the_rounds(directory: RunDirectory) -> None:
    names = ("novel.json", "cross_site.json", "summary.json", "plots/run.png", "manifest.json")
    for name in names:
        (directory.path / name).touch()
    for phase in ("", "-evaluation", "-novel", "-cross-site"):
        directory.write_failures(f"round-000002{phase}", [Failure(client=3, reason="x", details="y")])
    directory.rewind(2)
    assert [name for name in names if (directory.path / name).exists()] == ["manifest.json"]
    assert [path.name for path in (directory.path / "failures").iterdir()] == ["round-000002-client-00003.txt"]


def test_failures_are_one_file_each(directory: RunDirectory) -> None:
    directory.write_failures(
        "round-000002", [Failure(client=3, reason="no", details="a\nb"), Failure(client=4, reason="gone")]
    )
    found = {path.name: path.read_text() for path in (directory.path / "failures").iterdir()}
    assert found == {
        "round-000002-client-00003.txt": "no\n\na\nb",
        "round-000002-client-00004.txt": "gone\n\n",
    }


def test_a_manifest_is_read_as_it_was_written(directory: RunDirectory) -> None:
    directory.write_json("manifest.json", {"settings": {"seed": 1}, "experiment": "ab"})
    assert read_manifest(directory.path) == {"settings": {"seed": 1}, "experiment": "ab"}


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run's folder"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"settings": {}}', json.dumps({"experiment": "a"}), "\xff"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(StateError, match="is damaged"):
        read_manifest(tmp_path)
