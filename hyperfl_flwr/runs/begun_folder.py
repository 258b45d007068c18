"""Know the folder of a run that ended before its manifest was written, and that holds nothing."""

from pathlib import Path

SUBFOLDERS = ("checkpoints", "failures", "plots")


def holds_nothing(path: Path) -> bool:
    """Return whether a folder is empty, or has only what a run makes in it before its manifest."""
    return all(_is_from_begin(entry) for entry in path.iterdir())


def _is_from_begin(entry: Path) -> bool:
    if entry.is_symlink():
        return False
    if entry.is_dir():
        return entry.name in {*SUBFOLDERS, "clients"} and not any(entry.iterdir())
    return entry.name == ".lock" or entry.name.startswith(".manifest.json.")
