"""Code of the user's own that a setting names as `package.module:name`: find it, import it, record and keep its source.

The source is the package or module at the top of the name, and nothing else in the folder that contains it. Other
modules of that folder would be missing on the nodes, so they cannot be imported here either.
"""

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.source_files import copy, digest_of, is_installed

FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""Pattern of a name, `package.module:name`."""

ENTRIES: Mapping[str, str] = {"target": "model", "method": "method"}
"""Setting that may name code of the user's own -> its entry in a run's manifest and in the handshake, and the folder
with a copy of the source in a run's or a node's folder."""

OURS = frozenset({"hyperfl_flwr", "clients", "strategies", "experiments"})
"""Names of this project's packages."""

LEFT_OUT = frozenset({"build", "dist", "eggs", "env", "lib", "lib64", "parts", "sdist", "var", "venv", "wheels"})
"""Top-level folders that Flower leaves out of an app."""


def is_user_code(name: str) -> bool:
    """Return whether a setting's value names code of the user's own."""
    return FORM.fullmatch(name) is not None


def user_code_in(settings: Mapping[str, Scalar]) -> list["UserCode"]:
    """Return the code of the user's own that a run's settings name: its network and its method."""
    return [UserCode(key, name) for key in ENTRIES if is_user_code(name := str(settings.get(key, "")))]


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
        return spec is not None and digest_of(_place(spec)) == digest

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module's spec, see `importlib.abc.MetaPathFinder`."""
        return PathFinder.find_spec(fullname, [str(self.folder)]) if fullname == self.name else None


