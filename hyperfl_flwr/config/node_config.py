"""What a node's owner decides, as Flower hands it to the client app: the node config.

The run's settings come from the server (`hyperfl_flwr.config.run_config`). On a node with an owner those about its
machine and its data have no effect, see `Owner.applied_to`.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from flwr.app import Context
from flwr.supercore.utils import get_flwr_home
from pydantic import ValidationError, field_validator

from hyperfl_flwr.config.run_config import RunConfig, explain
from hyperfl_flwr.core.errors import ConfigError, RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.settings import (
    AbsolutePath,
    Auto,
    Device,
    NonNegative,
    NonNegativeFloat,
    Positive,
    Section,
    setting,
)
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.data.registry import DATASETS
from hyperfl_flwr.data.sample_format import is_own, own_path

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

    `simulated` is `SIMULATED`; what begins with `novel` is of a node that takes a model on demand, see
    `clients.novel.node`.
    """

    title: ClassVar[str] = "The owner of a node"

    partition_id: NonNegative | None = setting(None, "Number of the node, from 0.", values="whole number ≥ 0")
    num_partitions: Positive | None = setting(
        None,
        "Number P of nodes; with the node's number it decides which clients the node hosts.",
        values="whole number ≥ 1",
    )
    data: str = setting(
        "",
        "The node's data. Left open: the named data set of the run, which cannot name files.",
        values="`npz:FILE`, `folder:PATH`, one of `hyperfl datasets`",
    )
    data_root: AbsolutePath = setting(
        "",
        "Where named data sets and relative paths are looked up. Left open: your cache folder.",
        values="absolute path",
    )
    device: Device = setting(
        "auto",
        "Where the node's clients train; `auto` if left open, whatever the run says.",
        values="`auto`, `cpu`, `cuda`, `cuda:NUMBER`",
    )
    threads: Auto | Positive = setting("auto", "Torch threads; `auto` if left open, whatever the run says.")
    state_dir: AbsolutePath = setting(
        "",
        "Folder of the private state, the decoded images and the ledger. Left open: `hyperfl-state` in FLWR_HOME.",
        values="absolute path",
    )
    max_message_mb: NonNegativeFloat = setting(
        0,
        "Larger messages, in units of 10^6 bytes, are refused before their arrays are unpacked; 0: any. The SuperNode "
        "has received them by then.",
    )
    mixing_key_file: AbsolutePath = setting(
        "",
        "For `priv-hfl.mixing`: a file of at least 16 random bytes that all nodes have and the server has not.",
        values="absolute path",
    )
    keep_model: bool | None = setting(
        None,
        "Whether the clients' models stay in `state-dir` for their owner, who can export them. Left open: `true`.",
        values="`true`, `false`",
    )
    simulated: bool = False
    novel_data: AbsolutePath = setting(
        "", "Data of a novel client, which takes a model on demand and trains nothing.", values="absolute path"
    )
    novel_output: AbsolutePath = setting("", "Folder of its model.", values="absolute path")
    novel_epsilon: float | None = setting(
        None, "Privacy budget ε of the noise on its descriptor; 0: no noise.", values="number ≥ 0"
    )
    novel_delta: float | None = setting(None, "Privacy parameter δ of that noise.", values="number in (0, 1)")

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
                "in the node config, " + explain(error.errors(), known, "; known are " + ", ".join(known)),
                public=f"its owner must repair {', '.join(keys)} in the node config; the node's log says more",
            ) from None

    @property
    def has_own_data(self) -> bool:
        """Whether the node's data are a file or folder that nobody else has."""
        return is_own(self.data)

    def applied_to(self, context: Context) -> RunConfig:
        """Return the run's settings with those in their place that are the owner's.

        Where there is an owner, data root, device and threads are the owner's even if left open, and the server cannot
        name a file or folder to be read. In a simulation the run's settings hold unless the node config has others.

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
        return RunConfig.from_flat(run | given | ({"dataset": self.data} if self.data else {}))

    def refuse_large(self, num_bytes: int) -> None:
        """Refuse a message of so many bytes if it is larger than the owner allows.

        Raises:
            RefusalError: If it is.
        """
        if 0 < self.max_message_mb < (megabytes := num_bytes / 1e6):
            raise RefusalError(
                f"a message has {megabytes:.1f} MB, its owner allows max-message-mb = {self.max_message_mb:g}"
            )
