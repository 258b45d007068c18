"""Find the manifest of a run's folder, or say what the folder is instead."""

from pathlib import Path

from hyperfl_flwr.core.errors import RunDirectoryError

MANIFEST = "manifest.json"

SHOWN = 3
"""Number of runs that are named if a folder of several was given."""


def manifest_file(folder: Path) -> Path:
    """Return the path of the manifest in a run's folder.

    Raises:
        RunDirectoryError: If there is none; the message says whether the folder is missing, or holds runs.
    """
    file = folder / MANIFEST
    if file.is_file():
        return file
    if not folder.exists():
        raise RunDirectoryError(f"{folder} does not exist; give the folder of a run")
    held = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}")) if folder.is_dir() else []
    if held:
        more = f" and {len(held) - SHOWN} more" if len(held) > SHOWN else ""
        raise RunDirectoryError(
            f"{folder} is not a run's folder: it holds those of runs; give one of them: {', '.join(held[:SHOWN])}{more}"
        )
    raise RunDirectoryError(f"{folder} is not a run's folder: it has no {MANIFEST}; give the folder of a run")
