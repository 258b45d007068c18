"""The worker of a node: what a forked process shares with others and what not, and what ends it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.deploy import worker, worker_secret

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not worker.is_possible(), reason="a worker needs Linux")

PROGRAM = """
import os, sys, time
from pathlib import Path
from hyperfl_flwr.deploy.worker import end, start

def run(handle):
    process = start(handle)
    process.join()
    return process.exitcode
"""


def result(
    program: str, *words: object, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process without threads."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program, *map(str, words)], capture_output=True, text=True, check=False,
        env={**environment, "PYTHONPATH": str(ROOT)}, timeout=120,
    )  # fmt: skip


def test_the_pause_between_requests_grows_with_the_idle_time() -> None:
    assert [worker.pause(idle, is_busy=False) for idle in (0, 1, 10, 20, 1e6)] == [0.1, 0.1, 0.5, 1.0, 1.0]
    assert worker.pause(0.0, is_busy=True) == 1.0


def test_only_its_owner_can_read_the_secret(tmp_path: Path) -> None:
    words = worker_secret.supernode_arguments(tmp_path).split()
    assert words == ["--isolation", "process", "--superexec-auth-secret-file", str(tmp_path / worker_secret.KEY_FILE)]
    secret = worker_secret.read_secret(tmp_path)
    assert len(secret) == 32
    assert (tmp_path / worker_secret.KEY_FILE).stat().st_mode & 0o777 == 0o600
    worker_secret.supernode_arguments(tmp_path)
    assert worker_secret.read_secret(tmp_path) != secret


def test_a_secret_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    worker_secret.supernode_arguments(tmp_path)
    file = tmp_path / worker_secret.KEY_FILE
    file.chmod(0o640)
    with pytest.raises(StateError, match="must be yours alone"):
        worker_secret.read_secret(tmp_path)
    file.chmod(0o600)
    file.rename(tmp_path / "other")
    file.symlink_to(tmp_path / "other")
    with pytest.raises(StateError, match="cannot be read"):
        worker_secret.read_secret(tmp_path)
    file.unlink()
    with pytest.raises(StateError, match="cannot be read"):
        worker_secret.read_secret(tmp_path)
    os.mkfifo(file, 0o600)
    with pytest.raises(StateError, match="must be yours alone"):
        worker_secret.read_secret(tmp_path)


BUNDLE = """
import hyperfl_flwr.core.rng, numpy
before = sys.modules["numpy"]

def handle():
    sys.path.insert(0, sys.argv[1])
    import hyperfl_flwr, numpy
    print(hyperfl_flwr.MARK, "hyperfl_flwr.core.rng" in sys.modules, numpy is before, flush=True)
    raise SystemExit(7)

print(run(handle), "hyperfl_flwr.core.rng" in sys.modules)
"""


def test_a_message_imports_the_project_from_the_bundle_and_other_packages_not_again(tmp_path: Path) -> None:
    package = tmp_path / "hyperfl_flwr"
    package.mkdir()
    (package / "__init__.py").write_text("MARK = 'the bundle'\n")
    found = result(BUNDLE, tmp_path)
    assert found.stdout.splitlines() == ["the bundle False True", "7 True"], found.stderr


IMPORTED = """
from hyperfl_flwr.deploy.worker import import_app

def handle():
    before = list(sys.path)
    import_app(Path(sys.argv[1]))
    print(sorted(name for name in sys.modules if name.startswith("hyperfl_flwr")), sys.path == before, flush=True)
    raise SystemExit(0)

run(handle)
"""


def test_an_installed_app_is_imported_from_its_bundle_or_left_to_flower(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    folder = bundle / "hyperfl_flwr" / "app"
    folder.mkdir(parents=True)
    assert result(IMPORTED, bundle).stdout == "[] True\n"  # another app
    (folder / "client.py").touch()
    (folder / "node.py").touch()
    assert result(IMPORTED, bundle).stdout == "[] True\n"  # without __init__.py, the installed package comes first
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    expected = ["hyperfl_flwr", "hyperfl_flwr.app", "hyperfl_flwr.app.client", "hyperfl_flwr.app.node"]
    assert result(IMPORTED, bundle).stdout == f"{expected} False\n"
    (folder / "node.py").write_text("raise ValueError")
    assert result(IMPORTED, bundle).stdout == "[] True\n"


NUMBERS = """
import random, numpy, torch

