"""Keep the finished cells of a study in one small file, from which tables and figures are made without the runs.

A file of records has a JSON object on each line::

    {"study": NAME, "quick": false, "changes": {}}      the first line: as in the study.json of the study's folder
    {"base": ID, "settings": {}}                        settings that cells refer to
    {"row": NAME, "column": NAME, "seed": 0, ...}       a cell, see `_record`

`experiments/records` holds those of the project's own results. A record is a run's folder without private state,
checkpoints and single clients' lines: all settings but the machine's, commit, versions and hardware, summary.json with
single clients' scores, some rounds of the means over the clients, and the code's fingerprints (`experiments.golden`).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cell_settings import differences, without_machine_settings
from experiments.golden import IN_CELL, changes
from experiments.restored import is_restored, remove_restored, restore_cell
from experiments.runner import (
    StudyManifest,
    is_finished,
    open_study_folder,
    read_study_manifest,
    seeds_in,
)
from experiments.study import FOLDER, Cell, Study
from hyperfl_flwr.core.atomic_files import write_atomically
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.core.user_code import ENTRIES
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics

Json = dict[str, Any]

KEPT_ROUNDS = 20
"""Number of rounds, about, of which a record has the means; the last one is always among them."""

KEPT_NUMBERS = frozenset(
    {
        "kind", "round", "clients", "seconds", "train_loss", "personalized_accuracy", "personalized_loss",
        "aggregate_accuracy", "aggregate_loss", "personalized_global_accuracy", "aggregate_global_accuracy",
        *(
            f"{kind}_{score}"
            for kind in ("personalized", "aggregate")
            for task in TASKS.values()
            for score in (task.score, f"global_{task.score}", *task.all_scores)
        ),
    }
)  # fmt: skip
"""Numbers of metrics.jsonl that a record keeps, besides those of the study's figures."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """The contents of a file of records.

    Attributes:
        study_manifest: The settings of the study that all cells have in common.
        bases: Settings that cells refer to, by the id of each.
        cells: The cells, by (row, column, seed).
    """

    study_manifest: StudyManifest
    bases: Mapping[str, Mapping[str, Scalar]]
    cells: Mapping[tuple[str, str, int], Json]


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
            cells={_place(line): line for line in rest if "row" in line},
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunDirectoryError(f"{file} is not a file of records ({type(error).__name__}: {error})") from None


def record(study: Study, folder: Path, file: Path) -> list[Cell]:
    """Add the finished cells of a study's folder to a file of records; they replace earlier records of the same cells.

    Args:
        study: The study.
        folder: The study's folder.
        file: The file of records; created if it is missing.

    Returns:
        The recorded cells: not those that were restored from records.

    Raises:
        RunDirectoryError: If no cell is finished, one was run with other settings, or the file is of a study with other
            settings.
    """
    study_manifest = read_study_manifest(folder)
    cells = study.cells(quick=study_manifest.quick, seeds=seeds_in(folder), changes=study_manifest.changes)
    found = [cell for cell in cells if is_finished(cell, folder)]
    if not found:
        raise RunDirectoryError(f"{folder} holds no finished cell; run `hyperfl study {study.name}`")
    before = read_records(file) if file.is_file() else Records(study_manifest=study_manifest, bases={}, cells={})
    if before.study_manifest != study_manifest:
        raise RunDirectoryError(f"{file} is of {before.study_manifest}, not {study_manifest}; choose another file")
    kept = {_number(name) for name in study.figures} | KEPT_NUMBERS
    bases: dict[str, Mapping[str, Scalar]] = dict(before.bases)
    records = dict(before.cells)
    own = [cell for cell in found if not is_restored(cell.folder(folder))]
    for cell in own:
        records[_place_of(cell)] = _record(cell, cell.folder(folder), bases, kept)
    header = {"study": study.name, "quick": study_manifest.quick, "changes": dict(study_manifest.changes)}
    write_atomically(file, _lines(header, bases, records.values(), _order(study)).encode())
    return own


def stale_cells(study: Study, records: Records) -> dict[tuple[str, str, int], str]:
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


def restore(
    study: Study, records: Records, folder: Path, *, with_stale: bool = False
) -> dict[tuple[str, str, int], str]:
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


def _cells_of(study: Study, records: Records) -> dict[tuple[str, str, int], Cell]:
    seeds = 1 + max((seed for _, _, seed in records.cells), default=-1)
    chosen = records.study_manifest
    cells = study.cells(quick=chosen.quick, seeds=seeds, changes=chosen.changes)
    return {_place_of(cell): cell for cell in cells}


def manifest_of(recorded: Json, records: Records) -> Json:
    """Return the manifest of a recorded cell, with its complete settings."""
    settings = {**records.bases[recorded["base"]], **recorded["settings"]}
    complete = {key: value for key, value in sorted(settings.items()) if key not in recorded["absent"]}
    return {**recorded["manifest"], "settings": complete}


def _record(cell: Cell, path: Path, bases: dict[str, Mapping[str, Scalar]], kept: Iterable[str]) -> Json:
    """Return a cell's record; its settings are added to `bases` unless they are near one that is there."""
    manifest = read_manifest(path)
    settings = without_machine_settings(manifest["settings"])
    base = min(bases, key=lambda name: len(_changes(settings, bases[name])), default="")
    if not base or len(_changes(settings, bases[base])) > len(settings) // 4:
        base = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
        bases[base] = settings
    summary = json.loads((path / "summary.json").read_text())
    golden = path / IN_CELL
    return {
        "row": cell.row,
        "column": cell.column,
        "seed": cell.seed,
        "base": base,
        "settings": _changes(settings, bases[base]),
        "absent": sorted(set(bases[base]) - set(settings)),
        "manifest": {
            "experiment": manifest["experiment"],
            "status": manifest["status"],
            "end": manifest["end"],
            **{entry: manifest[entry] for entry in (*ENTRIES.values(), "data") if entry in manifest},
            **_circumstances(manifest),
            "resolved": _without_paths(manifest.get("resolved", {})),
            "resumed": [_circumstances(each) for each in manifest.get("resumed", ())],
        },
        "golden": json.loads(golden.read_text()) if golden.is_file() else {},
        "summary": {key: _short(value) if key.endswith("_per_client") else value for key, value in summary.items()},
        "rounds": _thinned(list(read_metrics(path)), set(kept)),
    }


