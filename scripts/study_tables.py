"""Whole tables of studies in the documentation, as `hyperfl table` prints them."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.collect import collect
from experiments.records import find_records, read_records, restore, stale_cells
from experiments.study import load_study
from experiments.tables import markdown
from scripts.page_numbers import OUT_OF_DATE, source_of


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """The table of a study's rows and columns: our numbers, and after a slash the paper's.

    Attributes:
        records: Name of the file of records.
    """

    records: str

    def lines(self) -> list[str]:
        """Return the table in Markdown, and a line on where its numbers come from."""
        records = read_records(find_records(self.records))
        study = load_study(records.study_manifest.study)
        stale = {row for row, *_ in stale_cells(study, records)}
        rows = [replace(row, label=row.label + OUT_OF_DATE * (row.run in stale)) for row in study.rows]
        with tempfile.TemporaryDirectory() as folder:
            restore(study, records, Path(folder), with_stale=True)
            collected = collect(replace(study, rows=rows), records.study_manifest, Path(folder), mix=True)
        table = [line for line in markdown(collected).splitlines() if line.startswith("|")]
        return [*table, "", source_of(records, list(records.cells), f"hyperfl study {study.name}")]
