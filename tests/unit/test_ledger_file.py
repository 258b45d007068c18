"""The ledger's file: an entry is written whole or not at all, and damaged lines do not prevent reading the others."""

import json
import math
import multiprocessing
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.node.ledger import LEDGER, Ledger, LedgerEntry, LedgerError, Origin, read_ledger
from hyperfl_flwr.node.ledger_app import array_group
from hyperfl_flwr.protocol.messages import CONFIG, OUTLIER_SUMS, PER_CLIENT_ARRAYS
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.sizes import content_bytes


def entry(number: int = 0, error: str = "") -> LedgerEntry:
    return LedgerEntry(
        time="2026-01-01T00:00:00.000+00:00", direction="out", kind="train", flower_run=1, node=0, method="local",
        experiment="00", round=number, error=error,
    )  # fmt: skip


def written(content: RecordDict) -> LedgerEntry:
    """Return the ledger's entry for an outgoing content."""
    origin = Origin(kind="train", flower_run=1, node=0, method="local", private=(), request=RecordDict())
    return origin.entry("out", content)


def reread(content: RecordDict, folder: Path) -> LedgerEntry:
    Ledger(folder).append(written(content))
    (found,), damaged = read_ledger(folder)
    assert damaged == []
    return found


def test_a_message_comes_back_as_it_was(tmp_path: Path) -> None:
    content = RecordDict(
        {
            "arrays": pack_arrays({"model/a": np.zeros((2, 3), np.float32), "model/b": np.float64(1)[None][0:1]}),
            "weights": MetricRecord({"num-examples": 40, "share": 0.5, "list": [1, 2]}),
            "clients": ConfigRecord({"client": [3], "process": "host:1", "ready": True, "loss": [0.25]}),
        }
    )
    found = reread(content, tmp_path)
    arrays, weights, clients = found.records
    assert [(a.name, tuple(a.shape), a.dtype, a.bytes) for a in arrays.arrays] == [
        ("model/a", (2, 3), "float32", 24), ("model/b", (1,), "float64", 8),
    ]  # fmt: skip
    assert weights.values == {"num-examples": 40, "share": 0.5, "list": [1, 2]}
    assert clients.values == {"client": [3], "process": "host:1", "ready": True, "loss": [0.25]}
    assert found.bytes == content_bytes([content])


@pytest.mark.parametrize(
    "values",
    [{"a": 1}, {"a": 1.5, "bc": True}, {"a": "text", "b": b"123"}, {"a": [1, 2], "b": [True], "c": ["x", "yz"]}],
)
def test_settings_count_as_flower_counts_them(values: dict[str, Any]) -> None:
    content = RecordDict({"config": ConfigRecord(values)})
    assert written(content).bytes == content_bytes([content])


def test_what_flower_cannot_count_is_written_down_all_the_same(tmp_path: Path) -> None:
    """Values for which Flower's count fails (IndexError, ValueError) are recorded; their names count, one byte each."""
    content = RecordDict({"config": ConfigRecord({"a": [], "b": ""})})
    assert reread(content, tmp_path).bytes == 2


def test_long_values_are_told_by_length_and_beginning(tmp_path: Path) -> None:
    values = {"list": list(range(100_000)), "text": "x" * 5_000, "bytes": b"\x00" * 9, "short": [0.5] * 20}
    (record,) = reread(RecordDict({"config": ConfigRecord(values)}), tmp_path).records
    assert record.values is not None
    assert record.values["list"] == {"length": 100_000, "beginning": [0, 1, 2, 3, 4]}
    assert record.values["text"] == {"length": 5_000, "beginning": "x" * 2_000}
    assert record.values["bytes"] == {"length": 9, "bytes": True}
    assert record.values["short"] == [0.5] * 20
    assert (tmp_path / LEDGER).stat().st_size < 4_000


def test_a_reason_is_recorded_in_full_and_a_list_of_few_long_values_is_not(tmp_path: Path) -> None:
    """The longest reason that a node sends has 2,000 characters."""
    values: dict[str, Any] = {"reason": "x" * 2_000, "long": [1 / 3] * 200, "texts": ["y" * 1_500, "z" * 1_500]}
    (record,) = reread(RecordDict({"config": ConfigRecord(values)}), tmp_path).records
    assert record.values == {
        "reason": "x" * 2_000,
        "long": {"length": 200, "beginning": [1 / 3] * 5},
        "texts": {"length": 2, "beginning": ["y" * 1_500, "z" * 1_500]},
    }


