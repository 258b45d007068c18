"""A node's privacy record: what is written before a release, how it is composed, and when a release is refused."""

import json
import math
import multiprocessing
import os
import resource
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hyperfl_flwr.core.errors import RefusalError, StateError, for_others
from hyperfl_flwr.privacy.accounting import client_epsilon, record_epsilon, record_noise
from hyperfl_flwr.privacy.budget import (
    FILE,
    NEEDS_BOUND,
    PrivacyBudget,
    RecordedRelease,
    counted_epsilon,
    epsilon_of,
    read_record,
)
from hyperfl_flwr.privacy.release import Release
from hyperfl_flwr.privacy.spent import noisy_steps, spent

DELTA = 1e-5
STEPS = Release(unit="record", mechanism="sampled-gaussian", noise_multiplier=2.0, sample_rate=0.1, steps=50)
SUM = Release(unit="client", mechanism="discrete-gaussian", noise_multiplier=3.0, bounded_by="nodes")
UPLOAD = Release(unit="client", mechanism="gaussian", noise_multiplier=3.0)
TRUSTED = Release(unit="client", mechanism="gaussian", noise_multiplier=3.0, bounded_by="server")
DESCRIPTOR = Release(unit="record", mechanism="gaussian", noise_multiplier=4.0, neighbours="replace-one")


RANDOM = Release(unit="client", mechanism="randomised-response", noise_multiplier=0.0, epsilon=0.5, steps=4)


def budget(folder: Path, client: int = 0, experiment: str = "a", limit: float | None = None) -> PrivacyBudget:
    return PrivacyBudget(
        path=folder / FILE,
        experiment=experiment,
        client=client,
        max_epsilon=limit,
        delta=DELTA,
        knows_nodes=True,
    )


def test_a_line_is_what_was_released(tmp_path: Path) -> None:
    """The folder and the file are made for their owner alone, and each line has all fields."""
    one = budget(tmp_path / "state", client=7)
    for number, release in enumerate((STEPS, SUM, TRUSTED, DESCRIPTOR, None), start=1):
        one.spend(number, release)
    found = read_record(one.path)
    assert [(entry.experiment, entry.client, entry.round) for entry in found] == [("a", 7, n) for n in range(1, 6)]
    assert [entry.release for entry in found] == [STEPS, SUM, TRUSTED, DESCRIPTOR, None]
    assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(one.path.parent.stat().st_mode) == 0o700
    lines = [json.loads(line) for line in one.path.read_text().splitlines()]
    del lines[0]["time"]
    assert lines[0] == {
        "experiment": "a", "client": 7, "round": 1, "unit": "record", "mechanism": "sampled-gaussian",
        "noise_multiplier": 2.0, "sample_rate": 0.1, "steps": 50, "neighbours": "add-or-remove-one",
        "bounded_by": "client",
    }  # fmt: skip
    assert [line["bounded_by"] for line in lines] == ["client", "nodes", "server", "client", "nothing"]
    assert lines[3]["neighbours"] == "replace-one"
    assert set(lines[4]) == {"time", "experiment", "client", "round", "bounded_by"}


def test_clipping_without_noise_is_bounded_by_nothing(tmp_path: Path) -> None:
    budget(tmp_path).spend(1, replace(UPLOAD, noise_multiplier=0.0))
    assert read_record(tmp_path / FILE)[0].release is None


def test_randomised_numbers_add_up(tmp_path: Path) -> None:
    """Epsilon times how many there are, also for one record; other releases come on top. The line has both numbers."""
    one = budget(tmp_path, limit=4.0)
    one.spend(1, RANDOM)
    line = json.loads(one.path.read_text())
    assert (line["mechanism"], line["epsilon"], line["steps"], line["bounded_by"]) == (
        "randomised-response", 0.5, 4, "client",
    )  # fmt: skip
    assert [entry.release for entry in read_record(one.path)] == [RANDOM]
    assert epsilon_of([RANDOM] * 3, "client", DELTA) == epsilon_of([RANDOM] * 3, "record", DELTA) == 6.0
    assert epsilon_of([RANDOM, UPLOAD], "client", DELTA) == 2.0 + epsilon_of([UPLOAD], "client", DELTA)
    assert epsilon_of([RANDOM, UPLOAD], "record", DELTA) == 2.0 + epsilon_of([UPLOAD], "record", DELTA)
    assert epsilon_of([RANDOM, STEPS], "client", DELTA) == math.inf
    one.spend(2, RANDOM)
    with pytest.raises(RefusalError, match=r"of client 0 for one client to 6 .* above max-epsilon = 4"):
        one.spend(3, RANDOM)


