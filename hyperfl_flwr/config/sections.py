"""Declare the dotted settings that do not belong to a method: data, novel clients, audits."""

import math
import re
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from hyperfl_flwr.config.grouping import Grouping
from hyperfl_flwr.core.settings import (
    AbsolutePath,
    Auto,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Probability,
    Section,
    Seed,
    Share,
    ShareBelowOne,
    setting,
)
from hyperfl_flwr.data.sample_format import parse_classes, parse_normalisation, parse_shape


def _numbers(text: str) -> str:
    if not re.fullmatch(r"all|(\d+(,\d+)*)?", text):
        raise ValueError(f"must be empty, all, or numbers with commas between them; got {text!r}")
    return text


Numbers = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(_numbers),
]
"""Empty, `all`, or numbers separated by commas; a single number may be given as an int."""


class DataConfig(Section):
    """Partition and preparation of the data."""

    key: ClassVar[str] = "data"
    title: ClassVar[str] = "Data"

    partition: Literal["similarity", "iid", "dirichlet", "dirichlet-per-label", "shards", "natural"] = setting(
        "similarity",
        "How the samples are divided among the clients.\n\n"
        "`similarity`: equal sizes; `data.iid-fraction` from all classes, the rest from the three dominant classes "
        "of the client's group. `iid`: equal sizes from all classes. `dirichlet`: equal sizes; class shares drawn "
        "per client from Dir(α). `dirichlet-per-label`: unequal sizes; each class divided among the clients in "
        "shares drawn from Dir(α), as Flower Datasets does. `shards`: samples sorted by label and cut into shards, "
        "`data.shards-per-client` random ones per client. `natural`: the samples with the client's id, for `omniglot`, "
        "and for `npz` files with `clients`.",
    )
    seed: Seed = setting(0, "Seed of the partition.", values="whole number from 0 to 2^63 - 1")
    train_samples: Auto | Positive = setting(
        "auto",
        "Training samples per client. `auto`: as in the paper that uses the data set, or as many as possible without "
        "using a sample twice.",
    )
    test_samples: Auto | Positive = setting("auto", "Test samples per client. `auto`: as for training samples.")
    iid_fraction: Share = setting(0.2, "Share of a client's samples drawn from all classes; for `similarity`.")
    dirichlet_alpha: Annotated[float, Field(ge=1e-6, le=1e6)] = setting(
        0.3,
        "Concentration α of the two Dirichlet partitions; a small one makes clients differ.",
        values="number > 0",
    )
    shards_per_client: Positive = setting(2, "Number of shards per client; for `shards`.")
    augmentation: Literal["auto", "none"] = setting(
        "auto", "`auto`: random crops and flips for the data sets that are usually trained with them."
    )
    validation_fraction: ShareBelowOne = setting(
        0.0,
        "Share of each client's training samples that is held back as validation data. With `early-stopping` or `keep "
        "= best` they decide about rounds. Otherwise they replace the test samples, so that settings can be chosen "
        "without test data.",
    )
    group_by: Grouping = setting(
        "auto",
        "What keeps samples of the same subject, such as a patient, in one part of the data: training, validation or "
        "test. `auto`: the key `groups` of an `npz` file. `folder`: the first folder below that of the class, for "
        "`folder:`. A regular expression with one group: what the group matches in the path below the folder of the "
        "class, such as `(p[0-9]+)_`. `none`: nothing.",
        values="`auto`, `none`, `folder`, regular expression",
    )
    global_test: bool = setting(
        False, "After the last round, also evaluate each client on all test data of the data set."
    )
    classes: str = setting(
        "auto",
        "Names of the classes in the order of their numbers, for data in which a client may lack a class. `auto`: the "
        "classes of the data.",
        values="`auto`, names with commas between them",
    )
    input_shape: str = setting(
        "auto",
        "Channels (1 or 3), height and width of images, for example `1x28x28`. Images of `folder:` are converted and "
        "resized to it, others must have it. `auto`: that of the data.",
        values="`auto`, three numbers with `x` between them",
    )
    normalisation: str = setting(
        "auto",
        "Mean and standard deviation of pixels in [0, 1], for example `0.13/0.31`; one number, or one per channel, "
        "separated by commas. `auto`: of the training images of all clients; 0.5 and 0.5 for `folder:` and if a node "
        "has local data.",
        values="`auto`, `MEAN/STD`",
    )

    @field_validator("classes")
    @classmethod
    def _names(cls, value: str) -> str:
        parse_classes(value)
        return value

    @field_validator("input_shape")
    @classmethod
    def _shape(cls, value: str) -> str:
        parse_shape(value)
        return value

    @field_validator("normalisation")
    @classmethod
    def _mean_and_std(cls, value: str) -> str:
        parse_normalisation(value)
        return value


def _texts(requirement: str, allowed: Callable[[str], bool]) -> Callable[[str], str]:
    """Return a check that all comma-separated parts are allowed and that none occurs twice."""

    def check(text: str) -> str:
        parts = text.split(",")
        if not all(map(allowed, parts)) or len(set(parts)) < len(parts):
            raise ValueError(f"must be {requirement}, each once, with commas between them; got {text!r}")
        return text

    return check


def _is_epsilon(text: str) -> bool:
    if not re.fullmatch(r"\d+(\.\d+)?([eE][+-]?\d+)?", text):
        return text == "none"
    return 0 < float(text) < math.inf


