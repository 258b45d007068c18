"""Write a study's finished cells to a file of records, see `experiments.records`."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cell_settings import without_machine_settings
from experiments.records import Json, Records, read_records
from experiments.restored import is_restored
from experiments.study import FINGERPRINTS, Cell, Study
from experiments.study_folder import is_finished, read_study_manifest, seeds_in
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.packages.user_code import ENTRIES
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.runs.failures import has_diverged
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics

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


def record(study: Study, folder: Path, file: Path) -> list[Cell]:
    """Add the finished cells of a study's folder to a file of records; they replace earlier records of the same cells.

    Cells that have diverged (`hyperfl_flwr.runs.failures.has_diverged`) are added, too, with their reason.

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
    begun = [cell for cell in cells if (cell.folder(folder) / "manifest.json").is_file()]
    found = [cell for cell in begun if is_finished(cell, folder) or has_diverged(read_manifest(cell.folder(folder)))]
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
        records[cell.place] = _record(cell, cell.folder(folder), bases, kept)
    header = {"study": study.name, "quick": study_manifest.quick, "changes": dict(study_manifest.changes)}
    write_atomically(file, _lines(header, bases, records.values(), _order(study)).encode())
    return own


def _record(cell: Cell, path: Path, bases: dict[str, Mapping[str, Scalar]], kept: Iterable[str]) -> Json:
    """Return a cell's record; its settings are added to `bases` unless they are near one that is there."""
    manifest = read_manifest(path)
    has_result = not has_diverged(manifest)
    settings = without_machine_settings(manifest["settings"], has_failed=not has_result)
    base = min(bases, key=lambda name: len(_changes(settings, bases[name])), default="")
    if not base or len(_changes(settings, bases[base])) > len(settings) // 4:
        base = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
        bases[base] = settings
    summary = json.loads((path / "summary.json").read_text()) if has_result else {}
    golden = path / FINGERPRINTS
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
            **({} if has_result else {"diverged": True, "problem": manifest["problem"].partition("; see /")[0]}),
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


def _order(study: Study) -> list[tuple[str, str]]:
    return [(row.name, column.name) for column in study.columns for row in study.rows]


def _lines(header: Json, bases: Mapping[str, Any], records: Iterable[Json], order: Sequence[tuple[str, str]]) -> str:
    """Return the text of a file, with the cells in the study's order so that versions can be compared."""
    places = {place: number for number, place in enumerate(order)}
    ordered = sorted(records, key=lambda line: (places.get((line["row"], line["column"]), len(places)), line["seed"]))
    used = {line["base"] for line in ordered}
    settings = [{"base": name, "settings": values} for name, values in bases.items() if name in used]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [header, *settings, *ordered])
