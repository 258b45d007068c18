"""Where the source of a network of somebody's own is: found, hashed, and copied into an app or a run's folder.

It is the package or module at the top of the factory's name, and nothing else of the folder in which it lies: what it
imports from there besides would be missing on the nodes, and is missing here, too.
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
"""What the name of an own target looks like."""

SUFFIXES = frozenset({".py", ".toml", ".yaml", ".yml", ".json"})
"""Files of a package that are copied; Flower takes no others."""

LARGEST = 8_000_000
"""Bytes of all of them; Flower takes 10 MB of an app."""

OURS = frozenset({"hyperfl_flwr", "clients", "strategies", "experiments"})

LEFT_OUT = frozenset({"build", "dist", "eggs", "env", "lib", "lib64", "parts", "sdist", "var", "venv", "wheels"})
"""Folders at the top of an app that Flower leaves out."""


def is_factory(name: str) -> bool:
    """Say whether a target's name is that of a factory."""
    return FORM.fullmatch(name) is not None


def top_level(name: str) -> str:
    """Return the package or module at the top of a factory's name."""
    return name.partition(":")[0].partition(".")[0]


class OnePackage:
    """Finds one package or module in one folder for `import`, and no other.

    Args:
        name: At the top.
        folder: Where it lies.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer Python's question for a module, see `importlib.abc.MetaPathFinder`."""
        return PathFinder.find_spec(fullname, [str(self.folder)]) if fullname == self.name else None


def find(name: str, folders: Sequence[Path]) -> Path | None:
    """Look for a factory's package or module in folders, and let Python import it from there.

    Args:
        name: `package.module:factory`.
        folders: Absolute, the first that has it counts.

    Returns:
        Its file or folder; None if it is in none of them and must be installed.

    Raises:
        ConfigError: If its name is another's, or Flower would not take it.
    """
    top = top_level(name)
    if top in OURS or top in sys.stdlib_module_names:
        whose = "this project's" if top in OURS else "Python's"
        raise ConfigError(f"target = {name}: {top} is {whose}; give your own package or module another name")
    for folder in folders:
        spec = PathFinder.find_spec(top, [str(folder)])
        if spec is None:
            continue
        path = _place(spec)
        _check_name(name, path, folder)
        files_of(path)
        sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "name", None) != top]
        sys.meta_path.append(OnePackage(top, folder))
        return path
    return None


def _place(spec: ModuleSpec) -> Path:
    if spec.submodule_search_locations is not None:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(str(spec.origin))


def _check_name(name: str, path: Path, folder: Path) -> None:
    top = top_level(name)
    other = PathFinder.find_spec(top, [place for place in sys.path if Path(place or ".").resolve() != folder.resolve()])
    if other is not None and not _is_copy(path, _place(other)):
        raise ConfigError(f"target = {name}: {path} has an installed package's name, which it would hide; rename it")
    if top in LEFT_OUT or top.startswith("test_") or top.endswith("_test"):
        raise ConfigError(f"target = {name}: Flower's apps leave out what is called {top}; rename {path}")
    if path.is_file() and path.suffix != ".py":
        raise ConfigError(f"target = {name}: {path} is no Python source; install it on all nodes instead")


def _is_copy(path: Path, other: Path) -> bool:
    """Say whether two places that are nobody's installation hold the same source."""
    return other.exists() and not is_installed(other) and digest_of(other) == digest_of(path)


def files_of(path: Path) -> dict[str, Path]:
    """Return what is copied of a module's file or a package's folder, by names relative to where it lies, in order.

    Raises:
        ConfigError: If it is too much for an app.
    """
    found = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    named = {each.relative_to(path.parent).as_posix(): each for each in sorted(found) if each.suffix in SUFFIXES}
    kept = {name: each for name, each in named.items() if not _is_hidden(name)}
    if (size := sum(each.stat().st_size for each in kept.values())) > LARGEST:
        raise ConfigError(
            f"{path} has {size / 1e6:.0f} MB of source, an app takes {LARGEST / 1e6:.0f} MB; put the network into a "
            f"package of its own, or install it on all nodes"
        )
    return kept


def _is_hidden(name: str) -> bool:
    parts = name.split("/")
    tests = parts[-1].startswith("test_") or parts[-1].endswith("_test.py")  # which Flower leaves out
    return tests or any(part.startswith(".") or part == "__pycache__" for part in parts)


def copy(path: Path, folder: Path) -> None:
    """Copy a module's file or a package's folder into a folder."""
    for name, file in files_of(path).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)


def digest_of(path: Path) -> str:
    """Return a hash of a module's file or a package's folder: names and contents of what is copied."""
    total = hashlib.sha256()
    for name, file in files_of(path).items():
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{name} {content}\n".encode())
    return total.hexdigest()


def source_of(name: str) -> Path | None:
    """Return the file or folder of the package or module that this process imports a factory from; None if none."""
    spec = importlib.util.find_spec(top_level(name))
    return None if spec is None else _place(spec)


def is_installed(path: Path) -> bool:
    """Say whether a module or package lies where pip puts them."""
    return any(path.is_relative_to(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
