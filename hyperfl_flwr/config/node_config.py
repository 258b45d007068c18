"""Typed node config: what a node's owner decides, as Flower hands it to the client app and as `node.toml` holds it.

The run's settings come from the server (`hyperfl_flwr.config.run_config`). On a node with an owner those about its
machine and its data have no effect, see `NodeConfig.applied_to`.
"""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Self

from flwr.app import Context
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from hyperfl_flwr.config.run_config import RunConfig, explain, nearest
from hyperfl_flwr.config.sections import (
    Auto,
    Device,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    absolute,
)
from hyperfl_flwr.core.errors import ConfigError, RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import DATASETS
from hyperfl_flwr.data.sample_format import expanded, is_own, own_path
from hyperfl_flwr.flower.home import get_flwr_home

SIMULATED = "simulated"
"""Key by which an in-process node declares that it is part of a simulation, and that its data have no owner."""

NOVEL_DATA, NOVEL_OUTPUT = "novel-data", "novel-output"
NOVEL_EPSILON, NOVEL_DELTA = "novel-epsilon", "novel-delta"
"""Keys of a novel client's node: its samples, the folder of its results, and the noise on its descriptor."""


def is_simulated(context: Context) -> bool:
    """Return whether a node is part of a simulation, so that no owner's data are at stake."""
    ray = sys.modules.get("ray")
    return bool(context.node_config.get(SIMULATED)) or (ray is not None and ray.is_initialized())


def state_folder(configured: Scalar | None, run_directory: str, *, simulated: bool) -> Path:
    """Return a node's folder for what stays with it: its `state-dir`, or in a simulation a part of the run's folder."""
    if configured:
        return Path(str(configured))
    return Path(run_directory) / "clients" if simulated else Path(get_flwr_home()) / "hyperfl-state"


