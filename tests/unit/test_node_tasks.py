"""Taking tasks from the runtime API of a SuperNode: Flower's own application, served on loopback."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeState, NodeStateFactory

from hyperfl_flwr.flower.node_tasks import NodeTasks, installed_app


@pytest.fixture(scope="module")
def node() -> Iterator[tuple[str, NodeState]]:
    """Serve a SuperNode's runtime API; yields its address and its state."""
    factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
    app = create_app(state_factory=factory, superexec_auth_secret=b"right")
    server = uvicorn.Server(uvicorn.Config(app=app, host="127.0.0.1", port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    (port,) = {found.getsockname()[1] for each in server.servers for found in each.sockets}
    yield f"127.0.0.1:{port}", factory.state()
    server.should_exit = True
    thread.join()


def test_a_task_is_taken_once(node: tuple[str, NodeState]) -> None:
    address, state = node
    with NodeTasks(address, b"right") as tasks:
        assert tasks.take() is None
        assert state.create_task(task_type=TaskType.CLIENT_APP, run_id=1, fab_hash="0f") is not None
        task = tasks.take()
        assert task is not None
        assert task.fab_hash == "0f"
        assert state.get_task_by_token(task.token) is not None
        assert tasks.take() is None


def test_another_secret_takes_no_task(node: tuple[str, NodeState]) -> None:
    address, state = node
    assert state.create_task(task_type=TaskType.CLIENT_APP, run_id=1, fab_hash="0f") is not None
    with NodeTasks(address, b"wrong") as tasks, pytest.raises(PermissionError, match=r"refuses the request .* 401"):
        tasks.take()
    with NodeTasks(address, b"right") as tasks:
        assert tasks.take()


def test_a_supernode_that_does_not_answer_has_no_task() -> None:
    with NodeTasks("127.0.0.1:9", b"right") as tasks:
        assert tasks.take() is None


def test_an_app_is_found_where_flower_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert installed_app("12345678" + 56 * "0") is None
    folder = tmp_path / "apps" / "hyperfl.hyperfl-flwr.0.1.0.12345678"
    folder.mkdir(parents=True)
    assert installed_app("12345678" + 56 * "0") == folder
    assert installed_app("12345679" + 56 * "0") is None
    assert installed_app("*") is None
    assert installed_app("") is None
    (tmp_path / "apps" / "other.app.0.1.0.12345678").mkdir()
    assert installed_app("12345678" + 56 * "0") is None
