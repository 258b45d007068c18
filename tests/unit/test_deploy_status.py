"""`hyperfl deploy status`: what it reads of a SuperLink's database and of runs, as text, as JSON and as a page."""

import contextlib
import http.client
import json
import re
import shlex
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from federations import Call, small_settings, trained
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

import hyperfl_flwr.deploy.run
from hyperfl_flwr.core.errors import ConfigError, RunFailedError, StateError
from hyperfl_flwr.core.files.folder_lock import lock_folder
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.deploy.keys import read_public_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.provision import init
from hyperfl_flwr.deploy.registered_nodes import registered_nodes
from hyperfl_flwr.deploy.run import stopped_on_interrupt, submit, wait_for_a_node
from hyperfl_flwr.deploy.status import MOST_PROBLEMS, Status
from hyperfl_flwr.deploy.status_server import StatusServer, status_page
from hyperfl_flwr.deploy.superlink import DeployedSuperLink
from hyperfl_flwr.flower.superlink import database
from hyperfl_flwr.launch.flower.client import FlowerClient
from hyperfl_flwr.launch.flower.env import CONNECTION, can_use_database_file
from hyperfl_flwr.launch.follow import RunCallbacks
from hyperfl_flwr.launch.plans import Plan

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator")  # from alembic, with Flower's settings


@dataclass(frozen=True)
class Made:
    """A deployment without a SuperLink, of whose three nodes one is connected, one has left and one is unknown.

    Attributes:
        deployment: The deployment.
        state: Flower's object that writes the SuperLink's database.
    """

    deployment: Deployment
    state: SqlLinkState

    def new_run(self, **settings: str) -> int:
        """Start a run as a SuperLink does; return the id of its task."""
        run_id = self.state.create_run(
            fab_id=None, fab_version=None, fab_hash=None, override_config=settings, federation_id=NOOP_FEDERATION_ID,
            federation_config=None, flwr_aid=None, primary_task_type=TaskType.SERVER_APP,
        )  # fmt: skip
        (task,) = self.state.get_tasks(run_ids=[run_id])
        return int(task.task_id)


def link_state(database: Path) -> SqlLinkState:
    state = SqlLinkState(str(database), NoOpFederationManager(), ObjectStoreFactory().store())
    state.initialize()
    return state


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with Flower's tables."""
    if not can_use_database_file():
        pytest.skip("Flower cannot make a database where it is installed")
    path = tmp_path_factory.mktemp("database") / "state.db"
    link_state(path)._engine.dispose()
    return path


