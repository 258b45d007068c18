"""Network namespaces of simulations, and warnings for users of machines without them."""

import contextlib
import ctypes
import os
import pwd
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from hyperfl_flwr.launch import network_namespace, other_accounts
from hyperfl_flwr.launch.findings import Level
from hyperfl_flwr.launch.network_namespace import Network

CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=5)"
INTERFACES = "import socket; print(*[name for _, name in socket.if_nameindex()])"

needs_namespaces = pytest.mark.skipif(
    bool(network_namespace.obstacle({})), reason=f"no network namespaces: {network_namespace.obstacle({})}"
)


@pytest.fixture
def port() -> Iterator[int]:
    """Start a server on the loopback interface that answers `/health`; yield its port."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_namespaces
def test_a_new_network_has_its_own_loopback_interface_only(port: int) -> None:
    assert run([sys.executable, "-c", CONNECT, str(port)]).returncode == 0
    there = run(network_namespace.in_new_network([sys.executable, "-c", CONNECT, str(port)]))
    assert "ConnectionRefusedError" in there.stderr
    assert run(network_namespace.in_new_network([sys.executable, "-c", INTERFACES])).stdout.split() == ["lo"]


@contextlib.contextmanager
def waiting(prefix: list[str]) -> "Iterator[subprocess.Popen[bytes]]":
    """Start a process that waits for the end of the block."""
    command = [*prefix, sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process


@needs_namespaces
def test_the_same_user_reaches_a_port_in_it_and_keeps_the_identity() -> None:
    serve = (
        "import os, socket; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], os.getuid(), os.getgid(), flush=True); s.accept()"
    )
    command = network_namespace.in_new_network([sys.executable, "-c", serve])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        there, user, group = process.stdout.readline().split()
        assert (int(user), int(group)) == (os.getuid(), os.getgid())
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(there)), timeout=5)
        with Network(process.pid) as network:
            assert network.contains(process.pid)
            assert not network.contains(os.getpid())
            assert run(network.entered_by([sys.executable, "-c", CONNECT, there])).returncode == 0


@needs_namespaces
def test_a_network_that_is_held_open_is_not_taken_for_a_later_one() -> None:
    """It is held open because the kernel gives the number of an ended namespace to the next one."""
    with waiting(network_namespace.in_new_network([])) as first:
        network = Network(first.pid)
    with network, waiting(network_namespace.in_new_network([])) as second, Network(second.pid):
        assert not network.contains(second.pid)
    assert not network.contains(os.getpid())


@needs_namespaces
def test_a_process_without_a_network_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_namespace, "ENTER_SECONDS", 0.1)
    with pytest.raises(ProcessLookupError, match="has no private network namespace"):
        Network(os.getpid())
    monkeypatch.setattr(network_namespace, "ENTER_SECONDS", 1e6)
    with pytest.raises(ProcessLookupError):
        Network(os.getpid(), lambda: False)


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="root has no user namespace of its own, others have")
def test_root_never_enters_a_user_namespace() -> None:
    """The user who has created such a namespace may control the processes in it."""
    with waiting(["unshare", "--user", "--net"]) as stranger, Network(stranger.pid) as network:
        assert "user" not in " ".join(str(Path(word).readlink()) for word in network.entered_by([]) if "/fd/" in word)


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_unprivileged_user_gets_a_network_too_and_another_cannot_enter_it() -> None:
    """An unprivileged process gets its own network, and a process of another user gets a PermissionError.

    Both are forked, since another user may not be allowed to read this Python's files. In /proc, a process that changes
    its user without running a program belongs to root until it is made dumpable.
    """
    set_dumpable = 4
    told, tell = os.pipe()
    owner = os.fork()
    if owner == 0:
        os.setgid(other_accounts.NOBODY)
        os.setuid(other_accounts.NOBODY - 1)
        ctypes.CDLL(None).prctl(set_dumpable, 1, 0, 0, 0)
        try:
            network_namespace._enter_new()
            names = [name for _, name in socket.if_nameindex()]
            os.write(tell, f"{' '.join(names)} {os.getuid()}\n".encode())
            threading.Event().wait(60)
        finally:
            os._exit(1)
    try:
        with os.fdopen(told) as answers:
            os.close(tell)
            assert answers.readline().split() == ["lo", str(other_accounts.NOBODY - 1)]
        stranger = os.fork()
        if stranger == 0:
            os.setuid(other_accounts.NOBODY)
            try:
                Network(owner)
            except PermissionError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(stranger, 0)[1]) == 7
    finally:
        os.kill(owner, 9)
        os.waitpid(owner, 0)


def test_the_health_check_ends_when_the_server_answers(port: int) -> None:
    assert run(network_namespace.health_check(port)).returncode == 0


def test_the_user_can_share_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network_namespace.obstacle({network_namespace.SHARED: "1"}) == "HYPERFL_SHARE_NETWORK=1"


def test_other_people_with_processes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's accounts, `nobody`, the current user and ids without an account are left out."""
    accounts = {0: "root", 33: "www-data", 1001: "ann", 1003: "bob", 65534: "nobody", 70_001: "carol"}

    def getpwuid(number: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((accounts[number], "x", number, number, "", "/", "/bin/sh"))

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    monkeypatch.setattr(os, "getuid", lambda: 1003)
    assert other_accounts.other_accounts([*accounts, 100_000]) == ["ann", "carol"]
    assert other_accounts.other_accounts([0, 33, 1003, 2**32 - 2]) == []
    monkeypatch.setattr(other_accounts, "FIRST_USER_ID", 500)  # as on macOS
    accounts[501] = "eve"
    assert other_accounts.other_accounts([0, 501]) == ["eve"]


def test_hidden_processes_count_as_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """If /proc is mounted with hidepid and so hides the processes of others, other users are assumed."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "1" and exists(path))
    assert other_accounts.other_accounts() == [other_accounts.UNSEEN]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_account_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    user = 54_321
    accounts = {user: pwd.struct_passwd(("dora", "x", user, user, "", "/", "/bin/sh"))}
    monkeypatch.setattr(pwd, "getpwuid", lambda number: accounts[number])
    assert other_accounts.other_accounts() == []
    with subprocess.Popen(["/bin/sleep", "60"], user=user) as process:
        assert other_accounts.other_accounts() == ["dora"]
        process.kill()


@pytest.mark.parametrize(
    ("obstacle", "names", "level", "text"),
    [
        ("", ["ann"], Level.OK, "which other users cannot enter"),
        ("Operation not permitted", [], Level.OK, "Operation not permitted"),
        ("Operation not permitted", ["ann"], Level.WARNING, "other users of this machine (ann) can reach the ports"),
    ],
)
def test_a_shared_machine_without_namespaces_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, obstacle: str, names: list[str], level: Level, text: str
) -> None:
    monkeypatch.setattr(network_namespace, "obstacle", lambda: obstacle)
    monkeypatch.setattr(other_accounts, "other_accounts", lambda: names)
    (finding,) = other_accounts.simulations()
    assert finding.level is level
    assert text in finding.text
    assert bool(other_accounts.simulation_warning()) is (level is Level.WARNING)
    if finding.level is Level.WARNING:
        assert "--engine in-process" in finding.remedy


def test_deployments_warn_of_other_accounts_whatever_the_kernel_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"user{number}" for number in range(7)]
    monkeypatch.setattr(other_accounts, "other_accounts", lambda: names)
    (finding,) = other_accounts.deployments()
    assert finding.level is Level.WARNING
    assert "user0, user1, user2, user3, user4 and 2 more" in finding.text
    monkeypatch.setattr(other_accounts, "other_accounts", list)
    assert [found.level for found in other_accounts.deployments()] == [Level.OK]
