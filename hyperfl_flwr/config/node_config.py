"""Typed node config: the decisions of a node's owner, from Flower's node config or from `node.toml`.

The run's settings come from the server (`hyperfl_flwr.config.run_config`). On a deployed node the owner's decisions
about machine and data override them, see `NodeConfig.applied_to`.
"""

import re
import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from flwr.app import Context
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from hyperfl_flwr.config.grouping import OwnersGrouping, owners_grouping
from hyperfl_flwr.config.node_data import owners_data
from hyperfl_flwr.config.pretrained import owners_weights
from hyperfl_flwr.config.refusals import explain
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError, RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.settings import (
    Auto,
    Device,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Probability,
    Section,
    absolute,
    setting,
)
from hyperfl_flwr.data.sample_format import is_local_data, placed

SIMULATED = "simulated"
"""Key that marks a node of an in-process simulation, of which the data have no owner."""

NOVEL_DATA, NOVEL_OUTPUT, NOVEL_EPSILON, NOVEL_DELTA = "novel-data", "novel-output", "novel-epsilon", "novel-delta"
"""Keys of a novel client's node: its samples, the folder of its model, and the noise on its descriptor."""

JOIN_DATA = "join-data"
"""Key of the data of a node that joins a finished run."""


def is_simulated(context: Context) -> bool:
    """Return whether a node is simulated, so that its data have no owner to protect."""
    ray = sys.modules.get("ray")
    return bool(context.node_config.get(SIMULATED)) or (ray is not None and ray.is_initialized())


_PATHS = ("data_root", "lpm_weights", "state_dir", "mixing_key_file", "peers_file", "identity_key_file", "novel_data",
          "novel_output")  # fmt: skip