@pytest.fixture
def made(empty_database: Path, tmp_path: Path) -> Iterator[Made]:
    deployment = Deployment(folder=tmp_path / "fl", host="127.0.0.1", port=free_port(), num_nodes=3)
    init(deployment)
    shutil.copy(empty_database, deployment.database)
    state = link_state(deployment.database)
    pem = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    for number in (0, 1):
        key = read_public_key(deployment.public_key(number)).public_bytes(*pem)
        node = state.create_node("owner", "owner", key, 30.0)
        assert state.activate_node(node, 30.0)
        if number == 1:
            assert state.deactivate_node(node)
    yield Made(deployment, state)
    state._engine.dispose()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run of two rounds in which a client was left out."""
    folder = trained(small_settings(method="fedavg", output=str(tmp_path / "run")))
    (folder / "failures" / "round-000002-client-00003.txt").write_text("no <memory> left\n\ndetails")
    with (folder / "server.log").open("a") as log:
        log.write("2026-01-01 10:00:00,000 WARNING node 2 is missing (clients 2)\n" * 2)
        log.write("2026-01-01 10:00:00,000 INFO all is well\n")
    return folder


def test_nodes_are_those_of_the_superlink(made: Made) -> None:
    found = Status.of(made.deployment)
    assert [(node.number, node.state) for node in found.nodes] == [
        (0, "connected"), (1, "away"), (2, "not registered"),
    ]  # fmt: skip
    assert all(node.since.endswith("+00:00") for node in found.nodes[:2])
    assert found.nodes[2].since == ""
    assert found.superlink.startswith("not running: ")
    assert list(found.lines())[1:] == [
        "nodes: 1 of 3 connected",
        f"  node 1: away since {found.nodes[1].since}",
        "  node 2: not registered",
        "runs: none yet",
    ]


def test_runs_have_rounds_accuracies_and_problems(made: Made, run: Path) -> None:
    made.new_run(output="/nowhere")
    task = made.new_run(output=str(run))
    assert made.state.claim_task(task) is not None
    assert made.state.activate_task(task)
    newest, older = Status.of(made.deployment).runs
    summary = json.loads((run / "summary.json").read_text())
    assert (newest.folder, newest.status, newest.method) == (str(run), "running", "fedavg")
    assert (newest.round, newest.num_rounds, newest.num_nodes) == (2, 2, 1)
    assert "  1 of 3 nodes: the others take no part in this run" in Status.of(made.deployment).lines()
    assert "It has 1 of 3 nodes." in status_page(made.deployment)
    assert newest.personalized == pytest.approx(summary["test_accuracy"])
    assert newest.aggregate == pytest.approx(summary["test_accuracy_aggregate"])
    assert "round 2, client 3, training: no <memory> left" in newest.problems
    assert newest.problems.count("node 2 is missing (clients 2)") == 1
    assert not any("all is well" in problem for problem in newest.problems)
    assert (older.folder, older.status, older.method, older.num_rounds) == ("/nowhere", "pending", "", 0)


def test_a_run_is_not_submitted_for_a_node_that_takes_no_part_in_it(made: Made) -> None:
    """Node 0 has left and node 2 has come: a run of two nodes waits for one of them, and one of three begins."""
    deployment, key = made.deployment, read_public_key(made.deployment.public_key(2))
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert made.state.deactivate_node(registered_nodes(deployment)[0].flower_id)
    assert made.state.activate_node(made.state.create_node("owner", "owner", pem, 30.0), 30.0)
    superlink, notes = DeployedSuperLink(deployment), []
    observer = RunCallbacks(on_note=notes.append)
    for chosen in (3, "auto"):
        wait_for_a_node(superlink, deployment, {"node-timeout": 0.1, "num-nodes": chosen}, observer)
    with pytest.raises(RunFailedError, match=r"no node of .* came online within node-timeout"):
        wait_for_a_node(superlink, deployment, {"node-timeout": 0.1, "num-nodes": 2}, observer)
    assert notes == ["online: node 2; offline: nodes 0, 1"]


def test_only_a_run_whose_process_died_is_stopped_for_another_one(
    made: Made, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run takes its folder's lock only seconds later, and a finished one releases it before Flower knows."""
    superlink, stopped, notes = DeployedSuperLink(made.deployment), [], []
    monkeypatch.setattr(superlink, "stop", stopped.append)
    made.new_run(resume=str(run))
    manifest = json.loads((run / "manifest.json").read_text())

    def starts(start: str, status: str) -> None:
        document = manifest | {"status": status, "resumed": [{"start": start}] if start else []}
        (run / "manifest.json").write_text(json.dumps(document))

    later = (datetime.now(UTC) + timedelta(seconds=5)).isoformat(timespec="seconds")
    for start, status in (("", "stopped"), ("2026-01-01T10:00:00+0000", "running"), (later, "completed")):
        starts(start, status)
        with pytest.raises(RunFailedError, match=f"another run is active on the SuperLink: .* in {run}"):
            superlink.require_free(notes.append)
    starts(later, "running")
    with lock_folder(run), pytest.raises(RunFailedError, match="another run is active"):
        superlink.require_free(notes.append)
    assert (stopped, notes) == ([], [])
    superlink.require_free(notes.append)
    (run_id,) = database.unfinished_runs(made.deployment.database)
    assert (stopped, notes) == ([run_id], [f"stopped run {run_id} in {run}: no process writes there any more"])


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_flower_does_not_stop_is_an_error_unless_it_has_ended(
    made: Made, monkeypatch: pytest.MonkeyPatch, *, finished: bool
) -> None:
    task = made.new_run(output="/elsewhere")
    (run_id,) = database.unfinished_runs(made.deployment.database)
    if finished:
        assert made.state.finish_task(task, "failed", "no disk")
    words = []

    def refused(_: object, *given: str) -> str:
        words.extend(given)
        return '{"success": false, "error-message": "a warning\\n\\nit is no day for that"}'

    monkeypatch.setattr(FlowerClient, "_flwr", refused)
    told = contextlib.nullcontext() if finished else pytest.raises(RunFailedError, match=r"run: it is no day for that$")
    with told:
        DeployedSuperLink(made.deployment).stop(run_id)
    assert words == ["stop", str(run_id), CONNECTION, "--format", "json"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (None, "it has not ended after 0 s"),
        (RunFailedError("no answer"), "no answer"),
        (KeyboardInterrupt(), "you interrupted its end, too"),
    ],
)
def test_an_interrupt_says_if_the_run_may_go_on(
    made: Made, monkeypatch: pytest.MonkeyPatch, fault: BaseException | None, reason: str
) -> None:
    task = made.new_run(output="/elsewhere")
    (run_id,) = database.unfinished_runs(made.deployment.database)
    superlink, notes = DeployedSuperLink(made.deployment), []
    monkeypatch.setattr(superlink, "_answers", lambda: True)
    monkeypatch.setattr(hyperfl_flwr.deploy.run, "STOP_SECONDS", 0.0)

    def stop(_: int) -> None:
        if fault is not None:
            raise fault

    monkeypatch.setattr(superlink, "stop", stop)

    def interrupt() -> list[str]:
        notes.clear()
        with (
            pytest.raises(KeyboardInterrupt),
            stopped_on_interrupt(superlink, run_id, RunCallbacks(on_note=notes.append)),
        ):
            raise KeyboardInterrupt
        return notes[1:]

    command = f"FLWR_HOME={shlex.quote(str(made.deployment.flower_home))} flwr stop {run_id}"
    assert interrupt() == [f"the run may go on: {reason}; stop it: {command}"]
    fault = None
    assert made.state.finish_task(task, "stopped", "")
    assert interrupt() == []


