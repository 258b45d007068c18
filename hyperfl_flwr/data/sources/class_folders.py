"""Find the images of a folder by class: class folders, alone or below `train` and `test`."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.data.sources.image_files import files_below, is_image, refuse_dead_link

Images = Mapping[str, Sequence[Path]]
"""Image files by the name of their class."""

_PARTS = ("train", "training", "val", "valid", "validation", "test", "testing")
"""Names of folders, in small letters, that no class has if all folders have one."""


def class_folders(path: Path, classes: Collection[str] = ()) -> dict[str, Images]:
    """Return the images of `train` and `test`, or of `all` if the owner has not divided them.

    Raises:
        DataError: If there is only one of the folders `train` and `test`, they have other names, an image lies in no
            folder of a class, or a link leads nowhere.
    """
    folders = set(_folders(path))
    others = sorted(folders - {"train", "test", *classes})
    if others and not {"train", "test"} <= folders and all(name.lower() in _PARTS for name in folders):
        raise DataError(
            f"{path} must have folders train and test, or those of the classes, but has {', '.join(sorted(folders))}; "
            f"call the folders with the training and the test images train and test"
        )
    named = [part for part in ("train", "test") if (path / part).is_dir()]
    if len(named) == 1:
        raise DataError(
            f"{path} must have both folders train and test, or neither, but has only {named[0]}; add the other one, or "
            f"put the folders of the classes into {path} for an automatic split"
        )
    if named:
        return {part: _by_class(path / part) for part in named}
    return {"all": _by_class(path)}


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    for link in entries:
        if link.is_symlink() and not link.exists():
            refuse_dead_link(link)
    return [entry.name for entry in entries if entry.is_dir()]


def _by_class(folder: Path) -> Images:
    """Return the images below each class folder of `folder`, by class."""
    names = _folders(folder)
    if misplaced := [entry for entry in sorted(folder.iterdir()) if is_image(entry) and not entry.name.startswith(".")]:
        raise DataError(f"{misplaced[0]}: an image must lie in a folder named after its class, below {folder}; move it")
    if not names:
        raise DataError(f"{folder} must contain a folder of images for each class, but has no folders; add them")
    return {name: [file for file in files_below(folder / name) if is_image(file)] for name in names}