def handle():
    numbers = (random.random(), numpy.random.rand(), torch.rand(()).item(), torch.initial_seed())
    print(*numbers, Path("/proc/self/comm").read_text().strip(), flush=True)
    raise SystemExit(0)

for _ in range(2):
    run(handle)
"""


def test_processes_share_no_random_numbers() -> None:
    first, second = (line.split() for line in result(NUMBERS).stdout.splitlines())
    *numbers, name = first
    *others, its_name = second
    assert len(numbers) == 4
    assert all(number != other for number, other in zip(numbers, others, strict=True))
    assert name == its_name == "flwr-clientapp"


COMPUTING = """
import numpy, torch

def handle():
    rng = numpy.random.default_rng(0)
    matrix = rng.standard_normal((400, 400))
    numpy.linalg.svd(matrix)
    weights = torch.from_numpy(matrix).requires_grad_(True)
    (weights @ weights).sum().backward()
    torch.nn.functional.conv2d(torch.ones(8, 3, 32, 32), torch.ones(16, 3, 5, 5))
    print(bool(weights.grad.isfinite().all()), flush=True)
    raise SystemExit(0)

numpy.linalg.svd(numpy.eye(400) + 1.0)  # starts the threads of numpy's library, if it has any
print(run(handle), run(handle))
"""


def test_a_process_computes_with_threads_after_the_fork() -> None:
    """The worker's libraries may have threads of their own, of which a forked process has none at first."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    found = result(COMPUTING, environment=environment)
    assert found.stdout.splitlines() == ["True", "True", "0 0"], found.stderr


def test_a_new_package_beside_this_one_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this project is installed with the others, in one folder."""
    monkeypatch.syspath_prepend(tmp_path)
    before = worker.installed()
    assert str(tmp_path) in before
    assert worker.installed() == before
    (tmp_path / "new_package").mkdir()
    assert worker.installed() != before
    monkeypatch.syspath_prepend(tmp_path / "gone")
    assert str(tmp_path / "gone") not in worker.installed()


def test_only_this_users_listeners_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert not worker.is_own_listener(port)  # it does not listen yet
        listener.listen()
        assert worker.is_own_listener(port)
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        assert not worker.is_own_listener(port)
    with socket.socket() as everywhere:
        everywhere.bind(("0.0.0.0", 0))
        everywhere.listen()
        monkeypatch.undo()
        assert not worker.is_own_listener(everywhere.getsockname()[1])


FAILING = """
def handle():
    raise ValueError("wrong")

print(run(handle))
"""


def test_an_error_ends_the_process_alone() -> None:
    found = result(FAILING)
    assert found.stdout == "1\n"
    assert "ValueError: wrong" in found.stderr


THREADED = """
import threading
threading.Thread(target=time.sleep, args=(60,), daemon=True, name="other").start()
run(lambda: None)
"""


def test_a_process_with_threads_is_not_forked() -> None:
    found = result(THREADED)
    assert found.returncode == 1
    assert "a process with threads cannot be forked: ['MainThread', 'other']" in found.stderr


TRAINING = """
import torch
from hyperfl_flwr.deploy.worker import preload
preload()

