"""Declare the dotted settings of novel clients, models on demand and audits."""

import math
import re
from collections.abc import Callable
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from hyperfl_flwr.core.settings import (
    AbsolutePath,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Probability,
    Section,
    setting,
)
from hyperfl_flwr.protocol.hosting import MOST_CLIENTS


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
    from hyperfl_flwr.data.corruptions import CORRUPTIONS  # deferred: imports numpy

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

    clients: Annotated[int, Field(ge=0, le=MOST_CLIENTS)] = setting(
        0,
        "Number of clients that are not trained and are assessed after the last round, with every method that has a "
        "model for clients without labels. The data are divided among them and the N trained clients.",
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
