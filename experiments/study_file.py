"""The keys of a study's file, and their types.

Only `rows` are required::

    title = "HyperFL, Table 1"     # default: the file's name
    metric = "test_accuracy"       # number of summary.json; default: the task's score on test data
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

Settings have any form that TOML has for them: `hyperfl.embedding-dim = 8`, or a table `[settings.hyperfl]`. They are
checked with the cells, see `experiments.study.Study.cells`.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

from hyperfl_flwr.config.refusals import explain
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.toml_files import flatten
from hyperfl_flwr.core.setting_types import Scalar

Settings = dict[str, Scalar]


def _flat(value: object) -> object:
    return flatten(value) if isinstance(value, Mapping) else value


def _folder_names(lines: Mapping[str, "LineTable"]) -> Mapping[str, "LineTable"]:
    for name in lines:
        if "/" in name or name.startswith("."):
            problem = f"has {name!r}, which cannot be the name of a folder"
            raise ValueError(f"{problem}; give it a name without a slash, and a label")
    return lines


FlatSettings = Annotated[dict[str, Any], BeforeValidator(_flat)]
"""A table of settings, with dotted keys after it has been read; the cells check the values."""


class LineTable(BaseModel):
    """The table of a row or a column; its other keys are settings."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    label: str = ""
    missing: str = ""
    metric: str = ""
    run: str = ""
    way: str = ""
    prepare: str = ""
    on: dict[str, FlatSettings] = {}
    __pydantic_extra__: dict[str, Any] = Field(init=False)

    @property
    def settings(self) -> Settings:
        """The settings that the line changes."""
        return flatten(self.__pydantic_extra__)


Lines = Annotated[dict[str, LineTable], AfterValidator(_folder_names)]


class QuickTable(BaseModel):
    """The table of quick runs; its other keys are settings."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    rows: list[str] = []
    columns: list[str] = []
    __pydantic_extra__: dict[str, Any] = Field(init=False)

    @property
    def settings(self) -> Settings:
        """The settings of every quick run."""
        return flatten(self.__pydantic_extra__)


class StudyFile(BaseModel):
    """The content of a study's file, see the module."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", alias_generator=lambda name: name.replace("_", "-")
    )

    title: str = ""
    metric: str = ""
    unit: str | None = None
    seeds: PositiveInt = 1
    num_nodes: PositiveInt = 2
    paper: str = ""
    beside: str = "the paper's number"
    standard_error: str = ""
    figures: list[str] | None = None
    settings: FlatSettings = {}
    quick: QuickTable = QuickTable()
    rows: Lines = {}
    columns: Lines = {}
    grid: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], BeforeValidator(_flat)] = {}

    @classmethod
    def parse(cls, text: str, file: Path) -> "StudyFile":
        """Return the content of a study's file.

        Args:
            text: TOML.
            file: The file's path, for errors; it need not exist.

        Raises:
            ConfigError: If the text is not TOML, a key is unknown or has a wrong value, or there are no rows.
        """
        try:
            found = cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"the study {file} is not TOML: {error}") from None
        except ValidationError as error:
            keys, places = cls.keys(), [".".join(map(str, detail["loc"])) for detail in error.errors()]
            hint = f"; known are {', '.join(keys)}. Settings of all runs belong below [settings]"
            inside = [place for place in places if "." in place]
            raise ConfigError(f"in {file}, {explain(error.errors(), [*keys, *inside], hint)}") from None
        if not found.rows:
            raise ConfigError(f'{file} has no rows; give at least one, such as [rows.fedavg] with method = "fedavg"')
        return found

    @classmethod
    def keys(cls) -> list[str]:
        """Return the keys that a file may have."""
        return [str(field.alias) for field in cls.model_fields.values()]
