"""The models that a client has received last stay on the node's disk, whatever rounds the server names."""

import stat
from pathlib import Path

import numpy as np
import pytest

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.node.received_models import ReceivedModels


def models(folder: Path, experiment: str = "e", client: int = 0) -> ReceivedModels:
    """Return the models as a process that has just started finds them."""
    return ReceivedModels(PrivateState(folder, experiment, client))


def keep(folder: Path, server_round: int) -> None:
    models(folder).keep(server_round, {"layer": np.full(3, server_round, np.float32)}, {"loss": server_round})


def before(folder: Path, server_round: int) -> int:
    found = models(folder).before(server_round)
    assert found is not None
    arrays, facts = found
    assert arrays["layer"].tolist() == [facts["loss"]] * 3
    return int(facts["loss"])


def test_a_round_is_compared_with_the_one_before_after_a_restart(tmp_path: Path) -> None:
    assert models(tmp_path).before(1) is None
    for server_round in (1, 2, 5):
        keep(tmp_path, server_round)
    assert before(tmp_path, 6) == 5
    assert before(tmp_path, 5) == 2  # the message comes again
    assert len(list(tmp_path.rglob("received-*"))) == 2


def test_a_server_cannot_name_a_round_before_which_nothing_is_known(tmp_path: Path) -> None:
    keep(tmp_path, 4)
    keep(tmp_path, 5)
    assert before(tmp_path, 1) == 5
    keep(tmp_path, 1)
    assert before(tmp_path, 1) == 1
    assert before(tmp_path, 2) == 1  # a resumed run


def test_files_are_the_owner_s_and_of_one_run(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    (path,) = tmp_path.rglob("received-*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(StateError, match="must belong to"):
        models(tmp_path, "other").before(2)
    assert models(tmp_path, client=1).before(2) is None
    path.write_bytes(b"")
    with pytest.raises(StateError, match="is damaged"):
        before(tmp_path, 2)


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "client-00000").write_text("")
    with pytest.raises(StateError, match="the model that client 0 has received in round 3 is not stored"):
        keep(tmp_path, 3)
