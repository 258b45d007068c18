"""Import one package or module from one folder, and say where its errors come from."""

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.packages.source_files import digest_of, is_installed


class PackageFinder:
    """An import finder for one package or module in one folder; it finds nothing else there.

    Args:
        name: Top-level name of the package or module.
        folder: Folder that contains it.
        digest: SHA-256 of its source.
    """

    def __init__(self, name: str, folder: Path, digest: str) -> None:
        self.name, self.folder, self.digest = name, folder, digest

    def finds(self, digest: str) -> bool:
        """Return whether the source in the folder still has this SHA-256."""
        spec = PathFinder.find_spec(self.name, [str(self.folder)])
        return spec is not None and digest_of(place_of(spec)) == digest

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module's spec, see `importlib.abc.MetaPathFinder`."""
        if not f"{fullname}.".startswith(f"{self.name}."):
            return None
        spec = PathFinder.find_spec(fullname, [str(self.folder)] if fullname == self.name else path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _SourceLoader(fullname, spec.loader.path)
        return spec


class _SourceLoader(SourceFileLoader):
    """Compiles the source that is there: Python's cached bytecode may be of a version of the same second and size."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile a module."""
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True)


def where(error: BaseException) -> str:
    """Return an error in one line, with the innermost line of user code in its traceback.

    User code can be an installed package: if no line outside libraries is in the traceback, the innermost one that is
    not of this project, torch or Python's import system is taken.
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    libraries = [str(Path(torch).parent)] if torch else []
    others = (*libraries, str(ROOT / "hyperfl_flwr"), str(Path(importlib.__file__).parent), "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    frames = [frame for frame in frames if not _is_library(Path(frame.filename))] or frames
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _is_library(path: Path) -> bool:
    return is_installed(path) or path.is_relative_to(sysconfig.get_path("stdlib"))


def finders_of(top: str) -> list[PackageFinder]:
    """Return this process's finders of a package or module."""
    return [finder for finder in sys.meta_path if isinstance(finder, PackageFinder) and finder.name == top]


def place_of(spec: ModuleSpec) -> Path:
    """Return the file of a module, or the folder of a package."""
    if spec.submodule_search_locations is not None:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(str(spec.origin))