def test_of_two_commands_that_wait_for_a_node_one_submits_its_run(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink = DeployedSuperLink(made.deployment)
    monkeypatch.setattr(superlink, "require", lambda: None)
    monkeypatch.setattr(superlink, "submit", lambda *_: pytest.fail("submitted"))
    monkeypatch.setattr(hyperfl_flwr.deploy.run, "build_app", lambda *_: tmp_path)
    monkeypatch.setattr(hyperfl_flwr.deploy.run, "wait_for_a_node", lambda *_: made.new_run(output="/elsewhere"))
    planned = Plan(settings={"output": "/nowhere"}, warnings=(), sources=())
    with pytest.raises(RunFailedError, match=r"another run is active on the SuperLink: .* in /elsewhere"):
        submit(superlink, made.deployment, planned, RunCallbacks())


def test_few_runs_and_problems_are_listed(made: Made, run: Path) -> None:
    """A run that was resumed eight times is listed once, with its last start."""
    for number in range(30):
        (run / "failures" / f"round-000002-client-{number:05d}.txt").write_text(f"reason {number}\n")
    for number in range(8):
        made.new_run(output=f"/nowhere/{number}")
    made.new_run(output=str(run))
    for _ in range(8):
        made.new_run(resume=str(run))
    found = Status.of(made.deployment)
    assert [each.folder for each in found.runs] == [str(run), *(f"/nowhere/{number}" for number in (7, 6, 5, 4))]
    assert len([text for text in found.runs[0].problems if "reason" in text]) == MOST_PROBLEMS


@pytest.mark.parametrize(
    ("file", "content"), [("manifest.json", b"{}"), ("metrics.jsonl", b"\xff\n"), ("metrics.jsonl", b"[]\n")]
)
def test_a_damaged_run_is_a_problem_of_this_run_alone(made: Made, run: Path, file: str, content: bytes) -> None:
    (run / file).write_bytes(content)
    made.new_run(output=str(run))
    (found,) = Status.of(made.deployment).runs
    assert found.folder == str(run)
    assert found.problems[0].startswith("its folder cannot be read: ")


def test_a_locked_database_is_not_an_empty_one(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(database, "_query", locked)
    with pytest.raises(StateError, match="cannot be read: database is locked; try again"):
        Status.of(made.deployment)


def test_a_damaged_database_is_an_error_before_a_run_and_no_end_of_one(made: Made) -> None:
    superlink = DeployedSuperLink(made.deployment)
    first = ["online: node 0; offline: nodes 1, 2"]
    whole = made.deployment.database.read_bytes()
    made.deployment.database.write_bytes(b"garbage" * 1000)
    with pytest.raises(StateError, match=r"cannot be read: .*; try again"):
        superlink.require_free()
    assert list(superlink.new_notes()) == []
    made.deployment.database.write_bytes(whole)
    superlink.require_free()
    assert list(superlink.new_notes()) == first


def test_a_new_deployment_has_nothing_yet(tmp_path: Path) -> None:
    deployment = Deployment(folder=tmp_path / "fl", host="127.0.0.1", port=free_port(), num_nodes=2)
    init(deployment)
    found = Status.of(deployment)
    assert {node.state for node in found.nodes} == {"not registered"}
    assert found.runs == []
    deployment.database.touch()
    assert Status.of(deployment).runs == []
    assert "No run has been submitted yet" in status_page(deployment)


def test_a_regression_has_no_accuracy(made: Made, run: Path) -> None:
    """R² may be negative, and is no share."""
    made.new_run(output=str(run))
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["settings"]["task"] = "regression"
    (run / "manifest.json").write_text(json.dumps(manifest))
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r"(personalized|aggregate)_accuracy", r"\1_r2", text))
    page = status_page(made.deployment)
    (shown,) = re.findall(r'<dt>R²</dt><dd class="value">([^<]*)', page)
    assert re.fullmatch(r"-?[\d.]+", shown.strip())
    assert "Accuracy" not in page


