"""Typed node config: the decisions of a node's owner, from Flower's node config or from `node.toml`.

The run's settings come from the server (`hyperfl_flwr.config.run_config`). On a deployed node the owner's decisions
about machine and data override them, see `NodeConfig.applied_to`.
"""

import re
import sys
from collections.abc import Mapping
from typing import Self

from flwr.app import Context
from pydantic import ValidationError

from hyperfl_flwr.config.grouping import owners_grouping
from hyperfl_flwr.config.node_keys import NodeKeys
from hyperfl_flwr.config.pretrained import owners_weights
from hyperfl_flwr.config.refusals import explain
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError, RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.sample_format import is_local_data

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


class NodeConfig(NodeKeys):
    """The decisions of a node's owner, and how they apply to a message and a run."""

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

    @property
    def sends_metrics(self) -> bool:
        """Whether the clients' metrics may leave the node, which have no noise.

        Not with `max_epsilon`: metrics of parameters that the server chooses would reveal samples, at no cost in the
        record, and so would those in a secure sum, by the difference of two sums.
        """
        return self.max_epsilon is None

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
                "the run's dataset is a file or folder; only each node's owner may name one, as data in node.toml (the "
                "node config)"
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
