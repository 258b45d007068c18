"""Bundle the app for Flower: copy its files, add a custom network, and record the commit."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.toml_files import app_file
from hyperfl_flwr.core.versions import COMMIT_VARIABLE
from hyperfl_flwr.launch.flower_env import training_environment
from hyperfl_flwr.models.custom import source as custom_source

_INCLUDED = re.compile(r"^fab-include = \[.*?\]$", re.MULTILINE | re.DOTALL)


def build_app(folder: Path, source: Path | None = None) -> Path:
    """Copy the app (packages, pyproject.toml, LICENSE) from this installation to a folder that Flower can submit.

    Args:
        folder: Folder to create; it must not exist.
        source: File or folder of a custom network to include; None without one.

    Returns:
        The folder.
    """
    for pattern in included_files():
        for path in sorted(ROOT.glob(pattern)):
            if pattern.endswith(".py"):
                (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / path.relative_to(ROOT))
    (folder / "hyperfl_flwr" / "core" / "commit.py").write_text(f"COMMIT = {commit()!r}\n")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copyfile(app_file(name), folder / name)
    if source is not None:
        _add(folder, source)
    return folder


def _add(app: Path, source: Path) -> None:
    """Copy a module or package into an app and add it to `fab-include`; Flower leaves out files not listed there."""
    custom_source.copy(source, app)
    project = app / "pyproject.toml"
    included = f"fab-include = {json.dumps([*included_files(), *custom_source.files_of(source)])}"
    project.write_text(_INCLUDED.sub(lambda _: included, project.read_text()))


def included_files() -> list[str]:
    """Return the glob patterns of the files that Flower sends to every node, relative to the app's folder."""
    patterns: list[str] = tomllib.loads(app_file("pyproject.toml").read_text())["tool"]["flwr"]["app"]["fab-include"]
    return patterns


def worker_environment() -> dict[str, str]:
    """Return the environment of a process that runs the app without Flower's engine.

    It passes on the checkout's commit. It adds this project's packages to the import path, because `python -P` leaves
    the working directory out: packages there may have the same names.
    """
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    return training_environment() | {COMMIT_VARIABLE: commit(), "PYTHONPATH": paths}


def commit() -> str:
    """Return the checkout's commit, with `-dirty` where files differ from it; empty outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.split()
        if Path(found[0]).resolve() != ROOT:  # installed inside another project's repository
            return ""
        status = subprocess.run(
            ["git", "-C", str(ROOT), "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found[1] + ("-dirty" if status.strip() else "")
