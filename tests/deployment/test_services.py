"""The systemd units of a deployment are run by a real systemd, in a container over this machine's file system.

It needs root, systemd-nspawn and overlayfs, and takes two minutes: it is run only with HYPERFL_TEST_SERVICES=1.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import copy_checkout

pytestmark = pytest.mark.skipif(
    os.environ.get("HYPERFL_TEST_SERVICES") != "1" or os.geteuid() != 0 or not shutil.which("systemd-nspawn"),
    reason="needs HYPERFL_TEST_SERVICES=1, root and systemd-nspawn",
)

UNIT = """[Unit]
After=network.target dbus.service
[Service]
Type=oneshot
ExecStart=/bin/sh {words}
TimeoutStartSec=900
"""

OFF = ("systemd-networkd.service", "nginx.service", "postgresql.service", "cron.service", "apt-daily.timer")
"""Services of this machine that the container does not need."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """Return the root of a copy of this machine's file system: what is written to it goes to memory."""
    lower, upper, root = (tmp_path / name for name in ("lower", "upper", "root"))
    for folder in (lower, upper, root):
        folder.mkdir()
    mounted = []
    try:
        for target, words in (
            (lower, ["--bind", "/", str(lower)]),
            (upper, ["-t", "tmpfs", "tmpfs", str(upper)]),
        ):
            subprocess.run(["mount", *words], check=True)
            mounted.append(target)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(lower)], check=True)
        (upper / "changes").mkdir()
        (upper / "work").mkdir()
        options = f"lowerdir={lower},upperdir={upper / 'changes'},workdir={upper / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], check=True)
        mounted.append(root)
        yield root
    finally:
        for target in reversed(mounted):
            subprocess.run(["umount", "--recursive", str(target)], check=True)


def test_the_units_run_restart_and_stop(machine: Path) -> None:
    """A run ends under systemd; killed programs are started again; both nodes take part in the next run."""
    units, results = machine / "etc" / "systemd" / "system", machine / "results"
    results.mkdir()
    # A machine that starts removes what is in /tmp, where the checkout may be.
    checkout = copy_checkout(machine / "opt")
    shutil.copy(Path(__file__).with_name("services.sh"), checkout)
    words = f"/opt/checkout/services.sh {Path(sys.executable).parent} /opt/checkout"
    (units / "hyperfl-test.service").write_text(UNIT.format(words=words))
    for name in OFF:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")
    wanted = units / "multi-user.target.wants" / "hyperfl-test.service"
    wanted.parent.mkdir(exist_ok=True)
    wanted.symlink_to("/etc/systemd/system/hyperfl-test.service")
    (machine / "root").chmod(0o711)  # an interpreter may lie below it
    done = subprocess.run(
        [
            "systemd-nspawn", f"--directory={machine}", "--register=no", "--keep-unit", "--private-network",
            "--machine=hyperfl-services", "--boot",
        ],
        env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    log = (results / "log").read_text() if (results / "log").is_file() else done.stdout + done.stderr
    journal = (results / "journal").read_text() if (results / "journal").is_file() else ""
    assert (results / "code").is_file(), log
    assert (results / "code").read_text().strip() == "0", f"{log[-6000:]}\n{journal[-6000:]}"
    for name, rounds in (("first", 2), ("second", 1)):
        summary = json.loads((results / f"{name}.json").read_text())
        assert (summary["rounds"], summary["num_nodes"]) == (rounds, 2)
    lines = (results / "active").read_text().splitlines()
    active = [dict(part.split("=", 1) for part in line.split()) for line in lines]
    found = {unit["Id"]: unit for unit in active}
    assert {unit["ActiveState"] for unit in active} == {"active"}
    assert int(found["hyperfl-node-0.service"]["NRestarts"]) >= 1
    assert int(found["hyperfl-superlink.service"]["NRestarts"]) == 1
    assert found["hyperfl-node-1.service"]["User"] == "hyperfl"
    assert found["hyperfl-superlink.service"]["User"] == "clinic"
    stopped = dict(line.split() for line in (results / "stopped").read_text().splitlines())
    assert set(stopped.values()) == {"inactive"}, f"{stopped}\n{journal[-6000:]}"
