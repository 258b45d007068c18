"""The commands of the README and of the site's pages, and a copy of the checkout in which tests run them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hyperfl_flwr import ROOT

ENVIRONMENT = Path(sys.prefix)

Follow = Callable[[Sequence[str]], str]
"""Runs commands one after the other, and returns what they print."""


def blocks(page: Path) -> list[list[str]]:
    """Return the commands of each console block of a page."""
    found = []
    for block in page.read_text().split("```console\n")[1:]:
        lines = block.split("```")[0].splitlines()
        found.append([line.removeprefix("$ ") for line in lines if line.startswith("$ ")])
    return found


def commands(page: Path) -> list[str]:
    """Return the commands of all console blocks of a page, in their order."""
    return [command for block in blocks(page) for command in block]


def script(lines: list[str]) -> str:
    """Return commands as a shell script that prints each and ends at the first that fails."""
    return "set -ex\n" + "\n".join(lines)


def block_with(page: Path, text: str) -> str:
    """Return the only console block of a page that contains a text, as a shell script."""
    (found,) = [block for block in blocks(page) if any(text in command for command in block)]
    return script(found)


def copy_checkout(folder: Path) -> Path:
    """Copy the checkout's app into a folder, with this environment as its .venv; return the copy."""
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("hyperfl_flwr", "strategies", "clients", "experiments"):
        shutil.copytree(ROOT / name, copy / name)  # with bytecode, so that the commands need not compile
    for name in ("scripts", "docs/reference"):
        shutil.copytree(ROOT / name, copy / name)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(ENVIRONMENT)
    return copy


def shell(script: str, checkout: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a script in a checkout, with a separate home folder and the environment's programs in PATH."""
    home = checkout.parent / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join([str(ENVIRONMENT / "bin"), os.environ.get("PATH", os.defpath)])
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PATH": path}
    return subprocess.run(
        ["bash", "-c", script], cwd=checkout, env={**os.environ, **own, **variables}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
