"""The private SuperLink: how runs end, and that no process outlives them. Starts Flower without any client."""

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE, eventually

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.flower.ray_start import ATTEMPTS
from hyperfl_flwr.launch import network_namespace, processes
from hyperfl_flwr.launch.flower.client import RunStatus
from hyperfl_flwr.launch.flower.env import federation_config
from hyperfl_flwr.launch.flower.local_superlink import LocalSuperLink
from hyperfl_flwr.launch.other_accounts import NOBODY

pytestmark = pytest.mark.slow

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "tiny"
version = "0.1.0"
description = "A server that does nothing"
license = { file = "LICENSE" }
requires-python = ">=3.11"
dependencies = ["flwr[simulation]>=1.41.0"]
[tool.hatch.build.targets.wheel]
packages = ["tiny"]
[tool.flwr.app]
publisher = "tests"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "tiny.apps:server"
clientapp = "tiny.apps:client"
[tool.flwr.app.config]
seconds = 0.0
message = ""
"""
APPS = """
import os
import time
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from hyperfl_flwr.flower.ray_start import prepare_ray
prepare_ray()
client = ClientApp()
server = ServerApp()
@server.main()
def main(grid, context):
    print("threads", os.environ["OMP_NUM_THREADS"], "home", os.environ["FLWR_HOME"], flush=True)
    time.sleep(context.run_config["seconds"])
    if context.run_config["message"]:
        raise ValueError(context.run_config["message"])
"""
# Starts a run that sleeps, names every process of its tree once Ray is up, and waits to be interrupted or killed.
VICTIM = """
import sys, time
from pathlib import Path
from hyperfl_flwr.launch import processes
from hyperfl_flwr.launch.flower.env import federation_config
from hyperfl_flwr.launch.flower.local_superlink import LocalSuperLink
app, run_config = Path(sys.argv[1]), Path(sys.argv[2])
with LocalSuperLink() as superlink:
    superlink.submit(app, run_config, federation_config(1, 1))
    while not any("raylet" in process.command for process in superlink._below()):
        time.sleep(0.1)
    time.sleep(0.5)
    pids = [superlink._supervisor.pid] + [process.pid for process in superlink._below()]
    print(superlink.home, *pids, flush=True)
    time.sleep(600)
"""
# Imported by Python before any program begins: the first dashboard agent of Ray waits longer than Ray waits for it.
SLOW_AGENT = """
import os, time
from pathlib import Path
if "dashboard/agent.py" in Path("/proc/self/cmdline").read_text():
    try:
        os.close(os.open(Path(__file__).with_name("slow"), os.O_CREAT | os.O_EXCL))
        time.sleep(25)
    except FileExistsError:
        pass
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    (folder / "tiny").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "LICENSE").write_text("none")
    (folder / "tiny" / "__init__.py").write_text("")
    (folder / "tiny" / "apps.py").write_text(APPS)
    return folder


def settings(folder: Path, text: str) -> Path:
    path = folder / f"settings-{len(list(folder.iterdir()))}.toml"
    path.write_text(text)
    return path


def wait_for(superlink: LocalSuperLink, run_id: int, status: str) -> RunStatus:
    eventually(lambda: superlink.status(run_id).status.startswith(status), status)
    return superlink.status(run_id)


def alive(pids: list[int]) -> list[processes.Process]:
    table = processes.process_table()
    return [table[pid] for pid in pids if pid in table]


@pytest.mark.extended
def test_two_at_once_one_completes_and_one_fails(app: Path, tmp_path: Path) -> None:
    federation = federation_config(1, 1)
    with LocalSuperLink(tmp_path / "home") as first, LocalSuperLink() as second:
        assert first.port != second.port
        good = first.submit(app, settings(tmp_path, ""), federation)
        bad = second.submit(app, settings(tmp_path, 'message = "the moon is made of cheese"'), federation)

        failed = wait_for(second, bad, "finished")
        assert (failed.status, failed.completed) == ("finished:failed", False)
        assert "the moon is made of cheese" in failed.details, second.log_tail(bad)
        assert "the moon is made of cheese" in second.log_tail(bad)

        with pytest.raises(RunFailedError, match=r"(?s)did not accept the run: .*[Ii]nvalid run config"):
            second.submit(app, settings(tmp_path, "unknown = 1"), federation)

        assert wait_for(first, good, "finished").completed
        text, position = first.read_log(good)
        assert f"threads 1 home {(tmp_path / 'home').resolve()}" in text
        assert first.read_log(good, position) == ("", position)
        with pytest.raises(RunFailedError, match="does not know the run 5"):
            first.status(5)
        assert first._client is not None
        assert first._client._ask_status(good) == first.status(good)  # Flower's command agrees with its database
        pids = [p.pid for link in (first, second) for p in link._below()]
        temporary = second.home
    assert not alive(pids)
    assert not temporary.exists()
    assert first.log_file.is_file()
    first.stop()


@pytest.mark.extended
def test_ray_is_started_again_if_the_machine_was_too_busy(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow-agent").mkdir()
    (tmp_path / "slow-agent" / "sitecustomize.py").write_text(SLOW_AGENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "slow-agent"))
    with LocalSuperLink(tmp_path / "home") as superlink:
        run_id = superlink.submit(app, settings(tmp_path, ""), federation_config(1, 1))
        done = wait_for(superlink, run_id, "finished")
        log = superlink.log_tail(run_id)
        assert done.completed, log
        assert f"Ray did not start in time; is this machine busy? Attempt 2 of {ATTEMPTS}" in log
    assert (tmp_path / "slow-agent" / "slow").exists()


