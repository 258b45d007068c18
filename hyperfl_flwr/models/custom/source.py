"""Find, hash and copy the source of a user-supplied network.

The source is the package or module at the top of the factory's name, and nothing else in the folder that contains it.
Other modules of that folder would be missing on the nodes, so they cannot be imported here either.
"""

import hashlib
import importlib.machinery
import importlib.util
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from hyperfl_flwr.core.errors import ConfigError

FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""Pattern of a user-supplied target's name, `package.module:factory`."""

SUFFIXES = frozenset({".py", ".toml", ".yaml", ".yml", ".json"})
"""Suffixes of the files that are copied; Flower puts no others into an app."""

LARGEST = 8_000_000
"""Largest size of all copied files, in bytes; Flower accepts apps of up to 10 MB."""

OURS = frozenset({"hyperfl_flwr", "clients", "strategies", "experiments"})
"""Names of this project's packages."""

LEFT_OUT = frozenset({"build", "dist", "eggs", "env", "lib", "lib64", "parts", "sdist", "var", "venv", "wheels"})
"""Top-level folders that Flower leaves out of an app."""


def is_factory(name: str) -> bool:
    """Return whether a target's name is the name of a factory."""
    return FORM.fullmatch(name) is not None


def top_level(name: str) -> str:
    """Return the package or module at the top of a factory's name."""
    return name.partition(":")[0].partition(".")[0]


class PackageFinder:
    """An import finder for one package or module in one folder; it finds nothing else there.

    Args:
        name: Top-level name of the package or module.
        folder: Folder that contains it.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module's spec, see `importlib.abc.MetaPathFinder`."""
        return PathFinder.find_spec(fullname, [str(self.folder)]) if fullname == self.name else None


def find(name: str, folders: Sequence[Path]) -> Path | None:
    """Look for a factory's package or module in folders, and make it importable from there.

    Args:
        name: Name of the factory, `package.module:factory`.
        folders: Absolute paths, searched in this order.

    Returns:
        File or folder of the first match; None if it is in none of the folders and must be installed.

    Raises:
        ConfigError: If it has the name of another package, or Flower would leave it out of an app.
    """
    top = top_level(name)
    if top in OURS or top in sys.stdlib_module_names:
        owner = "this project's" if top in OURS else "Python's"
        raise ConfigError(f"target = {name}: {top} is {owner}; give your own package or module another name")
    for folder in folders:
        spec = PathFinder.find_spec(top, [str(folder)])
        if spec is None:
            continue
        path = _place(spec)
        _check_name(name, path, folder)
        files_of(path)  # raises if the source is too large for an app
        # A finder of an earlier call may point to another folder, such as the copy of another run.
        sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "name", None) != top]
        sys.meta_path.append(PackageFinder(top, folder))
        return path
    return None


def _place(spec: ModuleSpec) -> Path:
    if spec.submodule_search_locations is not None:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(str(spec.origin))


def _check_name(name: str, path: Path, folder: Path) -> None:
    top = top_level(name)
    if top in LEFT_OUT or top.startswith("test_") or top.endswith("_test"):
        raise ConfigError(f"target = {name}: Flower leaves {top} out of an app because of its name; rename {path}")
    other = PathFinder.find_spec(top, [place for place in sys.path if Path(place or ".").resolve() != folder.resolve()])
    if other is not None and not _is_copy(path, _place(other)):
        raise ConfigError(f"target = {name}: {path} has the name of an installed package and would hide it; rename it")
    if path.is_file() and path.suffix != ".py":
        raise ConfigError(f"target = {name}: {path} is not a Python source file; install it on all nodes instead")


def _is_copy(path: Path, other: Path) -> bool:
    """Return whether two paths are uninstalled copies of one source."""
    return other.exists() and not is_installed(other) and digest_of(other) == digest_of(path)


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
            f"{path} has {size / 1e6:.0f} MB of source, an app can hold {LARGEST / 1e6:.0f} MB; put the network into a "
            f"separate package, or install it on all nodes"
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


def source_of(name: str) -> Path | None:
    """Return the file or folder that this process imports a factory's package from; None if there is none."""
    spec = importlib.util.find_spec(top_level(name))
    return None if spec is None else _place(spec)


def is_installed(path: Path) -> bool:
    """Return whether a module or package is in a folder where pip installs."""
    return any(path.is_relative_to(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
