"""Keep the finished cells of a study in one small file, from which tables and figures are made without the runs.

A file of records has a JSON object on each line::

    {"study": NAME, "quick": false, "changes": {}}      the first line: as in the study.json of the study's folder
    {"base": ID, "settings": {}}                        settings that cells refer to
    {"row": NAME, "column": NAME, "seed": 0, ...}       a cell, see `experiments.recording`

`experiments/records` holds those of the project's own results. A record is a run's folder without private state,
checkpoints and single clients' lines: all settings but the machine's, commit, versions and hardware, summary.json with
single clients' scores, some rounds of the means over the clients, and the code's fingerprints (`experiments.golden`).
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.cell_settings import differences
from experiments.golden import changes
from experiments.restored import remove_restored, restore_cell
from experiments.study import FOLDER, Cell, Place, Study
from experiments.study_folder import StudyManifest, open_study_folder
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.similar_names import nearest

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Records:
    """The contents of a file of records.

    Attributes:
        study_manifest: The settings of the study that all cells have in common.
        bases: Settings that cells refer to, by the id of each.
        cells: The cells.
    """

    study_manifest: StudyManifest
    bases: Mapping[str, Mapping[str, Scalar]]
    cells: Mapping[Place, Json]

    def only(self, rows: Collection[str] = (), columns: Collection[str] = ()) -> "Records":
        """Return the records of some rows and columns; no names stand for all."""
        cells = {
            (row, column, seed): cell
            for (row, column, seed), cell in self.cells.items()
            if (not rows or row in rows) and (not columns or column in columns)
        }
        return replace(self, cells=cells)


def shipped_records() -> list[str]:
    """Return the names of the project's own files of records."""
    return sorted(path.stem for path in (FOLDER / "records").glob("*.jsonl"))


def find_records(name: str) -> Path:
    """Return the path of a file of records: a path, or the name of one of the project's own.

    Raises:
        RunDirectoryError: If there is none.
    """
    for path in (Path(name), FOLDER / "records" / f"{name}.jsonl"):
        if path.is_file():
            return path
    known = shipped_records()
    raise RunDirectoryError(f"there is no file of records {name}; known: {', '.join(known)}{nearest(name, known)}")


def read_records(file: Path) -> Records:
    """Read a file of records.

    Raises:
        RunDirectoryError: If it is not one.
    """
    try:
        first, *rest = [json.loads(line) for line in file.read_text().splitlines()]
        return Records(
            study_manifest=StudyManifest(**first),
            bases={line["base"]: line["settings"] for line in rest if "row" not in line},
            cells={(line["row"], line["column"], line["seed"]): line for line in rest if "row" in line},
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunDirectoryError(
            f"{file} is not a file of records ({type(error).__name__}: {error}); give one that `hyperfl record` wrote"
        ) from None


def stale_cells(study: Study, records: Records) -> dict[Place, str]:
    """Return the recorded cells that would have other results by now, with the reasons.

    The study has other settings, or the code computes other numbers: the fingerprint of a golden run has changed.
    """
    known, found = _cells_of(study, records), {}
    for place, recorded in records.cells.items():
        if place not in known:
            found[place] = "the study has no such cell"
            continue
        cell = known[place]
        differing = differences(cell, manifest_of(recorded, records))
        if reasons := differing + changes(cell.settings, recorded.get("golden", {})):
            found[place] = "; ".join(reasons)
    return found


def restore(study: Study, records: Records, folder: Path, *, with_stale: bool = False) -> dict[Place, str]:
    """Write the recorded cells to a study's folder as finished cells, except for stale ones and runs that it has.

    Cells that were restored before are those of these records afterwards: a stale one is removed.

    Args:
        study: The study.
        records: Its records.
        folder: The study's folder; created if it is missing.
        with_stale: Whether to write stale cells that the study has, too.

    Returns:
        The stale cells, see `stale_cells`.

    Raises:
        RunDirectoryError: If the records are of another study, or the folder is of a study with other settings.
    """
    if records.study_manifest.study != study.name:
        raise RunDirectoryError(f"these are records of {records.study_manifest.study}, not of {study.name}")
    open_study_folder(folder, records.study_manifest, study)
    stale, known = stale_cells(study, records), _cells_of(study, records)
    for place, recorded in records.cells.items():
        if place not in stale or (with_stale and place in known):
            restore_cell(recorded, manifest_of(recorded, records), known[place].folder(folder))
        elif place in known:
            remove_restored(known[place].folder(folder))
    return stale


def _cells_of(study: Study, records: Records) -> dict[Place, Cell]:
    """Return those of the study's cells that have records, and others of their rows and columns."""
    chosen = records.study_manifest
    rows, columns = (
        [line for line in lines if line.run == line.name and line.name in {place[axis] for place in records.cells}]
        for axis, lines in enumerate((study.rows, study.columns))
    )
    if all(row.why_missing(column) for row in rows for column in columns):
        return {}
    cells = study.cells(
        quick=chosen.quick,
        rows=() if chosen.quick else [row.name for row in rows],
        columns=() if chosen.quick else [column.name for column in columns],
        seeds=1 + max(seed for *_, seed in records.cells),
        changes=chosen.changes,
    )
    return {cell.place: cell for cell in cells}


def manifest_of(recorded: Json, records: Records) -> Json:
    """Return the manifest of a recorded cell, with its complete settings."""
    settings = {**records.bases[recorded["base"]], **recorded["settings"]}
    complete = {key: value for key, value in sorted(settings.items()) if key not in recorded["absent"]}
    return {**recorded["manifest"], "settings": complete}
