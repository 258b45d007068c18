"""Load studies: files that define compared settings, data and seeds, and the numbers that a paper reports.

A study is a file `experiments/studies/NAME.toml`, or one of yours; see `experiments.study_file` for its keys.

A cell is one run: a row, a column and a seed. With the setting `attack.name` it is an attack on a round, see
`experiments.attack_cell`; `metric` is then a number of its summary.json, for example `psnr`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.attack_settings import PREFIX, AttackedCell
from experiments.study_axes import (
    Expected,
    Line,
    chosen,
    of_method,
    read_expected,
    read_lines,
    refuse_unknown_columns,
    with_grid,
)
from experiments.study_file import LineTable, Settings, StudyFile
from experiments.units import unit_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import with_defaults
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.core.tasks import task_of
from hyperfl_flwr.models.provenance import find_sources

FOLDER = Path(__file__).parent

FINGERPRINTS = "golden.json"
"""Name of the file, in a cell's folder, with the fingerprints of the code that ran it, see `experiments.golden`."""

Place = tuple[str, str, int]
"""Row, column and seed of a cell."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a study.

    Attributes:
        row: Name of the row.
        column: Name of the column.
        seed: Seed of the run; all seeds have the same partition of the data.
        config: Settings of the run, without an output folder.
        attack: Settings `attack.*`; empty if the cell is not an attack.
    """

    row: str
    column: str
    seed: int
    config: RunConfig
    attack: Settings = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """Row, column and seed."""
        return self.row, self.column, self.seed

    @property
    def settings(self) -> Settings:
        """All settings, as in the manifest of the cell's folder."""
        return self.config.flat() | self.attack

    def folder(self, study: Path) -> Path:
        """Return the cell's run folder in a study's folder."""
        return study / self.row / self.column / f"seed-{self.seed}"

    def __str__(self) -> str:
        return f"{self.row}, {self.column}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study, as its file defines it; see the module.

    Attributes:
        name: Name of the file.
        title: Title of tables and figures.
        metric: Number of summary.json that tables show.
        unit: Unit of the tables.
        seeds: Number of seeds.
        num_nodes: Number of nodes of every run.
        settings: Settings of every run.
        quick: Settings of every quick run.
        quick_rows: Names of the rows of quick runs.
        quick_columns: Names of the columns of quick runs.
        rows: The rows, expanded by the grid.
        columns: The columns.
        expected: Numbers to compare with, by (row, column, metric).
        reference: Description of these numbers.
        standard_error: The units that standard errors are over; empty if there are none.
        figures: Default figures.
    """

    name: str
    title: str
    metric: str
    unit: str
    seeds: int
    num_nodes: int
    settings: Settings
    quick: Settings
    quick_rows: Sequence[str]
    quick_columns: Sequence[str]
    rows: Sequence[Line]
    columns: Sequence[Line]
    expected: Mapping[tuple[str, str, str], Expected]
    reference: str
    standard_error: str
    figures: Sequence[str]

    def metric_of(self, row: Line, column: Line) -> str:
        """Return the name of the number of summary.json that a row shows in a column."""
        return (column.metric or self.metric).replace("{way}", row.way)

    def unit_in(self, column: Line) -> str:
        """Return the unit of the numbers in a column: `unit`, or that of the column's own number."""
        return unit_of(column.metric) if column.metric else self.unit

    @property
    def paper(self) -> dict[tuple[str, str], Expected]:
        """The numbers to compare the study's shown numbers with, by (row, column)."""
        shown = {(row.name, column.name): self.metric_of(row, column) for row in self.rows for column in self.columns}
        found = self.expected.items()
        return {
            (row, column): expected for (row, column, metric), expected in found if shown.get((row, column)) == metric
        }

    def cells(
        self,
        *,
        quick: bool = False,
        rows: Collection[str] = (),
        columns: Collection[str] = (),
        seeds: int | None = None,
        changes: Mapping[str, Scalar] | None = None,
    ) -> list[Cell]:
        """Return the cells that can be run, seed by seed, so that every pair of row and column has a result early.

        Args:
            quick: Whether to apply the study's `quick` settings, with one seed by default.
            rows: Names of rows, or several separated by commas; empty for all.
            columns: Names of columns, or of their data sets, likewise; empty for all.
            seeds: Number of seeds; None for the default.
            changes: Settings of all runs, including the machine's (`data-root`).

        Raises:
            ConfigError: If a name is unknown, the settings of a cell are wrong, `changes` contains a setting that
                differs between cells, or none of the chosen cells can be run.
        """
        if quick:
            rows, columns = rows or self.quick_rows, columns or self.quick_columns
        chosen_rows = chosen(self.rows, rows, "row", lambda line: {line.name, line.family})
        chosen_columns = chosen(self.columns, columns, "column", lambda line: {line.name, self._dataset(line)})
        lines = (*chosen_rows, *chosen_columns)
        changed = [line.settings for line in lines] + [settings for line in lines for settings in line.on.values()]
        own = {"seed", "output", "resume"}.union(*changed)
        if wrong := sorted(own & set(changes or {})):
            raise ConfigError(
                f"{', '.join(wrong)} cannot be set for all runs, as the study's rows, columns or seeds set it"
            )
        number = seeds if seeds is not None else 1 if quick else self.seeds
        cells = []
        for seed in range(number):
            for column in chosen_columns:
                for row in chosen_rows:
                    if row.why_missing(column):
                        continue
                    settings = {**self.settings, **column.settings, **row.settings, **row.on.get(column.name, {})}
                    settings |= (self.quick if quick else {}) | {"seed": seed} | dict(changes or {})
                    cells.append(self._cell(row.name, column.name, seed, settings))
        if not cells:
            reasons = {f"{line.name}: {line.missing}" for line in (*chosen_rows, *chosen_columns) if line.missing}
            raise ConfigError(f"none of the chosen cells can be run; {', '.join(sorted(reasons))}")
        return cells

    def heading(self, column: Line, *, quick: bool) -> str:
        """Return a column's title; for quick runs it names the data set that replaces the column's."""
        return f"{self.quick['dataset']} for {column.label}" if quick and "dataset" in self.quick else column.label

    def _dataset(self, column: Line) -> str:
        return str(column.settings.get("dataset", self.settings.get("dataset", "")))

    def _cell(self, row: str, column: str, seed: int, settings: Settings) -> Cell:
        try:
            find_sources(settings)
            complete = with_defaults(of_method(settings, (*self.rows, *self.columns)))
            attack = {key: value for key, value in complete.items() if key.startswith(PREFIX)}
            if "attack.name" in attack:
                AttackedCell.of(attack)
            else:  # a column's attack settings do not apply to rows without an attack
                attack = {}
            others = {key: value for key, value in complete.items() if not key.startswith(PREFIX)}
            return Cell(row=row, column=column, seed=seed, config=RunConfig.from_flat(others), attack=attack)
        except ConfigError as error:
            raise type(error)(f"in {self.name}, row {row}, column {column}: {error}") from None


