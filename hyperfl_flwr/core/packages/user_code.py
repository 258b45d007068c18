"""Code of the user's own that a setting names as `package.module:name`: find it, import it, record and keep its source.

The source is the package or module at the top of the name, and nothing else in the folder that contains it. Other
modules of that folder would be missing on the nodes, so they cannot be imported here either.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.packages.package_finder import PackageFinder, finders_of, place_of, where
from hyperfl_flwr.core.packages.source_files import copy, digest_of, is_installed
from hyperfl_flwr.core.setting_types import Scalar

FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""Pattern of a name, `package.module:name`."""

FILE = re.compile(r"(?:.*[/\\])?([A-Za-z_]\w*)(?:\.py)?(?::([A-Za-z_]\w*))?", re.ASCII)
"""Pattern of what users write in the place of a name: its module or file, and perhaps the object."""

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


def form_hint(what: str, given: str, default: str) -> str:
    """Return how to name one's own code, as the end of an error; empty if what is given is no module or file.

    Args:
        what: What the code is, for example `method`.
        given: What the user has written, for example `clipped` or `clipped.py:METHOD`.
        default: Usual name of the object in the module, if none is given.
    """
    found = FILE.fullmatch(given)
    return f"; for a {what} of your own write {found[1]}:{found[2] or default} (without .py)" if found else ""


def user_code_in(settings: Mapping[str, Scalar]) -> list["UserCode"]:
    """Return the code of the user's own that a run's settings name: its network and its method."""
    return [UserCode(key, name) for key in ENTRIES if is_user_code(name := str(settings.get(key, "")))]


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

    def find_recorded(self, run: Path, manifest: Mapping[str, Any]) -> None:
        """Make the source importable that a run was trained with, from its folder, the working directory or elsewhere.

        Args:
            run: The run's folder.
            manifest: Its manifest.

        Raises:
            ConfigError: If no place has that source; nothing else is imported. And as `find` does.
        """
        sha256 = str(manifest.get(self.entry, {}).get("sha256", ""))
        found = self.find([run / self.entry, Path.cwd()], sha256) if sha256 else None
        if not sha256 or (found is None and self.sha256 != sha256):
            raise self.problem(
                f"{run / self.entry} does not hold the source that the run was trained with, and neither does the "
                f"working directory; restore it there"
            )

    def find(self, folders: Sequence[Path], sha256: str = "") -> Path | None:
        """Look for the package or module in folders, and make it importable from there.

        What an earlier call found has no effect any more, unless it is the same source.

        Args:
            folders: Absolute paths, searched in this order.
            sha256: SHA-256 of the source to look for; empty for any.

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
                path = place_of(spec)
                if sha256 and digest_of(path) != sha256:
                    continue
                self._check_name(path, folder)
                self._use(path, folder)
                return path
        self._forget(keep="")
        return None

    def _use(self, path: Path, folder: Path) -> None:
        digest = digest_of(path)
        self._forget(keep=digest)
        if not finders_of(self.top):
            # First, so that another version on Python's path does not hide it.
            sys.meta_path.insert(0, PackageFinder(self.top, folder, digest))

    def _forget(self, keep: str) -> None:
        """Forget what another source was found and imported as; not the one with the SHA-256 `keep`."""
        finders = finders_of(self.top)
        if any(finder.digest == keep and finder.finds(keep) for finder in finders):
            return
        module = sys.modules.get(self.top)
        spec = getattr(module, "__spec__", None)
        if finders or (keep and spec is not None and digest_of(place_of(spec)) != keep):
            self._forget_modules()
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
        if other is not None and is_installed(place_of(other)):
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
                hint = form_hint(ENTRIES[self.setting], self.name, attribute) if module.endswith(".py") else ""
                text = f"no module {error.name} is in the working directory or installed{hint}"
            else:
                text = (
                    f"its module imports {error.name}, which is not found: the app contains {self.top} only; move "
                    f"{error.name} into it or install it on all nodes"
                )
            raise self.problem(text) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit
            raise self.problem(f"the module {module} cannot be imported: {where(error)}") from error
        try:
            return getattr(imported, attribute)
        except AttributeError:
            raise self.problem(f"{attribute} in module {module} does not exist") from None
        except Exception as error:
            raise self.problem(f"{attribute} in module {module} cannot be read: {where(error)}") from error

    @contextmanager
    def imported_apart(self) -> Iterator[None]:
        """Import the code again within a block, as another process would; afterwards it is what it was before."""
        before = self._forget_modules()
        try:
            yield
        finally:
            self._forget_modules()
            sys.modules.update(before)

    def _forget_modules(self) -> dict[str, ModuleType]:
        names = [name for name in sys.modules if f"{name}.".startswith(f"{self.top}.")]
        return {name: sys.modules.pop(name) for name in names}

    def refuse_other_module(self, path: str) -> None:
        """Check that an object of the code, `package.module:name`, is in the package, this project's, or installed.

        Raises:
            ConfigError: If it is elsewhere, where neither the app nor the hash of the source would include it.
        """
        if not is_user_code(path):
            raise self.problem(f"{path!r} must be package.module:name; correct the declaration")
        other = UserCode(self.setting, path)
        if other.top not in (self.top, *OURS) and other.travelling is not None:
            raise self.problem(
                f"{path} is in {other.travelling}, but the app contains {self.top} only; move it into {self.top}, or "
                f"install it on all nodes"
            )

    @property
    def source(self) -> Path | None:
        """The file or folder that this process imports the package from; None if there is none."""
        try:
            spec = importlib.util.find_spec(self.top)
        except ValueError:  # a module without a spec, which a program has put into sys.modules
            return None
        return None if spec is None else place_of(spec)

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
                f"a resumed run must {what} that it started with, but the source of {self.name} has changed; start a "
                f"new run with the changed source, undo the change, or resume from another working directory: the "
                f"run's folder has the first source in {self.entry}/"
            )
