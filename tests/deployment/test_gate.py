"""nginx in front of the SuperLink, as in docs/how-to/deploy-security.md: it admits nodes, but no runs of others.

Both use the same port: nginx at 127.0.0.2, which stands for the public address, and the SuperLink at 127.0.0.1.
"""

import contextlib
import json
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gates import INSIDE, OUTSIDE, ROOT, call, needs_nginx, running_gate
from programs import HYPERFL, PATIENCE, LocalDeployment, finished

from hyperfl_flwr.deploy.render import render
from hyperfl_flwr.launch.flower_env import flower_command
from hyperfl_flwr.runs.run_directory import read_metrics

pytestmark = needs_nginx()


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """Return a deployment with two nodes that are online through nginx."""
    with running_gate(tmp_path_factory.mktemp("operator")) as made:
        yield made


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


def test_a_run_goes_through_nginx(gate: LocalDeployment, tmp_path: Path) -> None:
    """Its messages are larger than nginx keeps in memory, and the nodes' replies must pass as well."""
    output = tmp_path / "run"
    code, _, err = finished(gate.hyperfl("run", "--num-rounds", 1, "--output", output, "--set", "local-epochs=1"))
    assert code == 0, err
    sent = max((output / "checkpoints").glob("round-*.npz")).stat().st_size
    assert sent > 1 << 20
    rows = [row for row in read_metrics(output) if row["kind"] == "client"]
    assert {row["client"] for row in rows} == {0, 1}
