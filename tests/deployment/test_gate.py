"""nginx in front of the SuperLink, as in docs/how-to/deploy-security.md: it admits nodes, but no runs of others.

Both use the same port: nginx at 127.0.0.2, which stands for the public address, and the SuperLink at 127.0.0.1. Limits
per address keep hundreds of idle or slow connections from keeping a node out.
"""

import contextlib
import json
import os
import resource
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from gate_attacks import ATTACKS, NUMBER, UNREAD, attack, begun_body, is_closed, request, served, status_of
from gates import INSIDE, OUTSIDE, ROOT, call, needs_nginx, running_gate
from programs import HYPERFL, LocalDeployment, finished
from waiting import PATIENCE, eventually

from hyperfl_flwr.deploy.gate import sent_key
from hyperfl_flwr.deploy.render import render
from hyperfl_flwr.launch.flower.env import flower_command
from hyperfl_flwr.runs.run_directory import read_metrics

ELSEWHERE = "127.0.0.3"
"""An address other than the nodes' 127.0.0.1."""

CLOSED_AFTER = 35.0
"""Seconds until nginx has closed idle and slow connections; docs/how-to/deploy-security.md has the limits."""

SLOW_STEPS = 40
"""Parts in which a slow link sends a body, one per second."""

SlowBody = Future[tuple[int, float]]
"""Status of the answer to a slow body, and the seconds that it took."""

pytestmark = needs_nginx()


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """Return a deployment with two nodes that are online through nginx."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 8000:
        pytest.skip("needs 8000 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 8000), hard))
    try:
        with running_gate(tmp_path_factory.mktemp("operator")) as made:
            yield made
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def slow_body(gate: LocalDeployment) -> Iterator[SlowBody]:
    """Send a body of 5 MiB in 40 s, while other connections wait to be closed."""
    size = 5 << 20
    lines = (f"Content-Type: {PROTOBUF_MEDIA_TYPE}", f"Content-Length: {size}")

    def pieces() -> Iterator[bytes]:
        for _ in range(SLOW_STEPS):
            time.sleep(1.0)
            yield b"\xff" * (size // SLOW_STEPS)

    def send() -> tuple[int, float]:
        began = time.monotonic()
        status = status_of(gate, INSIDE, request(UNREAD, *lines, node=0, made=gate), pieces())
        return status, time.monotonic() - began

    with ThreadPoolExecutor(1) as executor:
        yield executor.submit(send)


def flwr(made: LocalDeployment, home: Path, host: str, *words: object) -> tuple[int, str]:
    """Run Flower's own command against the SuperLink at an address; return (exit code, output)."""
    text = render("flower_config.toml.jinja", port=made.deployment.port, certificate=made.deployment.server / "ca.crt")
    (home / "config.toml").write_text(text.replace(INSIDE, host))
    settings = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    done = subprocess.run(
        [flower_command("flwr"), *map(str, words)], env={**os.environ, **settings}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def runs(made: LocalDeployment) -> int:
    """Return how many runs the SuperLink has accepted so far."""
    name = f"{made.deployment.database.as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(name, uri=True, timeout=5)) as connection:
        count: int = connection.execute("SELECT count(*) FROM run").fetchone()[0]
        return count


def test_nodes_come_online_through_nginx(gate: LocalDeployment) -> None:
    assert call(gate, OUTSIDE, "GET", "/health")[:2] == (200, "nginx")
    assert call(gate, INSIDE, "GET", "/health")[:2] == (200, "uvicorn")
    assert gate.superlink.nodes() == {0: True, 1: True}
    for folder in (gate.folder, gate.deployment.node(0)):
        done = subprocess.run([HYPERFL, "deploy", "check", folder], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        assert "error" not in done.stdout


def test_others_submit_no_run_and_see_none(gate: LocalDeployment, tmp_path: Path) -> None:
    before = runs(gate)
    for words in (("list", "hyperfl"), ("run", ROOT, "hyperfl")):
        code, said = flwr(gate, tmp_path, OUTSIDE, *words)
        assert code == 1
        assert "403 Forbidden" in said
    assert runs(gate) == before
    code, said = flwr(gate, tmp_path, INSIDE, "list", "hyperfl", "--format", "json")
    assert code == 0
    assert json.loads(said)["success"] is True


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-runs",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/control/list-runs%3f/../../fleet/x",
        "/v1/control/list-runs%23/../../fleet/x",
        "/v1/control/list-runs/..%2f..%2ffleet/x",
        "//v1/control/list-runs",
        "/v1/runtime/x",
        "/",
    ],
)
def test_no_way_of_writing_a_path_leads_around_nginx(gate: LocalDeployment, path: str) -> None:
    """Flower's Control API would answer 415 to this request; through nginx it is refused (403) or unknown (404)."""
    assert call(gate, INSIDE, "POST", "/v1/control/list-runs")[0] == 415
    status, _, said = call(gate, OUTSIDE, "POST", path)
    assert status in {403, 404}, said


