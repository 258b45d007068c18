"""List, hash and copy the files of a module or package that an app includes."""

import hashlib
import shutil
import sysconfig
from pathlib import Path

from hyperfl_flwr.core.errors import ConfigError

SUFFIXES = frozenset({".py", ".toml", ".yaml", ".yml", ".json"})
"""Suffixes of the files that are copied; Flower puts no others into an app."""

LARGEST = 8_000_000
"""Largest size of all copied files, in bytes; Flower accepts apps of up to 10 MB."""


def files_of(path: Path) -> dict[str, Path]:
    """Return the files to copy of a module's file or a package's folder.

    Returns:
        Paths by name relative to the containing folder, sorted.

    Raises:
        ConfigError: If they are too large for an app.
    """
    found = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    named = {file.relative_to(path.parent).as_posix(): file for file in sorted(found) if file.suffix in SUFFIXES}
    kept = {name: file for name, file in named.items() if not _is_hidden(name)}
    if (size := sum(file.stat().st_size for file in kept.values())) > LARGEST:
        raise ConfigError(
            f"{path} has {size / 1e6:.0f} MB of source, an app can hold {LARGEST / 1e6:.0f} MB; put what the run needs "
            f"into a separate package, or install it on all nodes"
        )
    return kept


def _is_hidden(name: str) -> bool:
    parts = name.split("/")
    tests = parts[-1].startswith("test_") or parts[-1].endswith("_test.py")  # Flower leaves these out
    return tests or any(part.startswith(".") or part == "__pycache__" for part in parts)


def copy(path: Path, folder: Path) -> None:
    """Copy a module's file or a package's folder into a folder."""
    for name, file in files_of(path).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a module's file or a package's folder: of names and contents of the copied files."""
    total = hashlib.sha256()
    for name, file in files_of(path).items():
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{name} {content}\n".encode())
    return total.hexdigest()


def is_installed(path: Path) -> bool:
    """Return whether a module or package is in a folder where pip installs."""
    return any(path.is_relative_to(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