def _changes(settings: Mapping[str, Scalar], base: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {key: value for key, value in settings.items() if key not in base or base[key] != value}


def _circumstances(manifest: Mapping[str, Any]) -> Json:
    code = {key: value for key, value in manifest["code"].items() if key != "app"}  # its folder is the machine's
    hardware = {key: value for key, value in manifest["hardware"].items() if key != "system"}
    return {"start": manifest["start"], "versions": manifest["versions"], "hardware": hardware, "code": code}


def _without_paths(resolved: Mapping[str, Any]) -> Json:
    return {key: value for key, value in resolved.items() if not (isinstance(value, str) and value.startswith("/"))}


def _thinned(lines: Sequence[Mapping[str, Any]], kept: set[str]) -> list[Json]:
    """Return the means over the clients of some rounds, with six digits."""
    last = max((line["round"] for line in lines), default=0)
    step = max(1, last // KEPT_ROUNDS)
    return [
        {key: _short(value) for key, value in line.items() if key in kept}
        for line in lines
        if line["kind"] in ("train", "aggregate") and (line["round"] % step == 0 or line["round"] in (1, last))
    ]


def _short(value: object) -> object:
    if isinstance(value, list):
        return list(map(_short, value))
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _number(figure: str) -> str:
    return figure.partition("@")[0]


def _place(line: Json) -> tuple[str, str, int]:
    return line["row"], line["column"], line["seed"]


def _place_of(cell: Cell) -> tuple[str, str, int]:
    return cell.row, cell.column, cell.seed


def _order(study: Study) -> list[tuple[str, str]]:
    return [(row.name, column.name) for column in study.columns for row in study.rows]


def _lines(header: Json, bases: Mapping[str, Any], records: Iterable[Json], order: Sequence[tuple[str, str]]) -> str:
    """Return the text of a file, with the cells in the study's order so that versions can be compared."""
    places = {place: number for number, place in enumerate(order)}
    ordered = sorted(records, key=lambda line: (places.get((line["row"], line["column"]), len(places)), line["seed"]))
    used = {line["base"] for line in ordered}
    settings = [{"base": name, "settings": values} for name, values in bases.items() if name in used]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [header, *settings, *ordered])