@pytest.mark.extended
def test_a_killed_simulation_is_a_failed_run_and_a_killed_supervisor_leaves_nothing(app: Path, tmp_path: Path) -> None:
    superlink = LocalSuperLink()
    with superlink:
        run_ids = [superlink.submit(app, settings(tmp_path, "seconds = 600.0"), federation_config(1, 1))]
        wait_for(superlink, run_ids[0], "running")
        assert superlink.status(run_ids[0]) == RunStatus(status="running")
        os.kill(next(p.pid for p in superlink._below() if "flwr-simulation" in p.command), signal.SIGKILL)
        assert "killed" in wait_for(superlink, run_ids[0], "finished:failed").details

        run_ids.append(superlink.submit(app, settings(tmp_path, "seconds = 600.0"), federation_config(1, 1)))
        wait_for(superlink, run_ids[1], "running")
        pids = [p.pid for p in superlink._below()]
        assert superlink._supervisor is not None
        superlink._supervisor.kill()
        superlink._supervisor.wait()
        with pytest.raises(RunFailedError, match="SuperLink ended"):
            superlink.status(run_ids[1])
    assert not alive(pids)
    assert not superlink.home.exists()


def status_as(user: int, port: int) -> int:
    """Return the HTTP status that another user of this machine gets from a port; 0 if it cannot connect.

    The request comes from a forked process, since the other user may not be allowed to read this Python's files.
    """
    child = os.fork()
    if child == 0:
        os.setuid(user)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health")
            os._exit(connection.getresponse().status // 100)
        except ConnectionRefusedError:
            os._exit(0)
        finally:
            os._exit(9)
    return 100 * os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(bool(network_namespace.obstacle({})), reason="the kernel allows no network namespaces")
def test_another_user_cannot_connect_to_the_superlink() -> None:
    """Anyone who can connect can submit an app, which runs as the user of the SuperLink."""
    with LocalSuperLink(private=False) as reachable:
        assert status_as(NOBODY, reachable.port) == 200
    with LocalSuperLink() as superlink:
        assert status_as(NOBODY, superlink.port) == 0
        network = superlink._network
        assert network is not None
        assert all(network.contains(process.pid) for process in superlink._below())
        assert not network.contains(os.getpid())


RAY_CLIENT = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='FATAL')"


@pytest.mark.extended
def test_ray_of_a_shared_network_asks_for_a_token(app: Path, tmp_path: Path) -> None:
    """Without network namespaces Ray's ports are reachable, and its token protects them."""
    with LocalSuperLink(private=False) as superlink:
        superlink.submit(app, settings(tmp_path, "seconds = 600.0"), federation_config(1, 1))

        def raylets() -> list[processes.Process]:
            return [process for process in superlink._below() if "raylet/raylet" in process.command]

        eventually(raylets, "Ray", every=0.2)
        (raylet,) = raylets()
        found = re.search(r"--gcs-address=(\S+)", raylet.command)
        assert found is not None
        lines = Path(f"/proc/{raylet.pid}/environ").read_text().split("\0")
        variables = dict(line.partition("=")[::2] for line in lines)
        token = variables["RAY_AUTH_TOKEN"]
        stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        stranger["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
        command = [sys.executable, "-c", RAY_CLIENT, found[1]]
        done = subprocess.run(command, env=stranger, capture_output=True, timeout=PATIENCE, check=False)
        assert done.returncode != 0
        known = stranger | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        assert found[1].startswith("127.0.0.1:")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_that_names_the_port_is_left_alone() -> None:
    with LocalSuperLink(private=False) as superlink:
        name = f"flower-superlink --port {superlink.port} "
        stranger = subprocess.Popen(["/bin/bash", "-c", f"exec -a '{name}' sleep 60"], user=NOBODY)
        while name not in processes.process_table()[stranger.pid].command + " ":
            time.sleep(0.02)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


@pytest.fixture
def victim(app: Path, tmp_path: Path) -> "Iterator[tuple[subprocess.Popen[str], Path, list[int]]]":
    """Yield a process in the middle of a run, its SuperLink's home and its descendants."""
    command = [sys.executable, "-c", VICTIM, str(app), str(settings(tmp_path, "seconds = 600.0"))]
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        home, *words = process.stdout.readline().split()
        pids = [int(word) for word in words]
        assert len(alive(pids)) >= 6
        yield process, Path(home), pids
        process.kill()
    processes.kill_all(lambda: alive(pids))


def test_an_interrupted_run_leaves_no_process(victim: "tuple[subprocess.Popen[str], Path, list[int]]") -> None:
    process, home, pids = victim
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert "KeyboardInterrupt" in error
    assert not alive(pids)
    assert not home.exists()


def test_a_killed_run_leaves_no_process(victim: "tuple[subprocess.Popen[str], Path, list[int]]") -> None:
    process, home, pids = victim
    process.kill()
    process.wait()
    eventually(lambda: not alive(pids), "the end of its processes")
    assert not home.exists()