def test_numbers_that_json_does_not_know_are_texts(tmp_path: Path) -> None:
    content = RecordDict({"m": MetricRecord({"a": math.nan, "b": [-math.inf]})})
    (record,) = reread(content, tmp_path).records
    assert record.values == {"a": "nan", "b": ["-inf"]}
    json.loads((tmp_path / LEDGER).read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("dtype", ["no-type", ",", "(-1,)f4", "(999999999999,)f8"])
def test_an_array_of_an_unknown_type_is_written_down(tmp_path: Path, dtype: str) -> None:
    """Types for which NumPy raises a TypeError, a SyntaxError or a ValueError are recorded as they are."""
    array = Array(dtype=dtype, shape=(2,), stype="numpy.ndarray", data=b"12345")
    (record,) = reread(RecordDict({"arrays": ArrayRecord({"a/b": array})}), tmp_path).records
    assert [(a.dtype, a.bytes) for a in record.arrays] == [(dtype, 5)]


@pytest.fixture
def small_files() -> Iterator[int]:
    """Limit the files of this process to 1,000 bytes, like a disk that becomes full in the middle of a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    yield 1_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_does_not_fit_leaves_no_trace(tmp_path: Path, small_files: int) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(entry())
    before = ledger.path.read_bytes()
    with pytest.raises(LedgerError, match=r"ledger\.jsonl cannot be written: File too large; free disk space"):
        ledger.append(entry(error="x" * small_files))
    assert ledger.path.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be written: Not a directory"):
        Ledger(tmp_path / "file" / "state").append(entry())


def test_after_an_unfinished_line_a_new_one_begins(tmp_path: Path) -> None:
    """After a crash in the middle of a line, the next entry begins a new line; the unfinished one is reported."""
    ledger = Ledger(tmp_path)
    ledger.append(entry(1))
    with ledger.path.open("a") as file:
        file.write('{"time": "2026')
    ledger.append(entry(2))
    entries, damaged = read_ledger(tmp_path)
    assert [found.round for found in entries] == [1, 2]
    assert damaged == [2]


@pytest.mark.parametrize("line", ["[]", "{}", "7", '{"records": 3}', '{"records": [{"arrays": [5]}]}', "\udc80"])
def test_lines_that_are_no_entries_are_numbered(tmp_path: Path, line: str) -> None:
    (tmp_path / LEDGER).write_bytes(line.encode(errors="surrogateescape") + b"\n")
    assert read_ledger(tmp_path) == ([], [1])


def test_no_ledger_is_told(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot be read: No such file.*give the state folder of a node"):
        read_ledger(tmp_path)


def write_many(folder: Path, number: int) -> None:
    for _ in range(50):
        Ledger(folder).append(entry(number, error="x" * 3_000))


def test_processes_may_write_to_one_ledger(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=write_many, args=(tmp_path, number)) for number in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    entries, damaged = read_ledger(tmp_path)
    assert sorted(found.round for found in entries) == [1] * 50 + [2] * 50
    assert damaged == []


def test_what_a_server_sends_cannot_change_how_a_ledger_is_shown(tmp_path: Path) -> None:
    """Its texts lose letters that are not printable, and a record of another type has no fields."""
    request = RecordDict({CONFIG: MetricRecord({"round": 3})})
    origin = Origin(kind="tr\x1bain", flower_run=1, node=0, method="lo\x1bcal", private=None, request=request)
    Ledger(tmp_path).append(origin.entry("out", None, "caf\u00e9"))
    (found,), _ = read_ledger(tmp_path)
    assert (found.kind, found.method, found.experiment, found.round) == ("train", "local", "", 0)
    assert found.bytes == 5  # as they are sent, in UTF-8


@pytest.mark.parametrize(
    ("record", "name"),
    [("arrays", "embedding/weight"), (PER_CLIENT_ARRAYS, "7/embedding/weight"), (OUTLIER_SUMS, "7/embedding/weight")],
)
def test_the_group_of_an_array_is_found_behind_a_client_or_a_level(record: str, name: str) -> None:
    assert array_group(record, name) == "embedding"
