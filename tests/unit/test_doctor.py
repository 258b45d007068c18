"""`hyperfl doctor`: each check finds its problem, on this machine or on a simulated one."""

import json
import os
import pwd
import resource
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from federations import Call

from hyperfl_flwr.launch import doctor, machine_checks
from hyperfl_flwr.launch.core_locks import usable_cores
from hyperfl_flwr.launch.findings import Finding, Level
from hyperfl_flwr.launch.processes import Process, process_table


def levels(findings: Iterable[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


def the_only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_the_command_looks_at_everything_and_says_how_it_ends(call: Call, tmp_path: Path) -> None:
    """Every subject is reported, and errors give exit code 1; the installation that runs the tests has no error."""
    code, lines, _ = call("doctor", "--data-root", tmp_path)
    _, text, _ = call("doctor", "--data-root", tmp_path, "--json")
    found = json.loads(text)
    subjects = {"Python", "packages", "own packages", "Flower's programs", "cores", "memory", "threads", "GPU"}
    subjects |= {
        "working folder",
        "cache",
        "temporary files",
        "shared memory",
        "open files",
        "ports",
        "isolation",
        "running",
        "data",
    }
    assert {finding["subject"] for finding in found} == subjects
    installation = {"Python", "packages", "own packages", "Flower's programs", "data"}
    assert [f for f in found if f["level"] == "error" and f["subject"] in installation] == []
    assert code == int(any(finding["level"] == "error" for finding in found))
    assert len(lines.splitlines()) == len(found)
    assert f"torch {torch.__version__}" in lines


def test_another_python_is_an_error() -> None:
    assert levels(doctor.python_version(">=3.11,<3.14", "3.10.2")) == [Level.ERROR]
    assert levels(doctor.python_version(">=3.11,<3.14", "3.12.0")) == [Level.OK]


def test_wrong_and_missing_packages_are_named_with_the_command() -> None:
    versions = {"torch": "2.13.0+cpu", "numpy": "3.1"}

    def installed(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    found = list(doctor.packages(["torch>=2.4,<3", "numpy>=1.26,<3", "rich>=13.7"], installed))
    assert levels(found) == [Level.ERROR, Level.ERROR, Level.OK]
    assert [finding.remedy for finding in found[:2]] == [
        'python -m pip install "numpy>=1.26,<3"', 'python -m pip install "rich>=13.7"',
    ]  # fmt: skip
    assert found[2].text == "torch 2.13.0+cpu"


def test_foreign_packages_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numpy, which lies outside of the project, stands for a foreign package of the project's name."""
    monkeypatch.setattr(doctor, "ALL", ("numpy",))
    finding = the_only(doctor.project_packages())
    assert finding.level is Level.ERROR
    assert finding.remedy == "rename or uninstall the other package, or start from another folder"


def test_a_missing_program_of_flower_is_an_error() -> None:
    finding = the_only(doctor.flowers_commands(["flower-nothing"]))
    assert finding.level is Level.ERROR
    assert "pip install" in finding.remedy


def test_a_superlink_that_nobody_of_ours_has_started_is_seen() -> None:
    """A real process of that name without a supervisor gives a warning with the command that ends it."""
    program = ["-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(
        ["/opt/x/flower-superlink", *program, "--insecure"], executable=sys.executable, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            table = {process.pid: process_table()[process.pid]}
            finding = the_only(doctor.others(table))
        finally:
            process.kill()
    assert finding.level is Level.WARNING
    assert finding.text.startswith(f"flower-superlink as process(es) {process.pid}, ")
    assert finding.remedy.endswith(f"kill {process.pid}")


def process(pid: int, parent: int, command: str) -> Process:
    return Process(pid=pid, parent=parent, started="0", command=command)


def test_what_lives_below_a_supervisor_is_a_run_of_ours() -> None:
    rows = [
        process(2, 1, "/usr/bin/python -I -S /x/hyperfl_flwr/launch/processes.py --owner 1 -- /x/bin/flower-superlink"),
        process(3, 2, "/usr/bin/python /x/bin/flower-superlink --insecure"),
        process(4, 3, "/x/ray/core/src/ray/raylet/raylet --socket"),
        process(5, 1, "vi flower-superlink.md"),
    ]
    assert levels(doctor.others({row.pid: row for row in rows})) == [Level.OK]
    rows.append(process(2**22 + 6, 1, "/x/ray/core/src/ray/raylet/raylet --socket"))
    found = list(doctor.others({row.pid: row for row in rows}))
    assert levels(found) == [Level.OK, Level.WARNING]
    assert f"raylet as process(es) {2**22 + 6}," in found[1].text
    assert "kill" not in found[1].remedy  # it is not known whose process it is
    assert levels(doctor.others({})) == [Level.OK]


def test_a_live_deployment_is_not_proposed_to_be_ended(tmp_path: Path) -> None:
    """Its SuperLink, its nodes and what they have started are named with their folders; other programs are not it."""
    folders = [tmp_path / "my site" / name for name in ("server", "node-0", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
    for folder in folders[:2]:
        (folder / "start.sh").touch()
    superlink, node = "/x/python /x/bin/flower-superlink --port 9 --ssl-ca-certfile", "/x/bin/flower-supernode"
    rows = [
        process(os.getpid(), 1, f"{superlink} {folders[0]}/ca.crt --ssl-certfile {folders[0]}/server.crt"),
        process(2**22 + 1, os.getpid(), "/x/bin/flwr-serverapp --token"),
        process(2**22 + 2, 1, f"{node} --root-certificates {folders[1]}/ca.crt"),
        process(2**22 + 3, 2**22 + 2, "/x/bin/flower-superexec --insecure"),
        process(2**22 + 4, 1, f"{node} --root-certificates {folders[2]}/ca.crt"),
    ]
    found = list(doctor.others({row.pid: row for row in rows}))
    assert levels(found) == [Level.OK, Level.OK, Level.WARNING]
    user = pwd.getpwuid(os.getuid()).pw_name
    assert found[0].text == f"the SuperLink in {folders[0]}, process {os.getpid()}, user {user}"
    assert found[1].text.startswith(f"the node in {folders[1]}, process {2**22 + 2}, ")
    assert f"flower-supernode as process(es) {2**22 + 4}, " in found[2].text
    assert "kill" not in " ".join(each.remedy for each in found)


def test_data_sets_are_found_without_being_read(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte").touch()
    text = the_only(doctor.data_sets(tmp_path)).text
    assert f"in {tmp_path}: digits, mnist; missing: fashion-mnist (31 MB, downloaded on demand)" in text
    assert "omniglot (copy it there)" in text


def test_a_taken_port_is_told() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        finding = the_only(machine_checks.ports({port: "a test"}))
        assert finding.level is Level.WARNING
        assert finding.text == f"{port}, for a test, is in use"
    assert levels(machine_checks.ports({port: "a test"})) == [Level.OK]


def test_few_open_files_are_told() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        finding = the_only(machine_checks.open_files())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert finding.level is Level.WARNING
    assert finding.text.startswith("a process may open 512 files")


def test_folders_without_room_or_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(machine_checks.disks({"x": tmp_path / "to" / "be" / "made"}))[0] in set(Level) - {Level.ERROR}
    monkeypatch.setattr(machine_checks, "LITTLE_DISK", 1e18)
    assert levels(machine_checks.disks({"x": tmp_path})) == [Level.WARNING]
    monkeypatch.setattr(machine_checks, "NO_DISK", 1e18)
    assert levels(machine_checks.disks({"x": tmp_path})) == [Level.ERROR]
    assert levels(machine_checks.disks({"x": Path("/proc")})) == [Level.ERROR]  # not even root can write there


def test_little_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "LITTLE_SHARED", 1e18)
    assert "--shm-size" in the_only(machine_checks.shared_memory(tmp_path)).remedy
    assert levels(machine_checks.shared_memory(tmp_path / "nothing")) == [Level.OK]


def test_a_container_s_share_of_cores(tmp_path: Path) -> None:
    """100 ms of every 200 ms are half a core, so that HYPERFL_CORES=1 is advised; no limit is no problem."""
    (tmp_path / "cpu.max").write_text("100000 200000\n")
    assert list(machine_checks.cores(tmp_path))[1].remedy == "set HYPERFL_CORES=1"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert levels(machine_checks.cores(tmp_path)) == [Level.OK]


@pytest.mark.parametrize(("free", "level"), [(0.5e9, Level.ERROR), (1e15, Level.OK)])
def test_memory_of_the_machine(tmp_path: Path, free: float, level: Level) -> None:
    table = tmp_path / "meminfo"
    table.write_text(f"MemTotal:       99 kB\nMemAvailable:   {int(free / 1024)} kB\n")
    assert levels(machine_checks.memory(tmp_path, table)) == [level]


def test_memory_of_a_container_and_of_fewer_processes_than_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with 4 cores and 2 of 5 GB left has memory for 2 nodes, which the remedy names."""
    monkeypatch.setattr(machine_checks, "usable_cores", lambda: [0, 1, 2, 3])
    (tmp_path / "memory.max").write_text("5000000000\n")
    (tmp_path / "memory.current").write_text("3000000000\n")
    table = tmp_path / "meminfo"
    table.write_text("MemAvailable:   99000000 kB\n")
    finding = the_only(machine_checks.memory(tmp_path, table))
    assert finding.level is Level.WARNING
    assert finding.remedy == "run simulations with --num-nodes 2, or end other programs"


def test_threads_of_the_environment() -> None:
    many = str(len(usable_cores()) + 1)
    found = list(machine_checks.threads({"OMP_NUM_THREADS": many, "MKL_NUM_THREADS": "x", "OPENBLAS_NUM_THREADS": "1"}))
    assert levels(found) == [Level.WARNING, Level.WARNING, Level.OK]
    assert levels(machine_checks.threads({})) == [Level.OK]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a usable GPU")
def test_a_driver_that_torch_does_not_use_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    assert levels(machine_checks.gpus(driver)) == [Level.OK]
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\nGCC version: 12.3\n"
    )
    for build in (None, "12.4"):
        monkeypatch.setattr(torch.version, "cuda", build)
        finding = the_only(machine_checks.gpus(driver))
        assert finding.level is Level.WARNING
        assert "driver 535.104.05" in finding.text


@pytest.mark.cuda
def test_each_gpu_computes() -> None:
    assert levels(machine_checks.gpus()) == [Level.OK] * torch.cuda.device_count()


def test_folders_that_may_not_be_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    tmp_path.chmod(0)
    assert levels(doctor.data_sets(tmp_path))[-1] is Level.ERROR
    tmp_path.chmod(0o700)