def study_names() -> list[str]:
    """Return the names of all studies."""
    return sorted(path.stem for path in (FOLDER / "studies").glob("*.toml"))


def load_study(name: str) -> Study:
    """Read a study: one of the project's own, or a file of yours.

    Args:
        name: A name of `study_names`, or the path of a TOML file, whose name is then the study's.

    Raises:
        ConfigError: If there is no study of this name, or the file is not a study.
    """
    file = _study_file(name)
    try:
        text = file.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the study {file}: {getattr(error, 'strerror', error)}") from None
    return parse_study(text, file)


def parse_study(text: str, file: Path) -> Study:
    """Return the study that a text defines.

    Args:
        text: TOML, see `experiments.study_file`.
        file: Path of the study's file, which need not exist; its name is the study's.

    Raises:
        ConfigError: If the text is not a study, or its file of a paper's numbers cannot be read.
    """
    given = StudyFile.parse(text, file)
    task = task_of(given.settings)
    metric = given.metric or task.key("test_accuracy")
    study = Study(
        name=file.stem,
        title=given.title or file.stem,
        metric=metric,
        unit=unit_of(metric) if given.unit is None else given.unit,
        seeds=given.seeds,
        num_nodes=given.num_nodes,
        settings=given.settings,
        quick_rows=given.quick.rows,
        quick_columns=given.quick.columns,
        quick=given.quick.settings,
        rows=with_grid(read_lines(given.rows), given.grid),
        columns=read_lines(given.columns or {"all": LineTable(label=metric)}),
        expected={},
        reference=given.beside,
        standard_error=given.standard_error,
        figures=(f"personalized_{task.score}",) if given.figures is None else given.figures,
    )
    refuse_unknown_columns(study.rows, study.columns)
    if not given.paper:
        return study
    rows, columns = ({line.name: line for line in lines} for lines in (study.rows, study.columns))
    expected_file = (FOLDER / "expected" if file.parent == FOLDER / "studies" else file.parent) / given.paper
    expected = read_expected(expected_file, lambda row, column: study.metric_of(rows[row], columns[column]))
    return replace(study, expected=expected)


def _study_file(name: str) -> Path:
    if name.endswith(".toml"):
        return Path(name)
    if name not in study_names():
        raise ConfigError(
            f"there is no study {name!r} (`hyperfl studies` lists them; a file of your own is named with its ending, "
            f".toml){nearest(name, study_names())}"
        )
    return FOLDER / "studies" / f"{name}.toml"
