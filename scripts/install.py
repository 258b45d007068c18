"""Makes `.venv` and installs the project into it; `make` calls this before everything else.

    python3 scripts/install.py          what running needs
    python3 scripts/install.py dev      and the tools for tests and checks

It can be interrupted at any moment: a note in `.venv` says whether the last installation was finished and for which
pyproject.toml and constraints.txt, and the next call repairs what is missing. Needs the standard library only, and
starts on any Python from 3.7 so that it can say which Python it needs.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ((3, 11), (3, 12), (3, 13))
NOTE = "hyperfl-install.json"
DROPPED = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PIP_PREFIX", "PIP_ROOT", "PIP_TARGET")
"""Settings of an activated environment, or of the user's pip, that would lead the installation elsewhere."""


class InstallError(Exception):
    """The installation cannot go on; the message says what to do."""


def main() -> int:
    """Install, or say why not."""
    parser = argparse.ArgumentParser(description="Make .venv and install the project into it.")
    parser.add_argument("what", nargs="?", choices=("run", "dev"), default="run")
    what = parser.parse_args().what
    try:
        check_python()
        with Lock(ROOT):
            install(ROOT, dev=what == "dev")
    except InstallError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted. Start it again: it goes on from here.\n")
        return 130
    return 0


class Lock:
    """Keeps a second installation into the same folder waiting."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1

    def __enter__(self) -> None:
        self._descriptor = os.open(str(self._folder), os.O_RDONLY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def check_python() -> None:
    """Go on with a Python that the project supports, or raise an error that names one."""
    if sys.version_info[:2] not in SUPPORTED:
        found = "" if os.environ.get("PYTHON") else find_python()
        if not found:
            asked = os.environ.get("PYTHON") or "python3"
            raise InstallError(
                f"Python 3.11, 3.12 or 3.13 is needed, but {asked} is {sys.version.split()[0]} ({sys.executable}).\n"
                "Install one of them, then choose it, for example: make run PYTHON=python3.12"
            )
        os.execv(found, [found, *sys.argv])  # noqa: S606 - it replaces this process, without a shell
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        version = "{}.{}".format(*sys.version_info[:2])
        raise InstallError(
            f"{sys.executable} lacks the module {missing[0]}, which makes virtual environments.\n"
            f"On Debian and Ubuntu: sudo apt install python{version}-venv"
        )


def find_python() -> str:
    """Return the path of a supported Python that works, or nothing."""
    for major, minor in reversed(SUPPORTED):
        path = shutil.which(f"python{major}.{minor}")
        if path and python_version(Path(path)) == (major, minor):
            return path
    return ""


def python_version(python: Path) -> tuple[int, ...]:
    """Return a Python's major and minor version, or nothing if it does not run."""
    try:
        done = run([str(python), "-I", "-c", "import sys; print(*sys.version_info[:2])"], quiet=True)
    except OSError:
        return ()
    words = done.stdout.split() if done.returncode == 0 else []
    return tuple(int(word) for word in words if word.isdigit())