def handle():
    torch.set_num_threads(2)
    matrix = torch.randn(600, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    array = matrix.numpy()
    print(torch.get_num_threads(), bool(torch.allclose(matrix @ matrix, torch.from_numpy(array @ array))), flush=True)
    raise SystemExit(0)

print(torch.cuda.is_initialized(), [run(handle) for _ in range(2)])
"""


def test_processes_compute_with_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's imports start threads of numpy's library, which end before a fork; and no CUDA context."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    found = result(TRAINING)
    assert found.stdout.splitlines() == ["2 True", "2 True", "False [0, 0]"], found.stderr


SPAWNING = """
import multiprocessing

def handle():
    process = multiprocessing.get_context("spawn").Process(target=os._exit, args=(5,))
    process.start()
    process.join()
    print(process.exitcode, flush=True)
    raise SystemExit(0)

if __name__ == "__main__":
    run(handle)
"""


def test_a_process_that_a_message_spawns_does_not_run_the_workers_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"print('begins', flush=True){PROGRAM}{SPAWNING}")
    found = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60,
    )  # fmt: skip
    assert found.stdout.splitlines() == ["begins", "5"], found.stderr


def sleeping(tmp_path: Path, last: str) -> int:
    """Return the id of a forked process that sleeps, once it has begun."""
    program = f"""
def handle():
    Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(300)

process = start(handle)
while not Path(sys.argv[1]).exists() or not Path(sys.argv[1]).read_text():
    time.sleep(0.01)
{last}
"""
    file = tmp_path / "pid"
    result(program, file)
    return int(file.read_text())


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_process_that_still_runs_is_ended(tmp_path: Path) -> None:
    assert is_gone(sleeping(tmp_path, "end([process])"))


def test_a_process_ends_when_the_worker_is_killed(tmp_path: Path) -> None:
    """The message then fails, and the server sends it again."""
    pid = sleeping(tmp_path, f"os.kill(os.getpid(), {int(signal.SIGKILL)})")
    end = time.monotonic() + 60
    while not is_gone(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert is_gone(pid)


def test_a_change_of_the_installed_packages_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = worker.installed()
    assert worker.installed() == before
    (tmp_path / "new_package").mkdir()
    assert worker.installed() != before


REPLACED = """
import os, sys, time
from pathlib import Path
from hyperfl_flwr.deploy import worker
from hyperfl_flwr.flower import node_tasks

folder, log = Path(sys.argv[1]), Path(sys.argv[2])
worker.installed = lambda: {str(folder): folder.stat().st_mtime_ns}
worker.is_own_listener = lambda port: True


def say(what):
    with log.open("a") as file:
        print(what, os.getpid(), file=file)


class Tasks:
    address, names = "127.0.0.1:9", ["first", "second", "third"]

    def __init__(self, *_):
        pass

    __enter__ = lambda self: self
    __exit__ = close = lambda self, *_: None

    def take(self):
        if not self.names or (len(self.names) < 3 and not log.exists()):
            return None  # no message, or the first one is not handled yet
        if len(self.names) == 3:
            (folder / "new_package").mkdir()
        return node_tasks.Task(token=self.names.pop(0), fab_hash="0" * 64)


def in_fork(address, token):
    say(token)
    while "third" not in log.read_text():
        time.sleep(0.05)
    raise SystemExit(0)


def restart(*_):
    say("restart")
    raise SystemExit(0)


node_tasks.NodeTasks, node_tasks.run_client_app = Tasks, in_fork
node_tasks._PROGRAM = (
    f"import os; print(os.environ['HYPERFL_TASK'].split()[-1], os.getpid(), file=open({str(log)!r}, 'a'))"
)
os.execv = restart
reading, writing = os.pipe()
worker._serve(9, b"", reading)
"""


def test_messages_go_on_while_packages_are_replaced(tmp_path: Path) -> None:
    """While an earlier message still runs, the next ones get new interpreters; then the worker starts again.

    A process of a stopped run may stay for long, and must not keep the node from taking part in the next one.
    """
    packages, log = tmp_path / "packages", tmp_path / "log"
    packages.mkdir()
    done = result(REPLACED, packages, log)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [name for name, _ in lines] == ["first", "second", "third", "restart"]
    assert len({pid for _, pid in lines}) == 4


def watches(pid: int) -> bool:
    """Return whether a process has opened another one to wait for its end."""
    with contextlib.suppress(OSError):
        return any(str(file.readlink()) == "anon_inode:[pidfd]" for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_the_worker_ends_with_its_supernode(tmp_path: Path) -> None:
    """The SuperNode is a process that ends; the worker finds no SuperNode at its port, and waits."""
    worker_secret.supernode_arguments(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as supernode:
        command = [sys.executable, "-m", "hyperfl_flwr", "deploy", "worker", str(tmp_path)]
        served = subprocess.Popen(
            [*command, "--port", "9", "--supernode", str(supernode.pid)], env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        while not watches(served.pid):
            assert served.poll() is None
            time.sleep(0.05)
        supernode.kill()
        supernode.wait()
        _, errors = served.communicate(timeout=60)
    assert (served.returncode, errors) == (0, "")