class NodeConfig(Section):
    """The keys of a node config, all optional; those with `novel` are of a novel client, see `clients.novel.node`.

    Paths must be absolute, unless the validation context has a `folder` (a `Path`), from which relative paths start.
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
        "The node's data. Not given: the data set that the run names, which must not be a file or folder.",
        values="`npz:FILE`, `csv:FILE`, `folder:PATH`, one of `hyperfl datasets`",
    )
    data_root: str = setting(
        "",
        "Folder of named data sets and relative paths. Not given: your cache folder.",
        values="absolute path",
    )
    group_by: OwnersGrouping = setting(
        "", "`data.group-by` of the node's data. Not given: the run's, which must not be a pattern.",
        values="`auto`, `none`, `folder`, regular expression",
    )  # fmt: skip
    lpm_weights: str = setting(
        "",
        "Weights of pre-trained bodies, see `lpm.weights`. Not given: runs with such bodies are refused.",
        values="`auto`, absolute path",
    )
    device: Device = setting(
        "auto",
        "Device that trains the node's clients; overrides the run's setting. Not given: `auto`.",
        values="`auto`, `cpu`, `cuda`, `cuda:NUMBER`",
    )
    threads: Auto | Positive = setting("auto", "Torch threads; overrides the run's setting. Not given: `auto`.")
    worker: Literal["auto", "off"] = setting("auto", "Whether messages' processes are forked (on Linux), or started.")
    state_dir: str = setting(
        "",
        "Folder of the private state, the decoded images and the ledger. Not given: `hyperfl-state` in FLWR_HOME.",
        values="absolute path",
    )
    keep_model: bool | None = setting(
        None,
        "Whether the clients' models are stored in `state-dir`, where their owner can export them. Not given: `true`.",
        values="`true`, `false`",
    )
    cross_site: bool = setting(
        False,
        "Whether the node takes part in cross-site matrices (`cross-site` of a run): it sends its clients' whole "
        "personalized models to the server, which sends them to the other nodes that do, and evaluates theirs on its "
        "test data. A dishonest server can compute test samples from the answers. Needs `keep-model`.",
    )
    max_message_mb: NonNegativeFloat = setting(
        0,
        "Largest message in units of 10^6 bytes; larger ones are refused before their arrays are unpacked, but after "
        "the SuperNode has received them. 0: any size.",
    )
    mixing_key_file: str = setting(
        "",
        "For `priv-hfl.mixing`: a file of at least 16 random bytes that all nodes have, but not the server.",
        values="absolute path",
    )
    min_cohort: Annotated[int, Field(ge=2)] = setting(
        3,
        "Least number of honest nodes in a secure sum that this node takes part in. 2: the other node learns this "
        "node's part by subtraction.",
        values="whole number ≥ 2",
    )
    max_colluding: Auto | NonNegative = setting(
        "auto",
        "Number of nodes that this node's owner expects to collude with the server at most. `auto`: below a third of "
        "the peers.",
    )
    peers_file: str = setting(
        "",
        "File with the public keys of all nodes, see `hyperfl deploy peers`. Not given: keys come from the server, "
        "which is safe only if it follows the protocol.",
        values="absolute path",
    )
    identity_key_file: str = setting(
        "",
        "The node's private key, whose public part is in the other nodes' `peers-file`.",
        values="absolute path",
    )
    secure_sum_only: bool = setting(
        False,
        "Refuse every run that would see this node's clients alone (`secagg.enabled = false`). Needs `peers-file`.",
    )
    max_epsilon: PositiveFloat | None = setting(
        None,
        "Largest ε that the uploads of a client of this node may spend, over all runs that `privacy.jsonl` in "
        "`state-dir` has recorded. Uploads beyond it are refused, as are all that nothing on this node bounds: without "
        "noise, or with noise that the server adds; `privacy.noise = sum` needs `peers-file`. The node then sends no "
        "metrics of its clients, which have no noise; in secure sums their sums remain. Not given: no limit.",
        values="number > 0",
    )
    max_epsilon_delta: Probability = setting(1e-5, "Privacy parameter δ that belongs to `max-epsilon`.")
    novel_data: str = setting(
        "", "Data of a novel client, which receives a model on demand and does not train.", values="absolute path"
    )
    novel_output: str = setting("", "Folder of the novel client's model.", values="absolute path")
    novel_epsilon: PositiveFloat | None = setting(
        None,
        "Privacy budget ε of the noise on the client's descriptor. Not given: no noise.",
        values="number > 0",
    )
    novel_delta: Probability | None = setting(None, "Privacy parameter δ of that noise.", values="number in (0, 1)")
    join_data: str = setting(
        "",
        "Labelled data of a client that joins a finished run of `pfedhn` or `it-pfl`; needs `novel-output`.",
        values="`npz:FILE`, `csv:FILE`, `folder:PATH`",
    )
    simulated: bool = False

    @field_validator(*_PATHS)
    @classmethod
    def _absolute(cls, value: str, info: ValidationInfo) -> str:
        return value if info.field_name == "lpm_weights" and value == "auto" else absolute(placed(value, info.context))

    @field_validator("cross_site")
    @classmethod
    def _with_models(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("keep_model") is False:
            raise ValueError("needs keep-model: what is sent is the model that the node keeps")
        return value

    @field_validator("secure_sum_only")
    @classmethod
    def _with_peers(cls, value: bool, info: ValidationInfo) -> bool:
        if value and not info.data.get("peers_file"):
            raise ValueError("needs peers-file: otherwise all other keys could be the server's own")
        return value

    @field_validator("data", "join_data")
    @classmethod
    def _named(cls, value: str, info: ValidationInfo) -> str:
        return owners_data(value, info.context)

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
                "in the node config, " + explain(error.errors(), known),
                public=f"its owner must repair {', '.join(keys)} in the node config; the node's log says more",
            ) from None

    @classmethod
    def of_context(cls, context: Context) -> Self:
        """Validate the config of the node that received a message.

        In Flower's simulation nodes have no config that could name a novel client's data; the run's settings
        `personalize.*` are used instead.

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
        """Return the keys that differ from their defaults, in the form of Flower's node config."""
        return self.model_dump(by_alias=True, exclude_defaults=True)

    @property
    def place(self) -> tuple[int, int]:
        """The node's number and the number of all nodes.

        Raises:
            ConfigError: If the node config lacks one of them.
        """
        place = {"partition-id": self.partition_id, "num-partitions": self.num_partitions}
        if missing := [key for key, value in place.items() if value is None]:
            raise ConfigError(
                f"the node config lacks {' and '.join(missing)}; start the SuperNode with "
                f"--node-config 'partition-id=0 num-partitions=2'",
                public=f"its node config lacks {' and '.join(missing)}",
            )
        return self.partition_id or 0, self.num_partitions or 1

    @property
    def has_local_data(self) -> bool:
        """Whether the node's data are a file or folder of its owner, not a named data set."""
        return is_local_data(self.data)

    @property
    def has_one_client(self) -> bool:
        """Whether all of the node's data are one client's, under whatever number of the node."""
        return self.has_local_data or bool(self.novel_data or self.join_data)

    def applied_to(self, run_config: Mapping[str, Scalar]) -> RunConfig:
        """Return the run's settings, overridden by the node's.

        On a deployed node, data root, device, threads and weights of a pre-trained body are the owner's, even if not
        given, and the server cannot name a file or folder to read. In a simulation the run's settings apply unless the
        node config has others.

        Args:
            run_config: The run's settings, as Flower passes them to apps.

        Raises:
            ConfigError: If the run's settings are wrong.
            RefusalError: On a deployed node, if the run names a file or folder, or weights that the owner does not.
        """
        given: dict[str, Scalar] = {"data-root": self.data_root, "device": self.device, "threads": self.threads}
        given["lpm.weights"] = self.lpm_weights or owners_weights(run_config.get("target"), simulated=self.simulated)
        if self.simulated:
            given = {key: value for key, value in given.items() if re.sub("[-.]", "_", key) in self.model_fields_set}
        elif not self.data and is_local_data(str(run_config.get("dataset", ""))):
            raise RefusalError(
                "the run's dataset is a file or folder; only each node's owner may name one, as data in the node config"
            )
        named: dict[str, Scalar] = {"dataset": self.data} if self.data else {}
        if grouping := self.group_by or owners_grouping(run_config, simulated=self.simulated):
            named["data.group-by"] = grouping
        return RunConfig.from_flat({**run_config, **given, **named})

    def refuse_large(self, num_bytes: int) -> None:
        """Refuse a message that is larger than the owner allows.

        Raises:
            RefusalError: If `num_bytes` is above `max-message-mb`.
        """
        if 0 < self.max_message_mb < (megabytes := num_bytes / 1e6):
            raise RefusalError(
                f"a message has {megabytes:.1f} MB, but its owner allows max-message-mb = {self.max_message_mb:g}"
            )