def install(root: Path, *, dev: bool) -> None:
    """Bring `.venv` to the state that the project asks for; quick if it is in it already."""
    venv = root / ".venv"
    fault = fault_of(venv, root)
    if fault == "has no working pip":  # as in one made by uv, or half-made by us
        run([str(venv / "bin/python"), "-m", "ensurepip", "--default-pip"], quiet=True)
        fault = fault_of(venv, root)
    if fault:
        if venv.exists() or venv.is_symlink():
            say(f"Making .venv again: it {fault}.")
        make(venv)
    note = read_note(venv)
    key = key_of(root, venv)
    dev = dev or bool(note.get("dev"))
    if note.get("complete") and note.get("key") == key and note.get("dev") == dev and (venv / "bin/hyperfl").is_file():
        return
    if not note.get("complete"):
        mend(site_packages(venv))
    own_torch = has_own_torch(root, venv, note)
    write_note(venv, complete=False, key=key, dev=bool(note.get("dev")), own_torch=own_torch, root=str(root))
    constraints = venv / "constraints.txt"
    constraints.write_text(constraints_for(root, own_torch=own_torch))
    say("Installing into .venv; the first time this takes some minutes.")
    target = ".[dev]" if dev else "."
    command = [str(venv / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
    done = run([*command, "-c", str(constraints), "-e", target], folder=root)
    if done.returncode != 0:
        raise InstallError("pip could not install the project, see above. Start it again: what is there is kept.")
    write_note(venv, complete=True, key=key, dev=dev, own_torch=own_torch, root=str(root))


def fault_of(venv: Path, root: Path) -> str:
    """Return why `.venv` cannot be used, or nothing if it can."""
    version = python_version(venv / "bin/python") if (venv / "pyvenv.cfg").is_file() else ()
    note = read_note(venv)
    if not version:
        return "was not finished, or its Python is gone"
    if version not in SUPPORTED:
        return "has Python {}.{}".format(*version)
    if os.environ.get("PYTHON") and version != sys.version_info[:2]:
        return "has Python {}.{}, and PYTHON asks for {}.{}".format(*version, *sys.version_info[:2])
    if note.get("root", str(root)) != str(root):
        return f"was made in {note['root']} and cannot be moved"
    if not note.get("complete") and run([str(venv / "bin/python"), "-m", "pip", "--version"], quiet=True).returncode:
        return "has no working pip"
    return ""


def make(venv: Path) -> None:
    """Make a new virtual environment in place of whatever is there."""
    if venv.is_symlink() or venv.is_file():
        venv.unlink()
    elif venv.exists():
        shutil.rmtree(str(venv))
    # Not sys.executable: inside an activated .venv that would be the one just removed.
    python = getattr(sys, "_base_executable", None) or sys.executable
    if run([python, "-m", "venv", str(venv)]).returncode != 0:
        version = "{}.{}".format(*sys.version_info[:2])
        raise InstallError(
            f"{python} could not make a virtual environment, see above.\n"
            f"On Debian and Ubuntu this may help: sudo apt install python{version}-venv"
        )


def key_of(root: Path, venv: Path) -> str:
    """Return a text that changes when the installation has to be done again."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes() + b"\0")
    digest.update(repr(python_version(venv / "bin/python")).encode())
    return digest.hexdigest()


def read_note(venv: Path) -> dict[str, object]:
    """Return what the last installation wrote down, nothing if there was none."""
    try:
        note = json.loads((venv / NOTE).read_text())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def write_note(venv: Path, **values: object) -> None:
    """Write down how the installation stands, all of it or nothing."""
    temporary = venv / f"{NOTE}.new"
    temporary.write_text(json.dumps(values))
    temporary.replace(venv / NOTE)


def site_packages(venv: Path) -> Path:
    """Return the folder of the installed packages."""
    return next(iter(sorted(venv.glob("lib/python3*/site-packages"))), venv / "lib")


def mend(packages: Path) -> None:
    """Make pip install again what an interrupted installation left incomplete."""
    for half in packages.glob("~*"):
        shutil.rmtree(str(half), ignore_errors=True)
    for record in damaged(packages):
        say(f"{record.name[: -len('.dist-info')]} is incomplete and is installed again.")
        shutil.rmtree(str(record))  # without its record pip takes the package for absent, and writes over its files


def damaged(packages: Path) -> list[Path]:
    """Return the records of the packages of which a file is missing or has the wrong size."""
    return [record for record in sorted(packages.glob("*.dist-info")) if not is_complete(record)]


def is_complete(record: Path) -> bool:
    """Return whether all files of an installed package are there."""
    needed = [record / name for name in ("METADATA", "RECORD", "INSTALLER")]
    if not all(path.is_file() and path.stat().st_size for path in needed):
        return False
    with (record / "RECORD").open(newline="") as rows:
        for row in csv.reader(rows):
            if len(row) == 3 and row[2].isdigit():
                path = record.parent / row[0]
                if not path.is_file() or path.stat().st_size != int(row[2]):
                    return False
    return True


def has_own_torch(root: Path, venv: Path, note: dict[str, object]) -> bool:
    """Return whether the user chose the torch in `.venv`: it was there before us and is not what we would install."""
    records = site_packages(venv).glob("torch-*.dist-info")
    versions = [path.name[len("torch-") : -len(".dist-info")] for path in records]
    pinned = [line.partition("==")[2] for line in pins(root) if line.startswith("torch==")]
    if not versions or versions[0].partition("+")[0] in pinned:
        return False
    return bool(note.get("own_torch", True))


def pins(root: Path) -> list[str]:
    """Return the lines of constraints.txt that are not comments."""
    lines = (root / "constraints.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def constraints_for(root: Path, *, own_torch: bool) -> str:
    """Return the constraints to use, without those that would replace the user's own torch."""
    kept = [line for line in pins(root) if not (own_torch and line.startswith(("torch==", "torchvision==")))]
    return "".join(f"{line}\n" for line in kept)


def run(command: list[str], *, quiet: bool = False, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command without the settings of an activated environment."""
    environment = {name: value for name, value in os.environ.items() if name not in DROPPED}
    environment.update(PIP_USER="0", PIP_REQUIRE_VIRTUALENV="0")
    return subprocess.run(command, env=environment, cwd=str(folder), capture_output=quiet, text=True, check=False)


def say(text: str) -> None:
    """Tell the user what happens."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