@pytest.mark.parametrize("changes", [{"epsilon": 0.0}, {"epsilon": math.inf}, {"mechanism": "gaussian"}, {"steps": 0}])
def test_randomised_numbers_need_an_epsilon(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a release needs"):
        replace(RANDOM, **changes)  # type: ignore[arg-type]


def test_the_line_is_on_disk_when_the_release_may_be_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is synced once, before the first line: without the file's name, the line would be lost, too."""
    synced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, os.fstat(file).st_size)))
    sizes = []
    for number in (1, 2):
        budget(tmp_path).spend(number, STEPS)
        sizes.append((tmp_path / FILE).stat().st_size)
    record = (tmp_path / FILE).stat().st_ino
    assert [number for number, _ in synced] == [tmp_path.stat().st_ino, record, record]
    assert [size for number, size in synced if number == record] == sizes
    assert 0 < sizes[0] < sizes[1]


@pytest.mark.parametrize(
    "release",
    [{"noise_multiplier": -1.0}, {"noise_multiplier": math.nan}, {"noise_multiplier": math.inf}, {"sample_rate": 0.0},
     {"sample_rate": 1.5}, {"steps": 0}],
)  # fmt: skip
def test_a_release_that_cannot_be_is_refused(release):
    with pytest.raises(ValueError, match="finite noise multiplier of at least 0, a sample rate in"):
        replace(STEPS, **release)


def test_releases_are_composed() -> None:
    """Each row is a client's releases and their epsilons for a record and for the client, by hand."""
    steps, both = record_epsilon(2.0, 0.1, 50, DELTA), record_epsilon(2.0, 0.1, 100, DELTA)
    upload, half = client_epsilon(3.0, 1, DELTA, "local"), client_epsilon(1.5, 1, DELTA, "local")
    summed, half_summed = client_epsilon(3.0, 1, DELTA, "sum"), client_epsilon(1.5, 1, DELTA, "sum")
    for releases, record, client in [
        ([], 0.0, 0.0),
        ([STEPS], steps, math.inf),
        ([STEPS, STEPS], both, math.inf),
        ([UPLOAD], half, upload),
        ([TRUSTED], half, upload),
        ([SUM], half_summed, summed),
        ([DESCRIPTOR], client_epsilon(4.0, 1, DELTA, "local"), math.inf),
        ([STEPS, None], math.inf, math.inf),
    ]:
        assert epsilon_of(releases, "record", DELTA) == record
        assert epsilon_of(releases, "client", DELTA) == client
    for mixed in ([STEPS, UPLOAD], [STEPS, SUM], [UPLOAD, SUM], [STEPS, DESCRIPTOR]):
        alone = [epsilon_of([one], "record", DELTA) for one in mixed]
        assert max(alone) < epsilon_of(mixed, "record", DELTA) < math.inf


def test_what_the_owners_budget_counts() -> None:
    """The whole client as long as each release protects it; nothing counts that the node cannot check."""
    assert counted_epsilon([UPLOAD, SUM], DELTA) == ("client", epsilon_of([UPLOAD, SUM], "client", DELTA))
    assert counted_epsilon([UPLOAD, STEPS], DELTA) == ("record", epsilon_of([UPLOAD, STEPS], "record", DELTA))
    assert counted_epsilon([UPLOAD, TRUSTED], DELTA)[1] == counted_epsilon([None], DELTA)[1] == math.inf
    assert counted_epsilon([], DELTA)[1] == 0


def test_a_run_spends_its_horizon_and_no_message_more(tmp_path: Path) -> None:
    """Noise for epsilon 4 over 6 rounds of 50 steps allows exactly 6 uploads; one that is sent again is the seventh."""
    noise = record_noise(4.0, DELTA, 0.1, 300)
    one = budget(tmp_path, limit=4.0)
    release = replace(STEPS, noise_multiplier=noise)
    for number in range(1, 7):
        one.spend(number, release)
    with pytest.raises(RefusalError) as caught:
        one.spend(6, release)
    numbers = [
        "round 6 of run a",
        "client 0",
        "one record to 4.3",
        "at delta 1e-05",
        "max-epsilon = 4",
        "the 6 earlier",
    ]
    assert not [text for text in numbers if text not in str(caught.value)]
    public = for_others(caught.value)
    assert public == "the privacy budget that this node's owner allows (max-epsilon) does not suffice for this upload"
    assert len(read_record(one.path)) == 6  # what was refused was not released


