"""A node's record of a run: the settings of its first message, and whether models may leave for a matrix."""

import json
import multiprocessing
from functools import partial
from pathlib import Path

import pytest

from hyperfl_flwr.app.node import NodeApp
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.table import default_settings, resumable_changes
from hyperfl_flwr.core.errors import RefusalError, StateError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.node import run_record
from hyperfl_flwr.node.run_record import FILE

SETTINGS = default_settings() | {"method": "local", "dp.epsilon": 0.0}

keep_record = partial(run_record.keep_record, defaults=default_settings(), may_change=resumable_changes())


def test_a_run_keeps_its_settings(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "run"
    assert not keep_record(folder, SETTINGS, allows_matrix=False)
    assert (folder.stat().st_mode & 0o777, (folder / FILE).stat().st_mode & 0o777) == (0o700, 0o600)
    assert not keep_record(folder, SETTINGS | {"num-rounds": 99, "device": "cpu"}, allows_matrix=False)
    with pytest.raises(RefusalError, match=r"the settings dp\.epsilon, method are not those of this run's first"):
        keep_record(folder, SETTINGS | {"method": "fedavg", "dp.epsilon": 1.0}, allows_matrix=False)
    assert not keep_record(folder, SETTINGS, allows_matrix=False)


def test_a_setting_of_a_later_version_has_its_default(tmp_path: Path) -> None:
    older = {key: value for key, value in SETTINGS.items() if key != "momentum"}
    keep_record(tmp_path / "run", older, allows_matrix=False)
    keep_record(tmp_path / "run", SETTINGS, allows_matrix=False)
    with pytest.raises(RefusalError, match="the settings momentum are not"):
        keep_record(tmp_path / "run", SETTINGS | {"momentum": 0.123}, allows_matrix=False)


def test_a_matrix_is_allowed_from_the_first_message_on(tmp_path: Path) -> None:
    assert not keep_record(tmp_path / "without", SETTINGS, allows_matrix=False)
    assert not keep_record(tmp_path / "without", SETTINGS, allows_matrix=True)
    assert keep_record(tmp_path / "with", SETTINGS, allows_matrix=True)
    assert keep_record(tmp_path / "with", SETTINGS, allows_matrix=True)
    with pytest.raises(RefusalError, match="this run began with cross-site = true"):
        keep_record(tmp_path / "with", SETTINGS, allows_matrix=False)


def test_files_without_a_record_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "client-00000").mkdir(parents=True)
    with pytest.raises(RefusalError, match="of an earlier version"):
        keep_record(tmp_path / "run", SETTINGS, allows_matrix=True)
    assert (tmp_path / "run" / FILE).read_bytes() == b""


def test_what_a_crash_has_left_is_no_record(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(json.dumps({"settings": SETTINGS | {"method": "fedavg"}}).encode()[:-20])
    assert keep_record(tmp_path, SETTINGS, allows_matrix=True)
    with pytest.raises(RefusalError):
        keep_record(tmp_path, SETTINGS | {"method": "fedavg"}, allows_matrix=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StateError, match="the record of this run is not kept, so the node takes no part"):
        keep_record(tmp_path / "state" / "run", SETTINGS, allows_matrix=False)


def _tries(folder: Path, number: int) -> bool:
    try:
        keep_record(folder, SETTINGS | {"seed": number}, allows_matrix=False)
    except RefusalError:
        return False
    return True


def test_of_several_first_messages_one_is_recorded(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        done = pool.starmap(_tries, [(tmp_path / "run", number) for number in range(8)], chunksize=1)
    assert sum(done) == 1
    assert len((tmp_path / "run" / FILE).read_bytes().splitlines()) == 1


def node(**settings: Scalar) -> NodeApp:
    own = NodeConfig.of({"partition-id": 0, "num-partitions": 2, "device": "cpu", "threads": 1})
    return NodeApp(own, default_settings() | {"num-clients": 2} | settings)


def test_a_resumed_run_may_have_auto_or_its_number(tmp_path: Path) -> None:
    first = node(method="hyperfl")
    number = first.config.flat()["learning-rate"]
    assert isinstance(number, float)
    first._keep_record(tmp_path / "run")
    node(**{"method": "hyperfl", "learning-rate": number, "num-rounds": 99})._keep_record(tmp_path / "run")
    with pytest.raises(RefusalError, match="learning-rate are not"):
        node(**{"method": "hyperfl", "learning-rate": number / 2})._keep_record(tmp_path / "run")


def test_noisy_steps_keep_their_number_of_rounds(tmp_path: Path) -> None:
    node(**{"dp.epsilon": 1.0, "num-rounds": 100})._keep_record(tmp_path / "run")
    with pytest.raises(RefusalError, match="the settings num-rounds are not"):
        node(**{"dp.epsilon": 1.0, "num-rounds": 1})._keep_record(tmp_path / "run")
