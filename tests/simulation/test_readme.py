"""Every command that the README shows is run, as it stands there."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hyperfl_flwr import ROOT
from hyperfl_flwr.launch.processes import kill_all, process_table
from hyperfl_flwr.methods import METHODS

pytestmark = pytest.mark.slow

README = ROOT / "README.md"
ENVIRONMENT = Path(sys.prefix)


def blocks() -> list[list[str]]:
    """Return the commands of each console block."""
    found = []
    for block in README.read_text().split("```console\n")[1:]:
        lines = block.split("```")[0].splitlines()
        found.append([line.removeprefix("$ ") for line in lines if line.startswith("$ ")])
    return found


def block_with(text: str) -> str:
    """Return the one block that holds a text, as a shell script."""
    (found,) = [commands for commands in blocks() if any(text in command for command in commands)]
    return "set -ex\n" + "\n".join(found)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout's app with this environment as its .venv."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("hyperfl_flwr", "strategies", "clients", "experiments"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(ENVIRONMENT)
    return copy


def shell(script: str, checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    home = checkout.parent / "home"
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), **variables}
    return subprocess.run(
        ["bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


def test_every_command_is_covered() -> None:
    """A new command in the README needs a test; these words occur in those below."""
    known = ("make run", "make test", "venv .venv", ".venv/bin/", "flwr run .", "export FLWR_")
    unknown = [command for block in blocks() for command in block if not any(word in command for word in known)]
    assert not unknown


def test_make_test_calls_pytest() -> None:
    """The tests cannot run themselves; make says what it would do."""
    done = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ".venv/bin/python -m pytest" in done.stdout


@pytest.mark.skipif(ENVIRONMENT.resolve() != (ROOT / ".venv").resolve(), reason="these tests do not run in .venv")
def test_make_run(tmp_path: Path) -> None:
    """Two rounds instead of ten; otherwise the README's first command, with the rates, the spread and the sizes."""
    output = tmp_path / "quickstart"
    command = ["make", "run", f"ARGS=--num-rounds 2 --output {output}"]
    # The tests may themselves run below make, which would then tell of folders that it enters and leaves.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for method in ("hyperfl", "fedavg", "local"):
        (row,) = [line for line in done.stdout.splitlines() if line.lstrip("│|").split()[:1] == [method]]
        assert f" {METHODS[method].learning_rate:g} " in row
        for number in ("test_accuracy", "test_accuracy_aggregate", "test_accuracy_worst"):
            shares = [
                100 * json.loads((output / method / f"seed-{seed}" / "summary.json").read_text())[number]
                for seed in (0, 1)
            ]
            assert f"{sum(shares) / 2:.1f} % ({min(shares):.1f} to {max(shares):.1f})" in row
    assert "340 and 340 test images" in done.stdout
    assert done.stdout.splitlines()[-1] == str(output)
    assert (output / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_making_the_environment_by_hand(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", block_with("venv .venv")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".venv" / "bin" / "pip").is_file()


def test_running(checkout: Path) -> None:
    done = shell(block_with("hyperfl methods"), checkout)
    assert done.returncode == 0, done.stderr
    assert str(checkout / "runs" / "first") in done.stdout.splitlines()
    assert len(list((checkout / "runs" / "first" / "checkpoints").iterdir())) == 2
    assert str(checkout / "runs" / "first" / "report.html") in done.stdout.splitlines()
    assert (checkout / "runs" / "client-3" / "use_model.py").is_file()
    assert "estimate" in done.stdout


def test_studies(checkout: Path) -> None:
    done = shell(block_with("hyperfl studies"), checkout)
    assert done.returncode == 0, done.stderr
    folder = checkout / "runs" / "studies" / "table-1-quick"
    assert "| HyperFL |" in done.stdout
    for name in ("table.md", "table.csv", "table.tex", "figure-own-accuracy.png"):
        assert str(folder / name) in done.stdout.splitlines()
        assert (folder / name).is_file()


def test_audit(checkout: Path) -> None:
    done = shell(block_with("hyperfl audit"), checkout)
    assert done.returncode == 0, done.stderr
    assert "head-gradient recovered the private images" in done.stdout
    assert done.stdout.splitlines()[-1] == str(checkout / "runs" / "audit" / "audit.html")


@pytest.mark.skipif("HYPERFL_TEST_DATA" not in os.environ, reason="HYPERFL_TEST_DATA names no torchvision root")
def test_fashion_mnist(checkout: Path) -> None:
    cache = checkout.parent / "home" / ".cache" / "hyperfl"
    cache.mkdir(parents=True)
    (cache / "data").symlink_to(os.environ["HYPERFL_TEST_DATA"])
    done = shell(block_with("fashion-mnist"), checkout)
    assert done.returncode == 0, done.stderr
    assert "59.77 MB down" in done.stdout


def test_flowers_own_commands(checkout: Path) -> None:
    """The three lines in a fresh home, with a port of their own; the SuperLink that stays is ended by its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address = f"127.0.0.1:{port}"
    try:
        done = shell(
            block_with("flwr run . --stream"),
            checkout,
            FLWR_HOME=str(checkout.parent / "flwr"),
            FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=port,
            FLWR_TELEMETRY_ENABLED="0",
            FLWR_DISABLE_UPDATE_CHECK="1",
            OMP_NUM_THREADS="1",
        )
    finally:
        kill_all(lambda: [p for p in process_table().values() if f"--port {port}" in p.command or address in p.command])
    assert done.returncode == 0, done.stderr
    folders = sorted((checkout.parent / "home" / "hyperfl-runs").iterdir())
    assert [("hyperfl" in folder.name, "fedavg" in folder.name) for folder in folders] == [(True, False), (False, True)]
    for folder in folders:
        assert (folder / "summary.json").is_file()
        assert str(folder) in done.stdout