@dataclass(frozen=True)
class UserCode:
    """Code of the user's own.

    Attributes:
        setting: The setting that names it, a key of `ENTRIES`.
        name: The setting's value, `package.module:name`.
    """

    setting: str
    name: str

    @property
    def top(self) -> str:
        """The package or module at the top of the name."""
        return self.name.partition(":")[0].partition(".")[0]

    @property
    def entry(self) -> str:
        """See `ENTRIES`."""
        return ENTRIES[self.setting]

    def problem(self, text: str) -> ConfigError:
        """Return an error about the code; its message begins with the setting."""
        return ConfigError(f"{self.setting} = {self.name}: {text}")

    def find_new(self, run: Path | None = None) -> Path | None:
        """Make the source importable from the working directory, or else from the copy in the folder of a run.

        See `find`.
        """
        return self.find([Path.cwd(), *([] if run is None else [run / self.entry])])

    def find_kept(self, folder: Path | None) -> Path | None:
        """Make the source importable from the copy in the folder of a run or node, or else from the working directory.

        See `find`.
        """
        return self.find([*([] if folder is None else [folder / self.entry]), Path.cwd()])

    def find(self, folders: Sequence[Path]) -> Path | None:
        """Look for the package or module in folders, and make it importable from there.

        What an earlier call found has no effect any more, unless it is the same source.

        Args:
            folders: Absolute paths, searched in this order.

        Returns:
            File or folder of the first match; None if it is in none of the folders and must be installed.

        Raises:
            ConfigError: If it has the name of another package, or Flower would leave it out of an app.
        """
        self._refuse_reserved()
        importlib.invalidate_caches()  # a copy may have been written a moment ago
        for folder in folders:
            spec = PathFinder.find_spec(self.top, [str(folder)])
            if spec is not None:
                path = _place(spec)
                self._check_name(path, folder)
                self._use(path, folder)
                return path
        self._forget(keep="")
        return None

    def _use(self, path: Path, folder: Path) -> None:
        digest = digest_of(path)
        self._forget(keep=digest)
        if not _finders(self.top):
            # First, so that another version on Python's path does not hide it.
            sys.meta_path.insert(0, PackageFinder(self.top, folder, digest))

    def _forget(self, keep: str) -> None:
        """Forget what another source was found and imported as; not the one with the SHA-256 `keep`."""
        finders = _finders(self.top)
        if any(finder.digest == keep and finder.finds(keep) for finder in finders):
            return
        module = sys.modules.get(self.top)
        spec = getattr(module, "__spec__", None)
        if finders or (keep and spec is not None and digest_of(_place(spec)) != keep):
            for name in [name for name in sys.modules if f"{name}.".startswith(f"{self.top}.")]:
                del sys.modules[name]
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders]

    def _refuse_reserved(self) -> None:
        if self.top in OURS or self.top in sys.stdlib_module_names:
            owner = "this project's" if self.top in OURS else "Python's"
            raise self.problem(f"{self.top} is {owner}; give your own package or module another name")

    def _check_name(self, path: Path, folder: Path) -> None:
        if self.top in LEFT_OUT or self.top.startswith("test_") or self.top.endswith("_test"):
            raise self.problem(f"Flower leaves {self.top} out of an app because of its name; rename {path}")
        others = [place for place in sys.path if Path(place or ".").resolve() != folder.resolve()]
        other = PathFinder.find_spec(self.top, others)
        if other is not None and is_installed(_place(other)):
            raise self.problem(f"{path} has the name of an installed package and would hide it; rename it")
        if path.is_file() and path.suffix != ".py":
            raise self.problem(f"{path} is not a Python source file; install it on all nodes instead")

    def load(self) -> object:
        """Import the module and return the object that the name names.

        Raises:
            ConfigError: If there is no such module or object, or the module cannot be imported.
        """
        module, _, attribute = self.name.partition(":")
        self._refuse_reserved()
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module}.".startswith(f"{error.name}."):
                text = f"no module {error.name} is in the working directory or installed"
            else:
                text = (
                    f"its module imports {error.name}, which is not found: the app contains {self.top} only; move "
                    f"{error.name} into it or install it on all nodes"
                )
            raise self.problem(text) from error
        except (Exception, SystemExit) as error:
            raise self.problem(f"the module {module} cannot be imported: {where(error)}") from error
        if not hasattr(imported, attribute):
            raise self.problem(f"{attribute} in module {module} does not exist")
        return getattr(imported, attribute)

    @property
    def source(self) -> Path | None:
        """The file or folder that this process imports the package from; None if there is none."""
        try:
            spec = importlib.util.find_spec(self.top)
        except ValueError:  # a module without a spec, which a program has put into sys.modules
            return None
        return None if spec is None else _place(spec)

    @property
    def travelling(self) -> Path | None:
        """The file or folder that the app must include; None if the nodes must have it installed."""
        source = self.source
        return None if source is None or is_installed(source) else source

    @property
    def sha256(self) -> str:
        """SHA-256 of the source; empty if there is none."""
        return "" if self.source is None else digest_of(self.source)

    def facts(self) -> dict[str, Any]:
        """Return the entry of a run's manifest: the name, the hash of the source, and whether it is installed."""
        if self.source is None:
            return {}
        key = "factory" if self.setting == "target" else "name"
        return {key: self.name, "sha256": self.sha256, "installed": is_installed(self.source)}

    def keep(self, folder: Path) -> None:
        """Copy the source into the folder of a run or node, unless it is installed or already there."""
        source = self.travelling
        if source is None:
            return
        kept = folder / self.entry / source.name
        if not kept.exists() or digest_of(kept) != digest_of(source):
            copy(source, folder / self.entry)

    def refuse_change(self, manifest: Mapping[str, Any]) -> None:
        """Check that a run is resumed with the source that it started with.

        Args:
            manifest: The run's manifest.

        Raises:
            RunDirectoryError: If it has changed.
        """
        if manifest.get(self.entry, {}).get("sha256", "") != self.sha256:
            what = "train the network" if self.setting == "target" else "use the method"
            raise RunDirectoryError(
                f"a resumed run must {what} that it started with, but the source of {self.name} has changed; undo the "
                f"change, or resume from another working directory: the run's folder has the first source in "
                f"{self.entry}/"
            )


def where(error: BaseException) -> str:
    """Return an error in one line, with the innermost line of user code in its traceback."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    libraries = [str(Path(torch).parent)] if torch else []
    others = (*libraries, str(ROOT / "hyperfl_flwr"), str(Path(importlib.__file__).parent), "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _finders(top: str) -> list[PackageFinder]:
    return [finder for finder in sys.meta_path if isinstance(finder, PackageFinder) and finder.name == top]


def _place(spec: ModuleSpec) -> Path:
    if spec.submodule_search_locations is not None:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(str(spec.origin))