_AS_TEXT = BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)
"""Accepts a single number instead of text."""


def _corruptions(text: str) -> str:
    from hyperfl_flwr.data.corruptions import (
        CORRUPTIONS,  # deferred: imports torch, which listing settings does not need
    )

    return _texts(f"none or {', '.join(CORRUPTIONS)}", lambda name: name in ("none", *CORRUPTIONS))(text)


Corruptions = Annotated[str, AfterValidator(_corruptions)]
Amounts = Annotated[
    str,
    _AS_TEXT,
    AfterValidator(_texts("all or whole numbers above 0", lambda text: bool(re.fullmatch(r"all|[1-9]\d*", text)))),
]
Epsilons = Annotated[str, _AS_TEXT, AfterValidator(_texts("none or numbers above 0", _is_epsilon))]


class NovelConfig(Section):
    """Clients that are not trained, and their assessment after the last round."""

    key: ClassVar[str] = "novel"
    title: ClassVar[str] = "Novel clients"

    clients: NonNegative = setting(
        0,
        "Number of clients that are not trained and are assessed after the last round, with `fedavg`, `pfedhn` and "
        "`it-pfl`. The data are divided among them and the N trained clients.",
    )
    corruptions: Corruptions = setting(
        "none",
        "Corruptions of the novel clients' images; the clients are assessed once with each.",
        values="`none`, `blur`, `rotation`, `brightness`, `contrast`, `saturation`, several with commas between them",
        resumable=True,
    )
    samples: Amounts = setting(
        "all",
        "Numbers of unlabelled samples from which `it-pfl` computes a descriptor; the clients are assessed with each.",
        values="`all`, whole numbers with commas between them",
        resumable=True,
    )
    epsilons: Epsilons = setting(
        "none",
        "Privacy budgets ε of the noise on descriptors, with `it-pfl.pooling = mean`.",
        values="`none`, numbers > 0 with commas between them",
        resumable=True,
    )
    delta: Probability = setting(0.01, "Privacy parameter δ of the noise on descriptors.", resumable=True)
    a_distance_rounds: Positive = setting(
        20,
        "Number of rounds that train the linear classifiers which find the nearest trained client, with `pfedhn`.",
        resumable=True,
    )
    a_distance_learning_rate: PositiveFloat = setting(3.0, "Learning rate of these linear classifiers.", resumable=True)

    @property
    def amounts(self) -> list[int | None]:
        """Numbers of samples from which a descriptor is computed; None for all samples of a client."""
        return [None if text == "all" else int(text) for text in self.samples.split(",")]

    @property
    def budgets(self) -> list[float | None]:
        """Privacy budgets epsilon of the descriptors; None for no noise."""
        return [None if text == "none" else float(text) for text in self.epsilons.split(",")]


class PersonalizeConfig(Section):
    """Models on demand from a finished run; these settings are not for `hyperfl run`."""

    key: ClassVar[str] = "personalize"
    title: ClassVar[str] = "Models on demand"

    run: AbsolutePath = setting(
        "",
        "Folder of an `it-pfl` run: the server app generates models on demand with it and trains nothing.",
        values="absolute path",
    )
    data: AbsolutePath = setting(
        "",
        "Data of the novel client, in a simulation only: in a deployment the owner configures them on the node.",
        values="absolute path",
    )
    output: AbsolutePath = setting(
        "",
        "Folder of the novel client's model, in a simulation only; needs `personalize.data`.",
        values="absolute path",
    )
    epsilon: NonNegativeFloat = setting(
        0.0, "Privacy budget ε of the noise on the novel client's descriptor, in a simulation only; 0: no noise."
    )
    delta: Probability = setting(0.01, "Privacy parameter δ of that noise.")
    join_rounds: NonNegative = setting(
        0,
        "Rounds in which the server trains embeddings for nodes that join the run, which is then of `pfedhn` or "
        "`it-pfl`. 0: it generates models on demand.",
    )
    join_target: str = setting(
        "",
        "Target network of the clients that join; empty if the run has only one.",
        values="one of the run's networks",
    )
    join_learning_rate: NonNegativeFloat = setting(
        0.0, "Learning rate of the embeddings of clients that join; 0: that of the run's embeddings."
    )

    @field_validator("output")
    @classmethod
    def _needs_data(cls, value: str, info: ValidationInfo) -> str:
        if bool(value) != bool(info.data.get("data")):
            raise ValueError("goes with personalize.data: give both or neither")
        return value


class AuditConfig(Section):
    """Clients and rounds in which the server records what it receives, for `hyperfl audit --recorded`."""

    key: ClassVar[str] = "audit"
    title: ClassVar[str] = "Recording for audits"

    clients: Numbers = setting(
        "",
        "Clients of which the server records what it sends and receives. They get separate messages, which changes "
        "no result.",
        values="empty, `all`, numbers with commas between them",
    )
    rounds: Numbers = setting(
        "",
        "Rounds that are recorded. With secure sums, the server records what it has opened in them.",
        values="empty, `all`, numbers with commas between them",
    )

    def covers(self, client: int, server_round: int) -> bool:
        """Return whether the server records a client's messages in a round."""
        return self.covers_round(server_round) and _names(self.clients, client)

    def covers_round(self, server_round: int) -> bool:
        """Return whether the server records a round; with secure sums, it records the opened sum."""
        return _names(self.rounds, server_round)


def _names(text: str, number: int) -> bool:
    return text == "all" or str(number) in text.split(",")
