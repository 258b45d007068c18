"""What is handed to Flower for a run: the app's files, the commit they are from, and the settings."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from hyperfl_flwr import ROOT
from hyperfl_flwr.config import RunConfig, app_file
from hyperfl_flwr.models import own_source
from hyperfl_flwr.models.own import is_factory
from hyperfl_flwr.scalars import Scalar

_INCLUDED = re.compile(r"^fab-include = \[.*\]$", re.MULTILINE)


def build_app(folder: Path, target: str) -> Path:
    """Copy the app (packages, pyproject.toml, LICENSE) from this installation to a folder that Flower can submit.

    Args:
        folder: Does not exist yet.
        target: The setting: the source of somebody's own network goes with it, unless pip has installed that.
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
    source = own_source.source_of(target) if is_factory(target) else None
    if source is not None and not own_source.is_installed(source):
        _add(folder, source)
    return folder


def _add(app: Path, source: Path) -> None:
    """Copy a module or package into an app and name it in `fab-include`, without which Flower leaves it out."""
    own_source.copy(source, app)
    project = app / "pyproject.toml"
    text = project.read_text()
    patterns = tomllib.loads(text)["tool"]["flwr"]["app"]["fab-include"]
    included = f"fab-include = {json.dumps([*patterns, *own_source.files_of(source)])}"
    project.write_text(_INCLUDED.sub(lambda _: included, text))


def _is_foreign(path: Path) -> bool:
    return path.name == "__pycache__" or (path.is_file() and path.suffix != ".py")


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


def settings_text(config: RunConfig) -> str:
    """Return a TOML file of all settings, as Flower takes it."""
    return "".join(f"{_toml_key(key)} = {_toml(value)}\n" for key, value in config.flat().items())


def _toml_key(key: str) -> str:
    return f'"{key}"' if "." in key else key


def _toml(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)
