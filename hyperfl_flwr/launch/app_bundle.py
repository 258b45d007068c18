"""What is handed to Flower for a run: the app's files, and the commit they are from."""

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

_INCLUDED = re.compile(r"^fab-include = \[.*\]$", re.MULTILINE)


def build_app(folder: Path, source: Path | None = None) -> Path:
    """Copy the app (packages, pyproject.toml, LICENSE) from this installation to a folder that Flower can submit.

    Args:
        folder: Does not exist yet.
        source: File or folder of a custom network that goes with it.
    """
    for package in ("hyperfl_flwr", "strategies", "clients"):
        shutil.copytree(
            ROOT / package,
            folder / package,
            ignore=lambda path, names: [n for n in names if _is_foreign(Path(path) / n)],
        )
    (folder / "hyperfl_flwr" / "commit.py").write_text(f"COMMIT = {commit()!r}\n")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copyfile(app_file(name), folder / name)
    if source is not None:
        _add(folder, source)
    return folder


def _add(app: Path, source: Path) -> None:
    """Copy a module or package into an app and name it in `fab-include`, without which Flower leaves it out."""
    custom_source.copy(source, app)
    project = app / "pyproject.toml"
    text = project.read_text()
    patterns = tomllib.loads(text)["tool"]["flwr"]["app"]["fab-include"]
    included = f"fab-include = {json.dumps([*patterns, *custom_source.files_of(source)])}"
    project.write_text(_INCLUDED.sub(lambda _: included, text))


def _is_foreign(path: Path) -> bool:
    return path.name == "__pycache__" or (path.is_file() and path.suffix != ".py")


def worker_environment() -> dict[str, str]:
    """Return the environment of a process that runs the app without Flower's engine.

    It knows the checkout's commit, and finds this project's packages without the working directory on its import path
    (`python -P`), where other packages may have their names.
    """
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    return training_environment() | {COMMIT_VARIABLE: commit(), "PYTHONPATH": paths}


def commit() -> str:
    """Return the checkout's commit, with `-dirty` where files differ from it; empty outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.split()
        if Path(found[0]).resolve() != ROOT:
            return ""
        status = subprocess.run(
            ["git", "-C", str(ROOT), "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found[1] + ("-dirty" if status.strip() else "")
