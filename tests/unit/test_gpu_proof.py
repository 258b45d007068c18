"""`make gpu`: it fails without a GPU, runs every step, and reports what it found; measured here on the CPU."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="needs a checkout of the project")


@pytest.fixture
def gpu() -> ModuleType:
    return importlib.import_module("benchmarks.gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a usable GPU")
def test_without_a_gpu_it_says_so_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--output", str(file)], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert f"error: torch {torch.__version__} finds no GPU; `hyperfl doctor` says why" in ended.stderr
    assert not file.exists()


@pytest.mark.slow
@pytest.mark.extended
def test_its_commands_are_ones_that_exist(gpu: ModuleType, tmp_path: Path) -> None:
    """The tests for CUDA are found, those of the golden sequences too, and the run's settings are valid."""
    words = gpu.commands(tmp_path)
    assert list(words) == ["doctor", "tests", "goldens", "three nodes on one GPU"]
    assert [word for word in words["goldens"] if word not in words["tests"]] == []  # the same but for the folder
    of_one_file = ["tests/numerics/test_devices.py" if word == "tests" else word for word in words["goldens"]]
    found = subprocess.run(
        [*of_one_file, "tests/numerics/test_devices.py", "--collect-only", "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.stdout.count("test_devices.py::") >= 12, found.stdout
    assert found.stdout.count("test_golden.py::") >= 4, found.stdout
    on_cpu = [word.replace("device=cuda", "device=cpu") for word in words["three nodes on one GPU"]]
    planned = subprocess.run([*on_cpu, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stderr


def test_a_step_that_fails_is_reported_and_stops_no_other(gpu: ModuleType) -> None:
    words = {name: [sys.executable, "-c", f"raise SystemExit({code})"] for name, code in (("one", 3), ("two", 0))}
    steps = gpu.run_steps(words)
    assert [(step.name, step.passed) for step in steps] == [("one", False), ("two", True)]
    found = json.loads(json.dumps(gpu.report({"name": "GPU", "driver": "535.1"}, steps, [])))
    assert found["passed"] is False
    assert found["device"] == {"name": "GPU", "driver": "535.1"}
    assert all(step["seconds"] >= 0 for step in found["steps"])
    assert gpu.report({}, steps[1:], [])["passed"] is True


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_round_is_measured(gpu: ModuleType, precision: str) -> None:
    work = dataclasses.replace(gpu.WORK[0], train=40, test=20, batch_size=20, epochs=1)
    one = gpu.measured_round(work, precision, 1)
    assert (one.method, one.precision, one.clients, one.megabytes) == ("fedavg", precision, 1, 0)
    assert one.seconds > 0


def test_a_cohort_is_measured(gpu: ModuleType) -> None:
    work = dataclasses.replace(gpu.WORK[0], train=40, test=20, batch_size=20, epochs=1)
    one = gpu.measured_round(work, "fp32", 1, clients=2)
    assert (one.clients, one.precision) == (2, "fp32")
    assert one.seconds > 0


def test_stacked_rounds_are_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One client at a time and both forms of convolutions, which give the same clients the same losses."""
    stacked = importlib.import_module("benchmarks.stacked")
    monkeypatch.setattr(stacked, "SHAPES", ((1, 28, 28),))
    words = "stacked --device cpu --methods fedrep --sizes 2 --samples 50 --repetitions 1"
    monkeypatch.setattr(sys, "argv", words.split())
    assert stacked.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["program"], line["form"]) for line in lines] == [
        ("one-by-one-2", "grouped"), ("cohort-2", "grouped"), ("cohort-2", "product"),
    ]  # fmt: skip
    assert all(line["ms_per_client"] > 0 for line in lines)
