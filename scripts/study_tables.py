"""Whole tables of studies in the documentation, as `hyperfl table` prints them."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.collect import collect
from experiments.records import find_records, read_records, restore, stale_cells
from experiments.study import load_study
from experiments.tables import markdown, with_metric
from scripts.page_numbers import OUT_OF_DATE, source_of


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """The table of a study's rows and columns: our numbers, and after a slash the paper's.

    Attributes:
        records: Name of the file of records.
        metric: Number of summary.json; empty for the study's own.
        columns: The study's columns that are shown; empty for all.
    """

    records: str
    metric: str = ""
    columns: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Return the table in Markdown, and a line on where its numbers come from."""
        records = read_records(find_records(self.records)).only([], self.columns)
        study = load_study(records.study_manifest.study)
        stale = {row for row, *_ in stale_cells(study, records)}
        shown = replace(
            with_metric(study, self.metric) if self.metric else study,
            rows=[replace(row, label=row.label + OUT_OF_DATE * (row.run in stale)) for row in study.rows],
            columns=[column for column in study.columns if not self.columns or column.name in self.columns],
        )
        with tempfile.TemporaryDirectory() as folder:
            restore(study, records, Path(folder), with_stale=True)
            collected = collect(shown, records.study_manifest, Path(folder), mix=True)
        table = [line for line in markdown(collected).splitlines() if line.startswith("|")]
        chosen = f" --columns {','.join(self.columns)}" if self.columns else ""
        return [*table, "", source_of(records, list(records.cells), f"hyperfl study {study.name}{chosen}")]
