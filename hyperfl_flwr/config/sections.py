"""The sections of a run's settings, typed; `hyperfl_flwr.config.run_config` puts them together."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from hyperfl_flwr.core.setting_types import Order, Realisation
from hyperfl_flwr.data.corruptions import CORRUPTIONS
from hyperfl_flwr.data.sample_format import parse_classes, parse_normalisation, parse_shape
from hyperfl_flwr.models.encoder import Pooling
from hyperfl_flwr.models.hypernetwork import Initialisation
from hyperfl_flwr.models.server_hypernetwork import Combine


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError(f"must be auto, cpu, cuda or cuda:NUMBER, others (mps) are not tested; got {value!r}")
    return value


Auto = Literal["auto"]
Device = Annotated[str, AfterValidator(_device)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _numbers(text: str) -> str:
    if not re.fullmatch(r"all|(\d+(,\d+)*)?", text):
        raise ValueError(f"must be empty, all, or numbers with commas between them; got {text!r}")
    return text


Numbers = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(_numbers),
]
"""Nothing, all, or numbers with commas between them; a single number may be one."""


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Section(BaseModel):
    """A group of settings: names with hyphens, exact types, nothing unknown."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", alias_generator=_kebab)


def absolute(value: str) -> str:
    """Check that a path is absolute, or empty."""
    if value and not Path(value).is_absolute():
        raise ValueError(f"must be an absolute path, since the app runs in a folder of its own; got {value!r}")
    return value