class NodeConfig(Section):
    """The keys of a node config, all optional.

    Paths must be absolute, unless the validation context names a `folder` (a `Path`): relative paths then start there.

    Attributes:
        partition_id: The node's number, from 0.
        num_partitions: Number of nodes.
        data: `npz:FILE`, `folder:PATH` or the name of a data set; empty for the run's.
        data_root: Folder of named data sets; at run time also where a relative path in `data` starts.
        device: As the run's setting.
        threads: As the run's setting.
        state_dir: Folder of what stays on the node; empty for one in FLWR_HOME.
        keep_model: Whether clients' models are kept in the state folder; None for yes, except in a simulation.
        max_message_mb: Largest message that the node accepts, in units of 10^6 bytes; 0 for no limit.
        mixing_key_file: A file with a secret that all nodes share and the server does not have.
        novel_data: Samples of a novel client, which takes a model on demand (`clients.novel.node`); empty for an
            ordinary node.
        novel_output: Folder of the novel client's results.
        novel_epsilon: Epsilon of the noise on its descriptor; None for no noise.
        novel_delta: Delta of that noise, above 0 and below 1; None without noise.
        simulated: See `SIMULATED`.
    """

    partition_id: NonNegative | None = None
    num_partitions: Positive | None = None
    data: str = ""
    data_root: str = ""
    device: Device = "auto"
    threads: Auto | Positive = "auto"
    state_dir: str = ""
    keep_model: bool | None = None
    max_message_mb: NonNegativeFloat = 0
    mixing_key_file: str = ""
    novel_data: str = ""
    novel_output: str = ""
    novel_epsilon: PositiveFloat | None = None
    novel_delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    simulated: bool = False

    @field_validator("data_root", "state_dir", "mixing_key_file", "novel_data", "novel_output")
    @classmethod
    def _absolute(cls, value: str, info: ValidationInfo) -> str:
        return absolute(_located(value, info))

    @field_validator("data")
    @classmethod
    def _named(cls, value: str, info: ValidationInfo) -> str:
        if is_own(value):
            if str(own_path(value)) in (".", "PATH"):
                raise ValueError(f"must name a file after npz: or a folder after folder:; got {value!r}")
            kind, _, path = value.partition(":")
            return f"{kind}:{_located(path, info)}"
        if value and value not in DATASETS:
            raise ValueError(f"must be npz:FILE, folder:PATH or a data set; got {value!r}{nearest(value, DATASETS)}")
        return value

    @classmethod
    def of(cls, node_config: Mapping[str, Scalar]) -> Self:
        """Validate a node config.

        Raises:
            ConfigError: Naming every key of the node config that is unknown or has a wrong value.
        """
        try:
            return cls.model_validate(dict(node_config))
        except ValidationError as error:
            keys = sorted({str(detail["loc"][0]) for detail in error.errors()})
            known = [str(field.alias) for field in cls.model_fields.values() if field.alias != SIMULATED]
            raise ConfigError(
                "in the node config, " + explain(error, known),
                public=f"its owner must repair {', '.join(keys)} in the node config; the node's log says more",
            ) from None

    @classmethod
    def of_context(cls, context: Context) -> Self:
        """Validate the config of the node that received a message.

        Nodes of Flower's simulation have no config of their own that could name a novel client's data: the run's
        settings `personalize.*` take its place.

        Raises:
            ConfigError: As `of` does.
        """
        values, run = dict(context.node_config), context.run_config
        if is_simulated(context):
            values[SIMULATED] = values.get(SIMULATED) or True
            if NOVEL_DATA not in values and run.get("personalize.run") and run.get("personalize.data"):
                values |= {NOVEL_DATA: run["personalize.data"], NOVEL_OUTPUT: run["personalize.output"]}
                if run["personalize.epsilon"]:
                    values |= {NOVEL_EPSILON: run["personalize.epsilon"], NOVEL_DELTA: run["personalize.delta"]}
        return cls.of(values)

    def flat(self) -> dict[str, Scalar]:
        """Return the keys that differ from their defaults, as Flower takes a node config."""
        return self.model_dump(by_alias=True, exclude_defaults=True)

    @property
    def has_own_data(self) -> bool:
        """Whether the node's data are a file or folder that nobody else has."""
        return is_own(self.data)

    def applied_to(self, run_config: Mapping[str, Scalar], methods: Collection[str]) -> RunConfig:
        """Return the run's settings, with those replaced that this node decides.

        Where there is an owner, data root, device and threads are the owner's even if left open, and the server cannot
        name a file or folder to be read. In a simulation the run's settings hold unless the node config has others.

        Args:
            run_config: The run's settings, as Flower hands them to apps.
            methods: Names that `method` may have.

        Raises:
            ConfigError: If the run's settings are wrong.
            RefusalError: If the run names files of a node with an owner.
        """
        given: dict[str, Scalar] = {"data-root": self.data_root, "device": self.device, "threads": self.threads}
        if self.simulated:
            given = {key: value for key, value in given.items() if key.replace("-", "_") in self.model_fields_set}
        elif not self.data and is_own(str(run_config.get("dataset", ""))):
            raise RefusalError("the run names a file or folder; each node's owner does, by data in the node config")
        named: dict[str, Scalar] = {"dataset": self.data} if self.data else {}
        return RunConfig.from_flat({**run_config, **given, **named}, methods=methods)

    def refuse_large(self, num_bytes: int) -> None:
        """Refuse a message of so many bytes if it is larger than the owner allows.

        Raises:
            RefusalError: If it is.
        """
        if 0 < self.max_message_mb < (megabytes := num_bytes / 1e6):
            raise RefusalError(
                f"a message has {megabytes:.1f} MB, its owner allows max-message-mb = {self.max_message_mb:g}"
            )


def _located(path: str, info: ValidationInfo) -> str:
    """Return a path that starts at the validation context's folder, if there is one."""
    if not path or not info.context:
        return path
    return str(info.context["folder"] / expanded(path))
