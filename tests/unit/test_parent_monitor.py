"""A process that waits for a lock ends when its parent is killed: by SIGINT, or by SIGKILL if it does not end then."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyperfl_flwr import ROOT

CHILD = """
import os, signal, sys, threading
from hyperfl_flwr.flower.parent_monitor import end_with_parent

def ended(number, frame):
    open(sys.argv[1], "w").write(signal.Signals(number).name)
    if sys.argv[2] == "ends":
        os._exit(1)

signal.signal(signal.SIGINT, ended)
end_with_parent(grace=0.5)
print(os.getpid(), flush=True)
lock = threading.Lock()
lock.acquire()
while True:
    lock.acquire()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="processes are read from Linux's /proc")
@pytest.mark.parametrize("kind", ["ends", "stays"])
def test_a_process_that_waits_for_a_lock_ends_with_its_parent(kind: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(note), kind],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert note.read_text() == signal.Signals.SIGINT.name


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended; one that nobody waits for stays as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