def test_runs_add_up_and_clients_do_not(tmp_path: Path) -> None:
    limit = epsilon_of([STEPS] * 3, "record", DELTA)
    for experiment in ("a", "b", "c"):
        budget(tmp_path, experiment=experiment, limit=limit).spend(1, STEPS)
    with pytest.raises(RefusalError, match="round 1 of run d"):
        budget(tmp_path, experiment="d", limit=limit).spend(1, STEPS)
    budget(tmp_path, client=1, experiment="d", limit=limit).spend(1, STEPS)
    budget(tmp_path, experiment="d", limit=2 * limit).spend(1, STEPS)  # the owner allows more


@pytest.mark.parametrize("release", [None, TRUSTED, replace(UPLOAD, noise_multiplier=0.0)])
def test_what_the_node_cannot_check_is_refused(tmp_path: Path, release: Release | None) -> None:
    with pytest.raises(RefusalError) as caught:
        budget(tmp_path, limit=100.0).spend(1, release)
    assert for_others(caught.value) == NEEDS_BOUND
    assert read_record(tmp_path / FILE) == []
    budget(tmp_path).spend(1, release)  # without a limit it is only recorded
    with pytest.raises(RefusalError, match=r"to inf at delta .* an earlier upload is bounded by nothing that"):
        budget(tmp_path, limit=100.0).spend(2, STEPS)


def test_a_line_that_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    """Its release was not computed; a last line that only lacks its line break counts."""
    one = budget(tmp_path, limit=50.0)
    one.spend(1, STEPS)
    whole = one.path.read_bytes()
    one.path.write_bytes(whole + whole[:40])
    assert len(read_record(one.path)) == 1
    one.spend(2, STEPS)
    assert [entry.round for entry in read_record(one.path)] == [1, 2]
    one.path.write_bytes(one.path.read_bytes()[:-1])
    assert len(read_record(one.path)) == 2
    one.spend(3, STEPS)
    assert [entry.round for entry in read_record(one.path)] == [1, 2, 3]
    one.path.write_bytes(whole[:40])
    one.spend(4, STEPS)
    assert [entry.round for entry in read_record(one.path)] == [4]


@pytest.mark.parametrize(
    "line",
    ["[]", "7", "{}", "x", '{"bounded_by": "nothing"}', '{"time": "", "experiment": "", "client": 0, "round": 1}',
     json.dumps(json.loads(RecordedRelease(time="", experiment="", client=0, round=1, release=STEPS).line())
                | {"unit": "house"}),
     json.dumps(json.loads(RecordedRelease(time="", experiment="", client=0, round=1, release=STEPS).line())
                | {"noise_multiplier": "2"})],
)  # fmt: skip
def test_a_damaged_line_is_not_taken_for_nothing(tmp_path: Path, line: str) -> None:
    one = budget(tmp_path, limit=50.0)
    one.spend(1, STEPS)
    with one.path.open("a") as file:
        file.write(line + "\n")
    for call in (lambda: read_record(one.path), lambda: one.spend(2, STEPS)):
        with pytest.raises(StateError, match=r"line 2 of the privacy record .*privacy\.jsonl is damaged .*from a copy"):
            call()
    assert "privacy.jsonl" not in for_others(StateError(str(one.path)))


def test_a_record_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot be read: No such file or directory; give the privacy\.jsonl of"):
        read_record(tmp_path / FILE)
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be written: Not a directory"):
        budget(tmp_path / "file" / "state").spend(1, STEPS)