class DataConfig(Section):
    """`data.*`: which samples each client holds."""

    partition: Literal["similarity", "iid", "dirichlet", "dirichlet-per-label", "shards", "natural"]
    seed: Seed
    train_samples: Auto | Positive
    test_samples: Auto | Positive
    iid_fraction: Share
    dirichlet_alpha: Annotated[float, Field(ge=1e-6, le=1e6)]
    shards_per_client: Positive
    augmentation: Literal["auto", "none"]
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    global_test: bool
    classes: str
    input_shape: str
    normalisation: str

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

    @field_validator("global_test")
    @classmethod
    def _of_test_data(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("validation_fraction"):
            raise ValueError("must be false with data.validation-fraction, which leaves all test data alone")
        return value


class HyperFLConfig(Section):
    """`hyperfl.*`: the settings of HyperFL alone."""

    initialisation: Initialisation
    embedding: Literal["trained", "own", "common-frozen"]
    embedding_dim: Positive
    hidden_width: Positive
    classifier_learning_rate: PositiveFloat
    embedding_learning_rate: Auto | PositiveFloat
    clip_norm: NonNegativeFloat
    head_optimiser: Literal["factored", "plain"]


class FedRepConfig(Section):
    """`fedrep.*`: the settings of FedRep alone."""

    classifier_learning_rate: PositiveFloat
    classifier_epochs: Positive
    clip_norm: NonNegativeFloat


class FedProxConfig(Section):
    """`fedprox.*`: the settings of FedProx alone."""

    mu: NonNegativeFloat


class PFedHNConfig(Section):
    """`pfedhn.*`: the settings of pFedHN and pFedHN-PC alone."""

    embedding_dim: Auto | Positive
    hidden_width: Positive
    hidden_layers: NonNegative
    local_steps: NonNegative
    clip_norm: NonNegativeFloat
    server_learning_rate: Auto | PositiveFloat
    server_momentum: Annotated[float, Field(ge=0, lt=1)]
    server_weight_decay: NonNegativeFloat
    server_clip_norm: NonNegativeFloat
    embedding_learning_rate: Auto | PositiveFloat
    embedding_weight_decay: Auto | NonNegativeFloat
    embedding_std: Auto | PositiveFloat
    combine: Combine

    def dimension(self, num_clients: int) -> int:
        """Return the length of an embedding in a federation of so many clients."""
        return 1 + num_clients // 4 if self.embedding_dim == "auto" else self.embedding_dim


class ITPFLConfig(Section):
    """`it-pfl.*`: the settings of IT-PFL-HN beside `pfedhn.*`, which its hypernetwork has too."""

    fine_tune_rounds: NonNegative
    encoder_learning_rate: PositiveFloat
    encoder_steps: NonNegative
    encoder_batch_size: Positive
    encoder_optimiser: Literal["mean", "adam"]
    encoder_server_learning_rate: PositiveFloat
    pooling: Pooling

    def fine_tunes(self, server_round: int, num_rounds: int) -> bool:
        """Say whether a round, from 1, of so many fine-tunes the hypernetwork with the encoder frozen."""
        return server_round > num_rounds - self.fine_tune_rounds


class PrivHFLConfig(Section):
    """`priv-hfl.*`: the settings of PRIV-HFL alone."""

    realisation: Realisation
    order: Order
    projection: bool
    sigma: Auto | NonNegativeFloat
    dual_step: Auto | PositiveFloat
    local_steps: Positive
    clip_norm: NonNegativeFloat
    distill: bool
    generator_learning_rate: PositiveFloat
    generator_width: Positive
    pseudo_samples: Annotated[int, Field(ge=2)]
    class_balance: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    keep_generators: NonNegative
    mixing: bool

    @field_validator("projection")
    @classmethod
    def _of_a_chain(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("realisation") == "mean":
            raise ValueError("needs priv-hfl.realisation = chain: the mean form has no multipliers to project")
        return value


def _texts(what: str, allowed: Callable[[str], bool]) -> Callable[[str], str]:
    """Return a check that every one of the texts between commas is allowed, and none there twice."""

    def check(text: str) -> str:
        parts = text.split(",")
        if not all(map(allowed, parts)) or len(set(parts)) < len(parts):
            raise ValueError(f"must be {what}, each once, with commas between them; got {text!r}")
        return text

    return check


def _is_epsilon(text: str) -> bool:
    if not re.fullmatch(r"\d+(\.\d+)?([eE][+-]?\d+)?", text):
        return text == "none"
    return 0 < float(text) < math.inf


_AS_TEXT = BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)
"""A single number may be one."""

Corruptions = Annotated[
    str, AfterValidator(_texts(f"none or {', '.join(CORRUPTIONS)}", lambda text: text in ("none", *CORRUPTIONS)))
]
Amounts = Annotated[
    str,
    _AS_TEXT,
    AfterValidator(_texts("all or whole numbers above 0", lambda text: bool(re.fullmatch(r"all|[1-9]\d*", text)))),
]
Epsilons = Annotated[str, _AS_TEXT, AfterValidator(_texts("none or numbers above 0", _is_epsilon))]


class NovelConfig(Section):
    """`novel.*`: clients that are not trained, and how they are assessed after the last round."""

    clients: NonNegative
    corruptions: Corruptions
    samples: Amounts
    epsilons: Epsilons
    delta: Annotated[float, Field(gt=0, lt=1)]
    a_distance_rounds: Positive
    a_distance_learning_rate: PositiveFloat

    @property
    def amounts(self) -> list[int | None]:
        """Numbers of samples that a descriptor is made of; None for all of a client's."""
        return [None if text == "all" else int(text) for text in self.samples.split(",")]

    @property
    def budgets(self) -> list[float | None]:
        """The epsilons; None without noise."""
        return [None if text == "none" else float(text) for text in self.epsilons.split(",")]


class PersonalizeConfig(Section):
    """`personalize.*`: models on demand; `data` and what follows is of simulations, where nodes have no owners."""

    run: str
    data: str
    output: str
    epsilon: NonNegativeFloat
    delta: Annotated[float, Field(gt=0, lt=1)]

    @field_validator("run", "data", "output")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return absolute(value)

    @field_validator("output")
    @classmethod
    def _of_data(cls, value: str, info: ValidationInfo) -> str:
        if bool(value) != bool(info.data.get("data")):
            raise ValueError("goes with personalize.data: give both or neither")
        return value


class PrivacyConfig(Section):
    """`privacy.*`: what a client does to its upload before it leaves."""

    clip_norm: NonNegativeFloat
    noise_multiplier: NonNegativeFloat

    @field_validator("noise_multiplier")
    @classmethod
    def _of_a_norm(cls, value: float, info: ValidationInfo) -> float:
        if value and not info.data.get("clip_norm"):
            raise ValueError("needs privacy.clip-norm above 0, of which it is a multiple")
        return value


class AuditConfig(Section):
    """`audit.*`: of which clients and rounds the server writes down what it sees."""

    clients: Numbers
    rounds: Numbers

    def covers(self, client: int, server_round: int) -> bool:
        """Say whether what the server sees of a client in a round is written down."""
        chosen = ((self.clients, client), (self.rounds, server_round))
        return all(text == "all" or str(number) in text.split(",") for text, number in chosen)
