"""Load studies: files that define compared settings, data and seeds, and the numbers that a paper reports.

A study is a file `experiments/studies/NAME.toml`, or one of yours; only `rows` are required::

    title = "HyperFL, Table 1"     # default: the file's name
    metric = "test_accuracy"       # number of summary.json; this is the default
    unit = "%"                     # unit of the tables; % multiplies by 100; default: the metric's
    seeds = 2                      # number of seeds, counted from 0; default: 1
    num-nodes = 2                  # nodes of every run; default: 2; means are the same for any number
    paper = "table-1.csv"          # file of experiments/expected, or next to your file; optional
    beside = "the paper's number"  # description of these numbers; optional
    standard-error = "clients"     # summary.json has METRIC_sem, the standard error over these; optional
    figures = ["personalized_accuracy"]     # default figures: numbers of metrics.jsonl, `labels`, `embeddings`
    [settings]                     # settings of every run that differ from the defaults
    [quick]                        # settings of every run with --quick, applied last; `rows` and `columns` select runs
    [rows.hyperfl]                 # settings of a row; `label` is its title, `missing` the reason why it cannot be run
    [rows.hyperfl.on.cifar10-20]   # settings of the row in one column only, or its `missing`
    [columns.fashion-mnist-20]     # settings of a column, as for a row
    [columns.x] metric = "ssim"    # a separate number for a column; `prepare`: command that makes the file of its data
    [rows.y] run = "hyperfl"       # shows the runs of another row (or another column); the line has no settings
    [rows.y] way = "sampled"       # replaces `{way}` in the name of a number: metric = "novel_{way}"
    [grid]                         # every row is run with each of a setting's values; optional
    learning-rate = [0.01, 0.1]

A cell is one run: a row, a column and a seed. With the setting `attack.name` it is an attack on a round, see
`experiments.attack_cell`; `metric` is then a number of its summary.json, for example `psnr`.
"""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.attack_cell import PREFIX, AttackedCell
from experiments.study_axes import Expected, Line, Settings, chosen, of_method, read_expected, read_lines, with_grid
from experiments.units import unit_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import with_defaults
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.core.tasks import task_of
from hyperfl_flwr.core.toml_files import flatten
from hyperfl_flwr.models.provenance import find_sources

FOLDER = Path(__file__).parent


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
                    find_sources(settings)
                    cells.append(_cell(row.name, column.name, seed, with_defaults(of_method(settings, lines))))
        if not cells:
            reasons = {f"{line.name}: {line.missing}" for line in (*chosen_rows, *chosen_columns) if line.missing}
            raise ConfigError(f"none of the chosen cells can be run; {', '.join(sorted(reasons))}")
        return cells

    def heading(self, column: Line, *, quick: bool) -> str:
        """Return a column's title; for quick runs it names the data set that replaces the column's."""
        return f"{self.quick['dataset']} for {column.label}" if quick and "dataset" in self.quick else column.label

    def _dataset(self, column: Line) -> str:
        return str(column.settings.get("dataset", self.settings.get("dataset", "")))


def _cell(row: str, column: str, seed: int, settings: Settings) -> Cell:
    attack = {key: value for key, value in settings.items() if key.startswith(PREFIX)}
    if "attack.name" in attack:
        AttackedCell.of(attack)
    else:  # a column's attack settings do not apply to rows without an attack
        attack = {}
    config = RunConfig.from_flat({key: value for key, value in settings.items() if not key.startswith(PREFIX)})
    return Cell(row=row, column=column, seed=seed, config=config, attack=attack)


def study_names() -> list[str]:
    """Return the names of all studies."""
    return sorted(path.stem for path in (FOLDER / "studies").glob("*.toml"))


TABLES = ("settings", "quick", "rows", "columns", "grid")
KEYS = {"title", "metric", "unit", "seeds", "num-nodes", "paper", "beside", "standard-error", "figures", *TABLES}
"""Keys of a study's file, of which `TABLES` have tables."""


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
        text: TOML, see the module.
        file: Path of the study's file, which need not exist; its name is the study's.

    Raises:
        ConfigError: If the text is not a study.
    """
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"the study {file} is not TOML: {error}") from None
    if unknown := sorted(set(document) - KEYS):
        raise ConfigError(
            f"{file} has unknown keys: {', '.join(unknown)}; known: {', '.join(sorted(KEYS))}"
            f"{nearest(unknown[0], KEYS)}. Settings of all runs belong below [settings]"
        )
    for key in TABLES:
        if not isinstance(document.get(key, {}), Mapping):
            raise ConfigError(f"{key} in {file} must be a table of settings; got {document[key]!r}")
    if not document.get("rows"):
        raise ConfigError(f'{file} has no rows; give at least one, such as [rows.fedavg] with method = "fedavg"')
    task = task_of(flatten(document.get("settings", {})))
    metric, quick = document.get("metric", task.key("test_accuracy")), dict(document.get("quick", {}))
    study = Study(
        name=file.stem,
        title=document.get("title", file.stem),
        metric=metric,
        unit=document.get("unit", unit_of(metric)),
        seeds=document.get("seeds", 1),
        num_nodes=document.get("num-nodes", 2),
        settings=flatten(document.get("settings", {})),
        quick_rows=quick.pop("rows", ()),
        quick_columns=quick.pop("columns", ()),
        quick=flatten(quick),
        rows=with_grid(read_lines(document["rows"]), flatten(document.get("grid", {}))),
        columns=read_lines(document.get("columns") or {"all": {"label": metric}}),
        expected={},
        reference=document.get("beside", "the paper's number"),
        standard_error=document.get("standard-error", ""),
        figures=document.get("figures", (f"personalized_{task.score}",)),
    )
    for line in (*study.rows, *study.columns):
        if "/" in line.name or line.name.startswith("."):
            given = f"{line.name!r} in {file}"
            raise ConfigError(f"{given} cannot be the name of a folder; give it a name without a slash, and a label")
    if "paper" not in document:
        return study
    rows, columns = ({line.name: line for line in lines} for lines in (study.rows, study.columns))
    expected_file = (FOLDER / "expected" if file.parent == FOLDER / "studies" else file.parent) / document["paper"]
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
