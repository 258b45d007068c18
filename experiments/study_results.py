"""Access to a study's folder from Python: numbers, tables, differences and figures of its finished runs.

Modules that import torch are imported where they are used: a name of the Python interface must not load it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperfl_flwr.api.run import Run
from hyperfl_flwr.launch.console import err
from hyperfl_flwr.launch.given_settings import absolute

if TYPE_CHECKING:
    from experiments.collect import Collected
    from experiments.paired import Pairing
    from experiments.study import Place, Study
    from experiments.study_folder import StudyManifest


@dataclass(frozen=True, kw_only=True)
class StudyResults:
    """The results of a study or a sweep; each access reads its folder again.

    Attributes:
        study: The study: its rows, columns and settings.
        folder: Its folder, as an absolute path.
        stale: Records that are out of date and were not restored, by row, column and seed, with the reasons.
    """

    study: "Study"
    folder: Path
    stale: "Mapping[Place, str]" = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"StudyResults({self.study.name!r}, {str(self.folder)!r})"

    @property
    def runs(self) -> "dict[Place, Run]":
        """The finished runs by row, column and seed.

        Of a run that was restored from a record, only the summary and the manifest are known.

        Raises:
            RunDirectoryError: If the folder is not a study's, or a run has other settings than the study.
        """
        from experiments.study_folder import is_finished, seeds_in

        made = self._manifest
        cells = self.study.cells(quick=made.quick, seeds=max(1, seeds_in(self.folder)), changes=made.changes)
        return {cell.place: Run(cell.folder(self.folder)) for cell in cells if is_finished(cell, self.folder)}

    def numbers(self, metric: str = "", *, against: str = "", mix: bool = False) -> list[dict[str, Any]]:
        """Return the table's numbers, one dictionary per row and column: those of table.csv.

        Args:
            metric: Key of summary.json; empty for the study's own.
            against: Name of a row: the numbers are then the other rows' differences from it, over the same clients and
                seeds, with 95 % intervals.
            mix: Whether to accept runs of different code, data or settings.

        Returns:
            For each row and column, in the unit `unit`: mean over the seeds, standard deviation `std`, number of seeds
            `n`, the ends `low` and `high` of the 95 % interval over clients, and the paper's number; None where there
            is none.

        Raises:
            ConfigError: If the study has no row `against`.
            RunDirectoryError: If there is no finished run, runs must not be mixed, or no run has the number.
        """
        from experiments.table_numbers import lines_of

        return lines_of(*self._collected(metric, against, mix=mix))

    def table(self, metric: str = "", *, against: str = "", mix: bool = False) -> str:
        """Return the table as Markdown; see `numbers`."""
        from experiments.tables import markdown

        return markdown(*self._collected(metric, against, mix=mix))

    def write_tables(self, metric: str = "", *, against: str = "", mix: bool = False) -> list[Path]:
        """Write the table to the study's folder as Markdown, CSV and LaTeX, and return the paths; see `numbers`."""
        from experiments.table_numbers import comma_separated
        from experiments.tables import latex, markdown

        collected, pairing = self._collected(metric, against, mix=mix)
        name = f"table-against-{pairing.reference.name}" if pairing else "table"
        forms = {"md": markdown, "csv": comma_separated, "tex": latex}
        paths = {self.folder / f"{name}.{ending}": form(collected, pairing) for ending, form in forms.items()}
        for path, text in paths.items():
            path.write_text(text)
        return list(paths)

    def draw(self, kind: str, *, open_private_state: bool = False, mix: bool = False) -> list[Path]:
        """Draw a figure into the study's folder, as `hyperfl figure` does; see `experiments.figures.curves.draw`.

        Args:
            kind: A number of metrics.jsonl's `train` lines, such as `personalized_accuracy`, or the name of a figure.
            open_private_state: Whether `embeddings` may be read from the private files of simulated clients.
            mix: Whether to draw runs of different code, data or settings.

        Returns:
            The paths of the pictures.

        Raises:
            ConfigError: If there is no such figure, or it is not allowed.
            RunDirectoryError: If no run is finished, they must not be mixed, or none has the figure's data.
        """
        from experiments.figures.curves import draw

        made = self._manifest
        return draw(self.study, made, self.folder, kind, open_private_state=open_private_state, mix=mix)

    @property
    def _manifest(self) -> "StudyManifest":
        from experiments.study_folder import read_study_manifest

        return read_study_manifest(self.folder)

    def _collected(self, metric: str, against: str, *, mix: bool) -> "tuple[Collected, Pairing | None]":
        from experiments.collect import collect
        from experiments.paired import pair
        from experiments.tables import with_metric

        study = with_metric(self.study, metric) if metric else self.study
        collected = collect(study, self._manifest, self.folder, mix=mix, stale=self.stale)
        return collected, pair(collected, against) if against else None


def open_study(
    name: Path | str, folder: Path | str | None = None, *, quick: bool = False, records: Path | str = ""
) -> StudyResults:
    """Return the results that a study has so far.

    Args:
        name: One of `hyperfl studies`, or the path of a TOML file; of a sweep, the `sweep.toml` in its folder.
        folder: The study's folder; by default `runs/studies/NAME` in the working directory.
        quick: Whether to take the folder of the study's quick runs by default.
        records: A file of records, or the name of one of the project's own, which are restored to the folder first; it
            is then `runs/studies/NAME-records` by default.

    Raises:
        ConfigError: If there is no such study, or its file is wrong.
        RunDirectoryError: If the records are missing, damaged or of another study.
    """
    from experiments.records import find_records, read_records, restore
    from experiments.study import load_study
    from experiments.study_folder import default_folder

    study = load_study(str(name))
    place = absolute(folder) if folder else default_folder(study.name, quick=quick, recorded=bool(records))
    stale = restore(study, read_records(find_records(str(records))), place) if records else {}
    for cell, reason in stale.items():
        err.print(f"{', '.join(map(str, cell))}: the record is out of date: {reason}", markup=False)
    return StudyResults(study=study, folder=place, stale=stale)