@pytest.fixture
def small_files() -> Iterator[int]:
    """Limit the files of this process to 1,000 bytes, like a disk that becomes full in the middle of a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    yield 1_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_for_the_line_nothing_is_released(tmp_path: Path, small_files: int) -> None:
    one = budget(tmp_path)
    one.spend(1, STEPS)
    for number in range(2, small_files // one.path.stat().st_size + 1):
        one.spend(number, STEPS)
    before = one.path.read_bytes()
    with pytest.raises(StateError, match="cannot be written: File too large; free disk space"):
        one.spend(9, STEPS)
    assert one.path.read_bytes() == before


def spend_many(folder: Path, limit: float, allowed: "multiprocessing.Queue[int]") -> None:
    count = 0
    for number in range(20):
        try:
            budget(folder, limit=limit).spend(number, UPLOAD)
        except RefusalError:
            continue
        count += 1
    allowed.put(count)


def test_processes_share_one_budget(tmp_path: Path) -> None:
    """Three processes try 60 uploads together; exactly as many are allowed as the budget has room for."""
    limit = client_epsilon(3.0, 25, DELTA, "local")
    context = multiprocessing.get_context("forkserver")
    allowed: multiprocessing.Queue[int] = context.Queue()
    processes = [context.Process(target=spend_many, args=(tmp_path, limit, allowed)) for _ in range(3)]
    for process in processes:
        process.start()
    counts = [allowed.get() for _ in processes]
    for process in processes:
        process.join()
    assert sum(counts) == len(read_record(tmp_path / FILE)) == 25


def spend_for_ever(folder: Path) -> None:
    number = 0
    while True:
        number += 1
        budget(folder).spend(number, STEPS)
        (folder / "released").write_text(str(number))


def test_a_process_that_is_killed_has_recorded_what_it_released(tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=spend_for_ever, args=(tmp_path,))
    process.start()
    while not (tmp_path / "released").exists():
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    released = int((tmp_path / "released").read_text() or 0)
    recorded = read_record(tmp_path / FILE)
    assert [entry.round for entry in recorded] == list(range(1, len(recorded) + 1))
    assert len(recorded) >= released
    budget(tmp_path).spend(0, STEPS)  # the lock is free
    assert len(read_record(tmp_path / FILE)) == len(recorded) + 1


def test_what_was_spent_by_client_and_run(tmp_path: Path) -> None:
    for client, experiment, release in [
        (1, "b", UPLOAD), (0, "a", STEPS), (1, "c", SUM), (0, "a", STEPS), (2, "a", TRUSTED), (3, "a", None),
        (0, "b", DESCRIPTOR),
    ]:  # fmt: skip
        budget(tmp_path, client=client, experiment=experiment).spend(1, release)
    rows = spent(read_record(tmp_path / FILE), DELTA)
    assert [(row.client, row.experiment, row.releases, row.bounded_by, row.replaces) for row in rows] == [
        (0, "a", 2, "client", False), (0, "b", 1, "client", True), (0, "", 3, "client", True),
        (1, "b", 1, "client", False), (1, "c", 1, "nodes", False), (1, "", 2, "nodes", False),
        (2, "a", 1, "server", False), (2, "", 1, "server", False),
        (3, "a", 1, "nothing", False), (3, "", 1, "nothing", False),
    ]  # fmt: skip
    assert rows[0].record_epsilon == record_epsilon(2.0, 0.1, 100, DELTA) < rows[2].record_epsilon
    assert rows[0].client_epsilon == math.inf
    assert rows[5].client_epsilon == rows[5].counted_epsilon == epsilon_of([UPLOAD, SUM], "client", DELTA)
    assert rows[6].client_epsilon < rows[6].counted_epsilon == math.inf


def test_the_noisy_steps_of_a_client_in_a_run(tmp_path: Path) -> None:
    """All rounds and repeated ones; not those of other runs, other clients, or other mechanisms."""
    noisy = Release(unit="record", mechanism="sampled-gaussian", noise_multiplier=1.0, sample_rate=0.1, steps=12)
    mine = budget(tmp_path, client=1)
    for number in (1, 2, 2):
        mine.spend(number, noisy)
    for other in (budget(tmp_path, client=11), budget(tmp_path, client=1, experiment="aa")):
        other.spend(1, noisy)
    mine.spend(0, Release(unit="record", mechanism="gaussian", noise_multiplier=1.0))
    mine.spend(0, None)
    assert noisy_steps(mine) == 36
    with mine.path.open("a") as file:
        file.write('{"time": "", "experiment": "a", "client": 1, "round": 3}\n')
    with pytest.raises(StateError, match="line 8 of the privacy record"):
        noisy_steps(mine)


def test_noise_of_unknown_nodes_is_the_server_s(tmp_path: Path) -> None:
    """Without a peers-file, the server names the nodes of a sum: it can invent all of them but one."""
    replace(budget(tmp_path), knows_nodes=False).spend(1, SUM)
    (entry,) = read_record(tmp_path / FILE)
    assert entry.release == replace(SUM, bounded_by="server")
    with pytest.raises(RefusalError, match="nothing on the node bounds"):
        replace(budget(tmp_path, client=1, limit=100.0), knows_nodes=False).spend(1, SUM)
    budget(tmp_path, client=1, limit=100.0).spend(1, SUM)