@pytest.mark.parametrize("source", [INSIDE, ELSEWHERE])
@pytest.mark.parametrize("kind", ATTACKS)
def test_no_address_keeps_nodes_out(gate: LocalDeployment, kind: str, source: str) -> None:
    """While one address holds as many of 600 connections as it can, nodes at it and at another are served at once."""
    with attack(gate, ATTACKS[kind], source):
        for address in (INSIDE, ELSEWHERE):
            began = time.monotonic()
            assert served(gate, address) == 400
            assert time.monotonic() - began < 15  # the time after which nginx closes idle connections


@pytest.mark.usefixtures("slow_body")
def test_what_says_too_little_is_closed(gate: LocalDeployment) -> None:
    """Connections are closed even if they send one more byte every second."""
    with contextlib.ExitStack() as stack:
        opened = [
            connection
            for kind in ATTACKS.values()
            for connection in stack.enter_context(attack(gate, kind, ELSEWHERE, 10))
        ]
        assert len(opened) == 10 * len(ATTACKS)
        time.sleep(CLOSED_AFTER)
        assert [connection for connection in opened if not is_closed(connection)] == []


def test_a_body_may_take_as_long_as_a_slow_link_needs(gate: LocalDeployment, slow_body: SlowBody) -> None:
    """A body of 5 MiB may take 40 s, longer than nginx's limits on silence; one above 8 MB is refused at once."""
    status, seconds = slow_body.result()
    assert status == 400
    assert seconds >= SLOW_STEPS
    large = request(UNREAD, "Content-Length: 9000000", node=0, made=gate)
    assert status_of(gate, INSIDE, large) == 413


def test_a_node_can_hold_no_more_than_its_own_connections(gate: LocalDeployment) -> None:
    """A registered node with 600 unfinished requests gets 503, and the other node is served.

    The requests have the type of a message: the SuperLink reads their bodies to the end. Others it answers at once, and
    nginx then closes them after `lingering_time`.
    """
    lines = (f"Content-Type: {PROTOBUF_MEDIA_TYPE}", "Content-Length: 5000000")
    with attack(gate, begun_body(UNREAD, *lines, node=1), INSIDE) as opened:
        assert served(gate, INSIDE, node=1) == 503
        assert served(gate, INSIDE, node=0) == 400
        assert served(gate, OUTSIDE, node=1) == 400  # who names another node's key takes nothing of that node's
        kept = [connection for connection in opened if not is_closed(connection)]
        eventually(lambda: sum(not is_closed(connection) for connection in kept) <= 16, "refusals")
    eventually(lambda: served(gate, INSIDE, node=1) == 400, "the node's answer")


def test_strangers_reach_no_node_service(gate: LocalDeployment) -> None:
    """Without a key of this deployment the answer is 403, before the body; 415 is the SuperLink's answer to a node."""
    key = sent_key(gate.deployment, 0)
    for tried in ("", "x", key[:-4], f"{key}{key}"):
        for size in (5_000_000, 10**12):
            head = request(UNREAD, f"{FLEET_HTTP_PUBLIC_KEY_HEADER}: {tried}", f"Content-Length: {size}", made=gate)
            assert status_of(gate, INSIDE, head) == 403
    assert status_of(gate, INSIDE, request(UNREAD, "Content-Length: 5000000", node=0, made=gate)) == 415


def test_the_list_of_a_reply_may_not_be_long(gate: LocalDeployment) -> None:
    """A long list is refused (413) before it reaches the SuperLink, whose answer would be 415."""
    path = "/v1/fleet/push-messages"
    for size, status in ((200_000, 413), (100_000, 415)):
        assert status_of(gate, INSIDE, request(path, f"Content-Length: {size}", node=0, made=gate)) == status


@pytest.mark.extended
def test_a_run_goes_on_during_an_attack(gate: LocalDeployment, tmp_path: Path) -> None:
    """All attacks run repeatedly from the nodes' address while a run with messages above 20 MB completes.

    The messages are larger than nginx keeps in memory, and the nodes' replies pass as well.
    """
    output, ended = tmp_path / "run", threading.Event()

    def attack_again() -> None:
        while not ended.is_set():
            with contextlib.ExitStack() as stack:
                for kind in ATTACKS.values():
                    stack.enter_context(attack(gate, kind, INSIDE, NUMBER // 4))
                ended.wait(15.0)

    thread = threading.Thread(target=attack_again)
    thread.start()
    try:
        sets = ("--set", "local-epochs=1", "--set", "hyperfl.hidden-width=280")
        code, _, err = finished(gate.hyperfl("run", "--num-rounds", 1, "--output", output, *sets))
    finally:
        ended.set()
        thread.join()
    assert code == 0, err
    assert max((output / "checkpoints").glob("round-*.npz")).stat().st_size > 20_000_000
    assert {row["client"] for row in read_metrics(output) if row["kind"] == "client"} == {0, 1}
