"""Fixtures that run a page's commands."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from console import ENVIRONMENT, Follow
from federations import Call


@pytest.fixture
def follow(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Follow:
    """Return a function that runs commands in the test's working folder, with an empty home, until one fails.

    A shell expands their words. `hyperfl` itself is called in this process, which takes a fifth of the time; it runs as
    a program of its own in test_readme.py and test_run.py.
    """
    home = tmp_path / "home"
    home.mkdir()
    for name, value in {"HOME": home, "XDG_CACHE_HOME": home / ".cache"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", os.pathsep.join([str(ENVIRONMENT / "bin"), os.environ.get("PATH", os.defpath)]))

    def run(lines: Sequence[str]) -> str:
        printed = ""
        for line in lines:
            is_own = line.startswith("hyperfl ")
            script = f"printf '%s\\0' {line}" if is_own else line
            done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            if is_own:
                code, output, errors = call(*done.stdout.split("\0")[1:-1])
                assert code == 0, errors
            printed += output if is_own else done.stdout
        return printed

    return run


@pytest.fixture
def own_code(follow: Follow) -> Iterator[Path]:
    """Let modules be imported from the working folder, which is returned; they are forgotten after the test."""
    folder, finders, path = Path.cwd(), list(sys.meta_path), list(sys.path)
    yield folder
    sys.meta_path[:], sys.path[:] = finders, path
    for name, module in list(sys.modules.items()):
        if folder in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]
