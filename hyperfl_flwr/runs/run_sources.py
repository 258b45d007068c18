"""Find the code of the user's own with which a run was trained: its method and its network."""

from collections.abc import Mapping
from pathlib import Path

from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.packages.user_code import is_user_code, user_code_in
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.runs.run_directory import read_manifest


def find_sources_of(run: Path, settings: Mapping[str, Scalar] | None = None) -> None:
    """Make the user's own code that a run was trained with importable; other versions are not imported.

    Args:
        run: The run's folder.
        settings: Its settings with changes; None without. Code that only they name is that of the working directory.

    Raises:
        ConfigError: If such code has the name of another package.
        RunDirectoryError: If the folder is not a run's, or the code is not there.
    """
    manifest = read_manifest(run)
    recorded = user_code_in(manifest["settings"])
    for code in recorded if settings is None else user_code_in(settings):
        if code not in recorded:
            code.find_new()
            continue
        try:
            code.find_recorded(run, manifest)
        except ConfigError as error:
            raise RunDirectoryError(f"the code of {run} is needed: {error}") from None


def method_of(run: Path) -> str:
    """Return the name of a run's method; one of the user's own is imported, as the version of the run.

    Raises:
        RunDirectoryError: If the folder is not a run's, this version does not have the method, or it cannot be
            imported.
    """
    name = str(read_manifest(run)["settings"].get("method"))
    find_sources_of(run)
    if name not in METHODS:
        raise RunDirectoryError(
            f"{run} is a run of {name!r}, which this version of hyperfl-flwr does not know; use the version in its "
            f"manifest.json"
        )
    if is_user_code(name):
        try:
            METHODS[name]
        except ConfigError as error:
            raise RunDirectoryError(f"the code of {run} is needed: {error}") from None
    return name
