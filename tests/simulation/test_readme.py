"""Every command in the README is run as printed."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from console import ENVIRONMENT, block_with, commands, copy_checkout, shell

from hyperfl_flwr import ROOT
from hyperfl_flwr.methods import METHODS

pytestmark = pytest.mark.slow

README = ROOT / "README.md"
HOME = ROOT / "docs" / "index.md"


def test_every_command_is_covered() -> None:
    """A new command in the README needs a test; these words occur in the commands tested below."""
    known = ("make run", "make test", "venv .venv", ".venv/bin/")
    assert not [command for command in commands(README) if not any(word in command for word in known)]


def test_the_home_page_has_no_other_commands() -> None:
    assert len(commands(HOME)) == 3
    assert set(commands(HOME)) <= set(commands(README))


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["test"], '-m "not extended"'),
        (["test-all"], ""),
        (["test", "ARGS=-k 'a, b'"], "-k 'a, b'"),
        (["test-all", "ARGS=-x"], "-x"),
    ],
)
def test_make_test_calls_pytest(words: list[str], chosen: str) -> None:
    """The tests cannot run themselves, so `make -n` prints what it would do; ARGS chooses among all tests."""
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "pytest" in line]
    five = ".venv/bin/python -m pytest -n 5 --dist loadscope --no-loadscope-reorder"
    assert line.strip() == f"{five} {chosen}".strip()


@pytest.mark.skipif(ENVIRONMENT.resolve() != (ROOT / ".venv").resolve(), reason="these tests do not run in .venv")
def test_make_run(tmp_path: Path) -> None:
    """The README's first command prints rates, accuracies with spread, and sizes.

    With two rounds instead of ten.
    """
    output = tmp_path / "quickstart"
    command = ["make", "run", f"ARGS=--num-rounds 2 --output {output}"]
    # If the tests themselves run below make, this make would print the folders that it enters and leaves.
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
    assert done.stderr.count("data: 1,347 training samples") == 1  # which all six runs have in common
    assert "340 and 340 test images" in done.stdout
    assert done.stdout.splitlines()[-1] == str(output)
    assert (output / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_making_the_environment_by_hand(tmp_path: Path) -> None:
    script = block_with(README, "venv .venv")
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".venv" / "bin" / "pip").is_file()


def test_the_readme_s_first_run_writes_a_report(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path)
    done = shell(block_with(README, "hyperfl doctor"), checkout)
    assert done.returncode == 0, done.stderr
    assert str(checkout / "runs" / "first") in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == str(checkout / "runs" / "first" / "report.html")
