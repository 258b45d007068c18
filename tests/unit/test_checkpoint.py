"""The server's checkpoints."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.storage import write_arrays
from hyperfl_flwr.runs.checkpoint import Checkpoints, Progress

ARRAYS = {"model/weight": np.linspace(0, 1, 5, dtype=np.float32)}


def progress(number: int) -> Progress:
    return Progress(round=number, versions={0: number, 11: 0}, trainings=9, failed_trainings=2, failed_rounds=1)


def test_arrays_and_progress_come_back_unchanged(tmp_path: Path) -> None:
    """Arrays and progress are loaded as saved; client ids are integers again, although JSON's keys are strings."""
    Checkpoints(tmp_path).save(ARRAYS, progress(4))
    arrays, back = Checkpoints(tmp_path).load(4)
    assert back == progress(4)
    np.testing.assert_array_equal(arrays["model/weight"], ARRAYS["model/weight"], strict=True)


def test_a_method_that_shares_nothing(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save({}, progress(4))
    assert Checkpoints(tmp_path).load(4) == ({}, progress(4))


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    """The two highest rounds are kept, compared as numbers: 1,000,000 comes last, although its name is longer."""
    checkpoints = Checkpoints(tmp_path)
    kept = []
    for number in (2, 9, 10, 1_000_000):
        checkpoints.save(ARRAYS, progress(number))
        kept.append(checkpoints.rounds())
    assert kept == [[2], [2, 9], [9, 10], [10, 1_000_000]]


def test_the_old_ones_stay_until_the_new_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in (1, 2):
        checkpoints.save(ARRAYS, progress(number))

    def crash(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(ARRAYS, progress(3))
    assert checkpoints.rounds() == [1, 2]
    assert checkpoints.load(2)[1] == progress(2)


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).rounds() == []
    with pytest.raises(StateError, match="is missing"):
        Checkpoints(tmp_path).load(1)


@pytest.mark.parametrize(
    "meta", [{}, {"versions": 3}, {"versions": {"a": 1}}, {"versions": {}, "unknown": 1}, {"versions": None}]
)
def test_a_file_that_is_no_checkpoint(tmp_path: Path, meta: dict[str, object]) -> None:
    checkpoints = Checkpoints(tmp_path)
    write_arrays(checkpoints.path(1), ARRAYS, meta)
    with pytest.raises(StateError, match="is not a checkpoint that this version of hyperfl-flwr can use"):
        checkpoints.load(1)


def test_what_a_killed_writer_has_left_is_deleted(tmp_path: Path) -> None:
    """Other files with a leading dot stay."""
    for name in (".round-000003.npz.x7k2_a", ".lock"):
        (tmp_path / name).write_bytes(b"unfinished")
    Checkpoints(tmp_path).save(ARRAYS, progress(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "round-000004.npz"]


def test_of_a_damaged_file_the_round_before_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in (3, 4):
        checkpoints.save(ARRAYS, progress(number))
        checkpoints.path(number).write_bytes(b"damaged")
    with pytest.raises(StateError, match="start a new run; without the file the run would continue after round 3"):
        checkpoints.load(4)
    with pytest.raises(StateError, match=r"start a new run$"):
        checkpoints.load(3)


def test_the_best_one_and_the_one_before_the_last_phase_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in range(1, 7):
        state = replace(progress(number), last_phase_after=2, best_round={"aggregate": 3, "personalized": 4})
        checkpoints.save(ARRAYS, state)
    assert checkpoints.rounds() == [2, 3, 5, 6]
    checkpoints.path(6).write_bytes(b"damaged")
    with pytest.raises(StateError, match="without the file the run would continue after round 5"):
        checkpoints.load(6)
    with pytest.raises(StateError, match="is missing") as caught:
        checkpoints.load(4)
    assert "without the file" not in str(caught.value)
