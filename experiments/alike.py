"""Refuse results that do not belong into one table or figure: of other settings, data, weights or code."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cell_settings import differences
from experiments.golden import outdated
from experiments.study import Cell
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.packages.code_version import code_versions
from hyperfl_flwr.runs.run_directory import read_manifest

SOURCES = {"data": "its data have", "model": "its network's code or weights have"}
"""Entries of the manifest with the SHA-256 of something of the user's own, and how a sentence about it begins."""


def require_alike(cells: Iterable[Cell], folder: Path) -> None:
    """Raise a RunDirectoryError unless finished cells have the study's settings, and the same sources and code.

    Args:
        cells: Cells with a manifest.
        folder: The study's folder.
    """
    versions: dict[str, None] = {}
    known: dict[str, tuple[str, str]] = {}
    problems = []
    for cell in cells:
        manifest = read_manifest(cell.folder(folder))
        versions |= dict.fromkeys(code_versions(manifest))
        found = [*differences(cell, manifest), *_other_sources(cell, manifest, known), *outdated(cell, folder)]
        problems += [f"{cell}: {text}" for text in found]
    if len(versions) > 1:
        problems.append(f"the cells were run by {len(versions)} versions of the code: {', '.join(sorted(versions))}")
    if problems:
        raise RunDirectoryError("\n  - ".join(["the cells differ; pass --mix to accept that:", *problems]))


def _other_sources(cell: Cell, manifest: Mapping[str, Any], known: dict[str, tuple[str, str]]) -> Sequence[str]:
    """Return which sources are others than in an earlier cell of the column; adds to the known ones."""
    problems = []
    names = {"data": f"{cell.column} {cell.config.dataset}", "model": f"{cell.config.target} {cell.config.lpm.weights}"}
    for entry, text in SOURCES.items():
        if digest := manifest.get(entry, {}).get("sha256", ""):
            # A row may have a data set or a network of its own.
            before, of_cell = known.setdefault(f"{entry} {names[entry]}", (digest, str(cell)))
            if digest != before:
                problems.append(f"{text} another SHA-256 than those of {of_cell}; they have changed")
    return problems
