"""A study's folder: the settings that it was created with, its seeds, and which of its cells are finished."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cell_settings import changes_of, differences
from experiments.claims import alone, is_foreign
from experiments.study import Cell, Study
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.runs.run_directory import read_manifest, with_present_names

DESCRIPTION = "study.json"
"""Name of the file, in a study's folder, with the settings that the folder was created with."""


@dataclass(frozen=True, kw_only=True)
class StudyManifest:
    """The settings that a study's folder was created with; cells may be added, but the settings cannot change.

    Attributes:
        study: Name of the study.
        quick: Whether the study's `quick` settings apply.
        changes: Settings that differ from the study's, without those of the machine.
    """

    study: str
    quick: bool
    changes: Mapping[str, Scalar]


def open_study_folder(folder: Path, study_manifest: StudyManifest, study: Study | None = None) -> None:
    """Create a study's folder, or check that an existing one was created with the same settings.

    Args:
        folder: The study's folder.
        study_manifest: The settings.
        study: The study, if `num-nodes` may be one of the changes: its rows decide whether it is one of the machine.

    Raises:
        RunDirectoryError: If it was created with other settings, or is not a study's folder.
    """
    document = {
        "study": study_manifest.study,
        "quick": study_manifest.quick,
        "changes": changes_of(study, study_manifest.changes),
    }
    if is_foreign(folder, DESCRIPTION):
        raise RunDirectoryError(f"{folder} is neither empty nor a study's folder; choose another --output")
    with alone(folder):
        if not (folder / DESCRIPTION).is_file():
            write_atomically(folder / DESCRIPTION, json.dumps(document, indent=2).encode())
    if (before := _description(folder)) != document:
        texts = [f"{name} {old} instead of {new}" for name, (old, new) in _differences(before, document).items()]
        raise RunDirectoryError(f"{folder} was created with {', '.join(texts)}; choose another --output")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """Return what differs between two descriptions, by the name of a setting."""
    flat = [{**{name: each[name] for name in ("study", "quick")}, **each["changes"]} for each in (before, now)]
    own = "the study's own value"
    pairs = {name: (flat[0].get(name, own), flat[1].get(name, own)) for name in flat[0] | flat[1]}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def read_study_manifest(folder: Path) -> StudyManifest:
    """Return the settings that a study's folder was created with.

    Raises:
        RunDirectoryError: If it is not a study's folder, or its description is damaged.
    """
    if not (folder / DESCRIPTION).is_file():
        raise RunDirectoryError(f"{folder} is not a study's folder; run `hyperfl study` first, or pass its --output")
    return StudyManifest(**_description(folder))


def _description(folder: Path) -> dict[str, Any]:
    """Return the content of a study's description."""
    file = folder / DESCRIPTION
    try:
        found = json.loads(file.read_text())
        found["changes"] = with_present_names(found["changes"])
        StudyManifest(**found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = "remove the file and repeat the `hyperfl study` that made the folder: finished cells are kept"
        raise RunDirectoryError(f"{file} is damaged ({type(error).__name__}: {error}); {remedy}") from None
    return dict(found)


def seeds_in(folder: Path) -> int:
    """Return the number of seeds, counted from 0, that a study's folder has runs for; other folders do not count."""
    seeds = [path.name.removeprefix("seed-") for path in folder.glob("*/*/seed-*")]
    return max((int(seed) for seed in seeds if seed.isdecimal()), default=-1) + 1


def is_finished(cell: Cell, folder: Path) -> bool:
    """Return whether a cell's run is complete.

    Raises:
        RunDirectoryError: If it was run with other settings.
    """
    path = cell.folder(folder)
    if not (path / "manifest.json").is_file():
        return False
    manifest = read_manifest(path)
    if problems := differences(cell, manifest):
        raise RunDirectoryError(f"{path} was run with other settings ({'; '.join(problems)}); choose another --output")
    return bool(manifest["status"] == "completed" and (path / "summary.json").is_file())


def default_folder(study: str, *, quick: bool, recorded: bool = False) -> Path:
    """Return the default folder of a study's runs, or of those that are restored from records."""
    return Path(os.getcwd()) / "runs" / "studies" / (study + "-quick" * quick + "-records" * recorded)  # noqa: PTH109
