"""The keys of a node config: types, defaults and meanings of the decisions of a node's owner."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from hyperfl_flwr.config.grouping import OwnersGrouping
from hyperfl_flwr.config.node_data import owners_data
from hyperfl_flwr.core.settings import (
    Auto,
    Device,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Probability,
    Section,
    Share,
    absolute,
    setting,
)
from hyperfl_flwr.data.sample_format import is_local_data, placed

Check = Literal["off", "warn", "refuse"]

_PATHS = ("data_root", "lpm_weights", "state_dir", "mixing_key_file", "peers_file", "identity_key_file", "novel_data",
          "novel_output")  # fmt: skip

_OTHER_DATA = {"data": "data", "novel-data": "novel_data"}
"""Keys that `novel-data` and `join-data` exclude, where they come before them, and their fields."""


class NodeKeys(Section):
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
    worker: Literal["auto", "off"] = setting(
        "auto",
        "How the process that handles a message is started. `auto`: on Linux, as a fork of a process that has already "
        "imported torch, which is faster; elsewhere as with `off`. `off`: as a new Python process.",
    )
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
        "test data. A malicious server can compute test samples from the answers. Needs `keep-model`.",
    )
    max_message_mb: NonNegativeFloat = setting(
        0,
        "Largest message, in units of 10^6 bytes. A larger one is refused only after the SuperNode has received it and "
        "the ledger has recorded it. 0: any size.",
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
        "`state-dir` has recorded. The node refuses an upload that would exceed it, and every upload whose ε it cannot "
        "bound itself: without noise, or with noise that only the server adds; `privacy.noise = sum` needs "
        "`peers-file`. The node then does not send its clients' metrics, since these have no noise, and secure sums "
        "with it contain none. Not given: no limit.",
        values="number > 0",
    )
    max_epsilon_delta: Probability = setting(1e-5, "Privacy parameter δ that belongs to `max-epsilon`.")
    check_change: Check = setting(
        "warn",
        "What to do about `max-change`: `warn` writes a line into the node's log and ledger, with `refuse` the client "
        "does not train either. See [checks](../privacy/node-checks.md), also of the keys that follow. In a simulation "
        "only the checks that its node config names are made.",
    )
    max_change: NonNegativeFloat = setting(
        1.0,
        "Largest distance of a received layer from the one received last, as a multiple of the smaller one's norm.",
    )
    check_duplicates: Check = setting("warn", "What to do about `max-duplicates`.")
    max_duplicates: Share = setting(
        0.5, "Largest share of a received layer's units of which the weights are parallel to another unit's."
    )
    check_dead: Check = setting("warn", "What to do about `max-dead`.")
    max_dead: Share = setting(
        0.5,
        "Largest share of a layer's units that are active for none of the client's samples, in addition to those that "
        "were so in the network received last.",
    )
    check_nested: Check = setting("warn", "What to do about `max-nested`.")
    max_nested: Share = setting(
        0.6,
        "Largest share of a layer's different sets of active samples that form one chain, each inside the next, as "
        "where biases divide the samples into bins.",
    )
    check_rare: Check = setting("warn", "What to do about `max-rare`.")
    max_rare: Share = setting(
        0.5,
        "Largest share of the active units of a layer that are active for at most one in 20 of the client's samples.",
    )
    check_loss_jump: Check = setting("warn", "What to do about `max-loss-jump`.")
    max_loss_jump: NonNegativeFloat = setting(
        5.0,
        "Largest rise of the received network's loss on the client's samples since the last round, as a multiple of "
        "the loss of a network that returns 0.",
    )
    min_samples: Positive = setting(
        1, "Smallest number of training samples that a client's answer may be computed from; the node refuses others."
    )
    min_steps: Positive = setting(
        1, "Smallest number of local steps in a round that an answer may be computed from; the node refuses others."
    )
    min_test_samples: Positive = setting(
        1,
        "Smallest number of test samples, and of validation samples, that a client's scores may be computed from; the "
        "node refuses to send scores of fewer.",
    )
    novel_data: str = setting(
        "",
        "Data of a novel client, which receives a model on demand and does not train; the prefixes `npz:`, `csv:` and "
        "`folder:` are optional. Not together with `data`.",
        values="absolute path",
    )
    novel_output: str = setting("", "Folder of the novel client's model.", values="absolute path")
    novel_epsilon: PositiveFloat | None = setting(
        None,
        "Privacy budget ε of the noise on the client's descriptor; needs `novel-data` and `novel-delta`. Not given: no "
        "noise.",
        values="number > 0",
    )
    novel_delta: Probability | None = setting(
        None, "Privacy parameter δ of that noise; needs `novel-epsilon`.", values="number in (0, 1)"
    )
    join_data: str = setting(
        "",
        "Labelled data of a client that joins a finished run of `pfedhn` or `it-pfl`; needs `novel-output`. Not "
        "together with `data` or `novel-data`.",
        values="`npz:FILE`, `csv:FILE`, `folder:PATH`",
    )
    simulated: bool = False

    @model_validator(mode="before")
    @classmethod
    def _named_delta(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Have a `novel-delta` that is not given compared with `novel-epsilon`, too."""
        return {"novel-delta": None, **values} if "novel-epsilon" in values else values

    @field_validator(*_PATHS)
    @classmethod
    def _absolute(cls, value: str, info: ValidationInfo) -> str:
        if info.field_name == "novel_data" and is_local_data(value):
            value = owners_data(value, info.context).partition(":")[2]
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

    @field_validator("novel_data", "join_data")
    @classmethod
    def _alone(cls, value: str, info: ValidationInfo) -> str:
        given = [f"{key} = {info.data[name]!r}" for key, name in _OTHER_DATA.items() if info.data.get(name)]
        if value and given:
            raise ValueError(
                f"cannot be given together with {' and '.join(given)}: a node trains, receives a model on demand, or "
                f"joins a run; got {value!r}; keep one of them"
            )
        return value

    @field_validator("novel_epsilon")
    @classmethod
    def _with_novel_data(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("novel_data") == "":
            raise ValueError(
                f"needs novel-data, of which it bounds the descriptor; got {value!r}; set it, or remove the noise"
            )
        return value

    @field_validator("novel_delta")
    @classmethod
    def _with_epsilon(cls, value: float | None, info: ValidationInfo) -> float | None:
        if "novel_epsilon" in info.data and (value is None) != (info.data["novel_epsilon"] is None):
            given = f"novel-epsilon = {info.data['novel_epsilon']!r}" if value is None else f"novel-delta = {value!r}"
            raise ValueError(f"goes with novel-epsilon: give both or neither; got {given} alone")
        return value