def test_the_page_escapes_what_comes_from_nodes(made: Made, run: Path) -> None:
    made.new_run(output=str(run))
    page = status_page(made.deployment)
    assert "no &lt;memory&gt; left" in page
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert page.count("<svg ") >= 2


def test_the_command_prints_text_or_json(made: Made, run: Path, call: Call) -> None:
    made.new_run(output=str(run))
    code, text, _ = call("deploy", "status", made.deployment.folder)
    assert (code, "fedavg, round 2 of 2, accuracy: personalized" in text) == (0, True)
    code, text, _ = call("deploy", "status", made.deployment.folder, "--json")
    assert code == 0
    document = json.loads(text)
    assert document["runs"][0]["folder"] == str(run)
    assert document["nodes"][2] == {"number": 2, "state": "not registered", "since": ""}


class TestServer:
    """The page's server, which a browser on this machine alone can read."""

    @pytest.fixture
    def server(self, made: Made, run: Path) -> Iterator[StatusServer]:
        made.new_run(output=str(run))
        with StatusServer(made.deployment, 0) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            yield server
            server.shutdown()
            thread.join()

    @staticmethod
    def ask(server: StatusServer, method: str = "GET", path: str = "/", host: str = "") -> tuple[int, str]:
        port = server.server_address[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
        reply = connection.getresponse()
        found = reply.status, reply.read().decode()
        headers = dict(reply.getheaders())
        connection.close()
        assert "Python" not in headers.get("Server", "")
        if found[0] == 200:
            assert headers["Cache-Control"] == "no-store"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Refresh"] == "10"
        return found

    def test_errors_are_printed_and_closed_connections_are_not(
        self, server: StatusServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for error, printed in ((BrokenPipeError("closed"), False), (KeyError("a bug"), True)):

            def fail(_: object, error: Exception = error) -> str:
                raise error

            server._since = -1e9
            monkeypatch.setattr("hyperfl_flwr.deploy.status_server.status_page", fail)
            with pytest.raises((http.client.HTTPException, OSError)):
                self.ask(server)
            assert ("a bug" in capsys.readouterr().err) is printed

    def test_it_shows_the_state_of_now(self, server: StatusServer, made: Made, run: Path) -> None:
        assert server.server_address[0] == "127.0.0.1"
        code, text = self.ask(server)
        assert (code, str(run) in text) == (200, True)
        made.new_run(output="/another")
        server._since = -1e9
        assert "/another" in self.ask(server)[1]
        assert self.ask(server, host=f"localhost:{server.server_address[1]}")[0] == 200

    def test_the_host_may_lack_a_port(self, server: StatusServer) -> None:
        """A browser leaves out that of HTTP, which a tunnel may have."""
        for host in ("127.0.0.1", "localhost"):
            assert self.ask(server, host=host)[0] == 200, host

    def test_other_paths_are_not_there(self, server: StatusServer) -> None:
        for path in ("/x", "/../etc/passwd", "/?a=b", "/favicon.ico"):
            assert self.ask(server, path=path)[0] == 404, path

    def test_it_only_reads(self, server: StatusServer) -> None:
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert self.ask(server, method=method)[0] == 501, method

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8790", "192.0.2.1:8790", "127.0.0.1.evil.example:1", "127.0.0.1:evil"]
    )
    def test_other_sites_cannot_read_it(self, server: StatusServer, host: str) -> None:
        """A site whose name leads to this machine has its own name in the request."""
        assert self.ask(server, host=host)[0] == 403

    def test_a_damaged_file_is_named(self, server: StatusServer, made: Made) -> None:
        made.deployment.public_key(0).write_text("no key")
        code, text = self.ask(server)
        assert (code, "node-0.pub" in text) == (500, True)

    def test_a_taken_port_is_refused(self, server: StatusServer, made: Made) -> None:
        with pytest.raises(ConfigError, match=f"port {server.server_address[1]} cannot be used"):
            StatusServer(made.deployment, server.server_address[1])
