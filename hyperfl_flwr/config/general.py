"""The settings without a dot in their keys, by topic; `hyperfl_flwr.config.run_config.RunConfig` has all of them."""

from collections.abc import Collection
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from hyperfl_flwr.core.settings import (
    AbsolutePath,
    Auto,
    Device,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Seed,
    Share,
    ShareBelowOne,
    setting,
)
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.data.sample_format import FOLDER_PREFIX, NPZ_PREFIX, is_local_data, local_data_path
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.custom.source import is_factory


def _in(value: str, known: Collection[str]) -> str:
    if value not in known:
        raise ValueError(f"must be one of {', '.join(known)}; got {value!r}{nearest(value, known)}")
    return value


class FederationConfig(Section):
    """What is trained, by how many clients."""

    title: ClassVar[str] = "Method, data and clients"

    method: str = setting(
        "hyperfl", "The method: what is trained, and what of it is shared.", values="one of `hyperfl methods`"
    )
    dataset: str = setting(
        "digits",
        "The data set: one by name, or your own file or folder. A relative path is looked up in `data-root`.",
        values="one of `hyperfl datasets`, `npz:FILE`, `folder:PATH`",
    )
    target: str = setting(
        "cnn",
        "The clients' network. `cnn`: HyperFL's. `lenet`: pFedHN's, for images of 16 pixels and more. `mlp`: two "
        "hidden layers of 200 units. `mlp-500`: two of 500 units and dropout 0.2, IT-PFL-HN's for feature vectors. "
        "`resnet18`: ResNet-18 in its form for CIFAR; its running statistics stay with the clients in `priv-hfl` and "
        "`local`, are averaged in `fedavg` and `fedrep`, and no hypernetwork can generate them.\n\n"
        "`package.module:factory` is a network of your own.",
        values="`cnn`, `lenet`, `mlp`, `mlp-500`, `resnet18`, `package.module:factory`",
    )
    seed: Seed = setting(
        0,
        "Seed of initial values, client sampling and batches; the partition has `data.seed`.",
        values="whole number from 0 to 2^63 - 1",
    )
    num_clients: Positive = setting(20, "Number N of clients that are trained.")
    num_rounds: Positive = setting(10, "Number of federated rounds; a resumed run may have more.", resumable=True)
    fraction_train: Annotated[float, Field(gt=0, le=1)] = setting(
        1.0, "Share of the clients that a round trains; the last round trains all."
    )

    @field_validator("method")
    @classmethod
    def _method(cls, value: str) -> str:
        return _in(value, METHODS)

    @field_validator("target")
    @classmethod
    def _target(cls, value: str) -> str:
        from hyperfl_flwr.models.targets import TARGETS  # with torch, which lists of settings do without

        if ":" not in value:
            return _in(value, TARGETS)
        if not is_factory(value):
            raise ValueError(f"must name a function as package.module:factory, or be a built-in one; got {value!r}")
        return value

    @field_validator("dataset")
    @classmethod
    def _dataset(cls, value: str) -> str:
        from hyperfl_flwr.data.registry import DATASETS  # with torch

        if not is_local_data(value):
            return _in(value, DATASETS)
        # A relative path is looked up in data-root, which each node's owner may set: only loading tells.
        if str(local_data_path(value)) in (".", "PATH"):
            what = f"must name a file after {NPZ_PREFIX} or a folder after {FOLDER_PREFIX}"
            raise ValueError(f"{what}, absolute or in data-root; got {value!r}")
        return value


class LocalTrainingConfig(Section):
    """How a client trains in a round."""

    title: ClassVar[str] = "Local training"

    local_epochs: Positive = setting(5, "Passes E over a client's data in a round.")
    batch_size: Positive = setting(50, "Samples per local step; the last batch of a pass may be smaller.")
    learning_rate: Auto | PositiveFloat = setting(
        "auto",
        "Learning rate of the shared parameters (HyperFL's η_h). `auto`: the method's, which `hyperfl methods` "
        "lists; it was chosen on held-back training data.",
        of_method=True,
    )
    momentum: ShareBelowOne = setting(0.5, "Momentum of SGD; its buffers start empty in every round.")
    weight_decay: NonNegativeFloat = setting(5e-4, "Weight decay of SGD.")


class MachineConfig(Section):
    """Folders, and how the machine is used."""

    title: ClassVar[str] = "Folders and machine"

    data_root: AbsolutePath = setting(
        "",
        "Folder of the data sets. Empty: `hyperfl/data` in your cache folder.",
        values="absolute path",
        resumable=True,
    )
    output: AbsolutePath = setting(
        "",
        "Folder of the run, new or empty; not together with `resume`. Empty: a new folder below `./runs` "
        "(`hyperfl run`) or `~/hyperfl-runs`.",
        values="absolute path",
        resumable=True,
    )
    resume: AbsolutePath = setting("", "Folder of a run to continue.", values="absolute path", resumable=True)
    device: Device = setting(
        "auto",
        "Where the clients train. `auto`: on a GPU where there is one. `mps` is refused, since it is not tested.",
        values="`auto`, `cpu`, `cuda`, `cuda:NUMBER`",
        resumable=True,
    )
    threads: Auto | Positive = setting(
        "auto",
        "Torch threads of each process. `auto`: in a run of `hyperfl` the cores that the processes would leave idle, 4 "
        "at most; in a simulation by `flwr run` one; on a deployed node torch's own default.",
        resumable=True,
    )
    checkpoint_every: Positive = setting(
        5, "Rounds between checkpoints; the last round always has one.", resumable=True
    )


class NodesConfig(Section):
    """What a run does about nodes that are missing, fail or send wrong replies."""

    title: ClassVar[str] = "Nodes and failures"

    failure_budget: Share = setting(
        0.25,
        "Share of all client trainings so far that may fail before the run does. Refused replies do not count.",
        resumable=True,
    )
    max_failed_rounds: Positive = setting(
        3, "The run fails after so many rounds in a row in which no sampled client finished.", resumable=True
    )
    max_update_ratio: NonNegativeFloat = setting(
        10.0,
        "A reply is left out if the mean change of a shared group is longer than so many times what was sent (which "
        "counts as at least 0.05 for each parameter); 0 allows any.",
        resumable=True,
    )
    exclusion_rounds: NonNegative = setting(
        5,
        "Rounds for which a deployment does not ask a node whose reply was refused, twice as many after each further "
        "time; 0 asks it again in the next round.",
        resumable=True,
    )
    min_nodes: Auto | Positive = setting(
        "auto",
        "Nodes that a deployment needs, to begin and before each round. `auto`: to begin, all must have answered; half "
        "of them, rounded up, must fit and stay.",
        resumable=True,
    )
    node_timeout: PositiveFloat = setting(
        120.0, "Seconds to wait for nodes that are missing, at the start and before a round.", resumable=True
    )
    round_timeout: PositiveFloat = setting(3600.0, "Seconds to wait for the replies of a phase.", resumable=True)
    ledger: bool = setting(
        False,
        "Write down what the nodes of a simulation send. The nodes of a deployment always do.",
        resumable=True,
    )
