"""What a node's owner decides, as Flower hands it to the client app: the node config.

The run's settings come from the server (`hyperfl_flwr.config.run_config`). On a node with an owner those about its
machine and its data have no effect, see `Owner.applied_to`.
"""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Self

from flwr.app import Context
from pydantic import ValidationError, field_validator

from hyperfl_flwr.config.run_config import RunConfig, explain, nearest
from hyperfl_flwr.config.sections import Auto, Device, NonNegative, NonNegativeFloat, Positive, Section, absolute
from hyperfl_flwr.core.errors import ConfigError, RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import DATASETS
from hyperfl_flwr.data.sample_format import is_own, own_path
from hyperfl_flwr.flower.home import get_flwr_home

SIMULATED = "simulated"
"""Node config by which an in-process node says that nobody's own data are at stake."""


def is_simulated(context: Context) -> bool:
    """Say whether nobody's own data are at stake."""
    ray = sys.modules.get("ray")
    return bool(context.node_config.get(SIMULATED)) or (ray is not None and ray.is_initialized())


def state_folder(owners: Scalar | None, run_directory: str, *, simulated: bool) -> Path:
    """Return a node's folder for what stays with it: the owner's `state-dir`, or in a simulation the run's own."""
    if owners:
        return Path(str(owners))
    return Path(run_directory) / "clients" if simulated else Path(get_flwr_home()) / "hyperfl-state"


class Owner(Section):
    """The keys of a node config; those that are missing are the owner's to leave open.

    Attributes:
        partition_id: The node's number.
        num_partitions: Number of nodes.
        data: `npz:FILE`, `folder:PATH` or the name of a data set; empty for the run's.
        data_root: Where named data sets and relative paths are looked up.
        device: As the run's setting.
        threads: As the run's setting.
        state_dir: Folder of what stays on the node; empty for one in FLWR_HOME.
        max_message_mb: Largest message that is taken, in units of 10^6 bytes; 0 for any.
        mixing_key_file: A file whose content all nodes share, and the server does not have.
        keep_model: Whether the clients' models stay on the node's disk, for its owner; None: where there is one.
        simulated: See `SIMULATED`.
        novel_data: This and the next are of a node that takes a model on demand, see `clients.novel.node`.
        novel_output: Likewise.
        novel_epsilon: Likewise.
        novel_delta: Likewise.
    """

    partition_id: NonNegative | None = None
    num_partitions: Positive | None = None
    data: str = ""
    data_root: str = ""
    device: Device = "auto"
    threads: Auto | Positive = "auto"
    state_dir: str = ""
    max_message_mb: NonNegativeFloat = 0
    mixing_key_file: str = ""
    keep_model: bool | None = None
    simulated: bool = False
    novel_data: str = ""
    novel_output: str = ""
    novel_epsilon: float | None = None
    novel_delta: float | None = None

    @field_validator("data_root", "state_dir", "mixing_key_file", "novel_data", "novel_output")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return absolute(value)

    @field_validator("data")
    @classmethod
    def _named(cls, value: str) -> str:
        if is_own(value) and str(own_path(value)) in (".", "PATH"):
            raise ValueError(f"must name a file after npz: or a folder after folder:; got {value!r}")
        if value and value not in DATASETS and not is_own(value):
            raise ValueError(f"must be npz:FILE, folder:PATH or a data set; got {value!r}{nearest(value, DATASETS)}")
        return value

    @classmethod
    def of(cls, node_config: Mapping[str, Scalar]) -> Self:
        """Return what the owner of a node has decided.

        Raises:
            ConfigError: Naming every key of the node config that is unknown or has a wrong value.
        """
        try:
            return cls.model_validate(dict(node_config))
        except ValidationError as error:
            keys = sorted({str(detail["loc"][0]) for detail in error.errors()})
            known = [str(field.alias) for field in cls.model_fields.values() if field.alias != SIMULATED]
            raise ConfigError(
                "in the node config, " + explain(error, known, "; known are " + ", ".join(known)),
                public=f"its owner must repair {', '.join(keys)} in the node config; the node's log says more",
            ) from None

    @property
    def has_own_data(self) -> bool:
        """Whether the node's data are a file or folder that nobody else has."""
        return is_own(self.data)

    def applied_to(self, context: Context, methods: Collection[str]) -> RunConfig:
        """Return the run's settings with those in their place that are the owner's.

        Where there is an owner, data root, device and threads are the owner's even if left open, and the server cannot
        name a file or folder to be read. In a simulation the run's settings hold unless the node config has others.

        Args:
            context: Flower's context.
            methods: Names that `method` may have.

        Raises:
            ConfigError: If the run's settings are wrong.
            RefusalError: If the run names files of a node with an owner.
        """
        run: dict[str, Scalar] = dict(context.run_config)
        given = {"data-root": self.data_root, "device": self.device, "threads": self.threads}
        if is_simulated(context):
            given = {key: value for key, value in given.items() if key in context.node_config}
        elif not self.data and is_own(str(run.get("dataset", ""))):
            raise RefusalError("the run names a file or folder; each node's owner does, by data in the node config")
        return RunConfig.from_flat(run | given | ({"dataset": self.data} if self.data else {}), methods=methods)

    def refuse_large(self, num_bytes: int) -> None:
        """Refuse a message of so many bytes if it is larger than the owner allows.

        Raises:
            RefusalError: If it is.
        """
        if 0 < self.max_message_mb < (megabytes := num_bytes / 1e6):
            raise RefusalError(
                f"a message has {megabytes:.1f} MB, its owner allows max-message-mb = {self.max_message_mb:g}"
            )
