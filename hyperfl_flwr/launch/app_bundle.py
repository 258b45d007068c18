"""Bundle the app for Flower: copy its files, add code of the user's own, and record the commit."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.files.toml_files import app_file, flatten, toml_value
from hyperfl_flwr.core.packages.code_version import code_digest
from hyperfl_flwr.core.packages.source_files import copy, files_of
from hyperfl_flwr.core.packages.versions import COMMIT_VARIABLE
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.flower.env import training_environment

_INCLUDED = re.compile(r"^fab-include = \[.*?\]$", re.MULTILINE | re.DOTALL)


def build_app(folder: Path, sources: Sequence[Path] = (), settings: Mapping[str, Scalar] | None = None) -> Path:
    """Copy the app (packages, pyproject.toml, LICENSE) from this installation to a folder that Flower can submit.

    Args:
        folder: Folder to create; it must not exist.
        sources: Files or folders of a network and a method of the user's own to include.
        settings: Settings of the run by dotted key. Those of a method of the user's own are added to the app's table,
            since Flower passes on no others.

    Returns:
        The folder.
    """
    for pattern in included_files():
        for path in sorted(ROOT.glob(pattern)):
            if pattern.endswith(".py"):
                (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / path.relative_to(ROOT))
    recorded = f"COMMIT = {commit()!r}\nSOURCE = {code_digest()!r}\n"
    (folder / "hyperfl_flwr" / "core" / "packages" / "commit.py").write_text(recorded)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copyfile(app_file(name), folder / name)
    project = folder / "pyproject.toml"
    text = project.read_text()
    if sources:  # Flower leaves out files that are not listed
        for source in sources:
            copy(source, folder)
        included = [*included_files(), *(name for source in sources for name in files_of(source))]
        text = _INCLUDED.sub(lambda _: f"fab-include = {json.dumps(included)}", text)
    project.write_text(text + _tables_of_method(settings or {}))
    return folder


def _tables_of_method(settings: Mapping[str, Scalar]) -> str:
    """Return the tables of those of a run's settings that pyproject.toml does not have, for its end."""
    known = flatten(tomllib.loads(app_file("pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
    tables: dict[str, list[str]] = {}
    for key in settings:
        section, _, name = key.partition(".")
        if key not in known:
            tables.setdefault(section, []).append(f"{name} = {toml_value(settings[key])}\n")
    return "".join(f"\n[tool.flwr.app.config.{section}]\n{''.join(lines)}" for section, lines in tables.items())


def included_files() -> list[str]:
    """Return the glob patterns of the files that Flower sends to every node, relative to the app's folder."""
    patterns: list[str] = tomllib.loads(app_file("pyproject.toml").read_text())["tool"]["flwr"]["app"]["fab-include"]
    return patterns


def worker_environment() -> dict[str, str]:
    """Return the environment of a process that runs the app without Flower's engine.

    It passes on the checkout's commit; outside a checkout, as in a container, that of the environment. It adds this
    project's packages to the import path, because `python -P` leaves the working directory out: packages there may have
    the same names.
    """
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    version = commit() or os.environ.get(COMMIT_VARIABLE, "")
    return training_environment() | {COMMIT_VARIABLE: version, "PYTHONPATH": paths}


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
