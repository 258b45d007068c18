"""The run's settings: typed, validated once, the only reader of string keys.

Default values live in pyproject.toml under `[tool.flwr.app.config]` and nowhere else. Flower hands an app one flat dict
(`"data.partition": "similarity"`), in which it checks the keys but not the types; `RunConfig.from_flat` checks all of
it and reports every problem at once.
"""

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from hyperfl_flwr import ROOT
from hyperfl_flwr.data.client_data import DataSettings
from hyperfl_flwr.data.datasets import DATASETS
from hyperfl_flwr.errors import ConfigError, InstallationError
from hyperfl_flwr.models.hypernetwork import Initialisation
from hyperfl_flwr.models.server_hypernetwork import Combine
from hyperfl_flwr.models.targets import TARGETS

Scalar = str | int | float | bool
"""What a run-config value may be (Flower's `UserConfigValue`)."""

Auto = Literal["auto"]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]

Numbers = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=r"^(all|(\d+(,\d+)*)?)$"),
]
"""Nothing, all, or numbers with commas between them; a single number may be one."""

RESUMABLE_CHANGES = frozenset(
    {
        "checkpoint-every",
        "data-root",
        "device",
        "failure-budget",
        "max-failed-rounds",
        "node-timeout",
        "num-rounds",
        "output",
        "resume",
        "round-timeout",
        "threads",
    }
)
"""Settings that a resumed run may change; `num-rounds` may only grow. All others decide what is computed."""


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", alias_generator=_kebab)


class DataConfig(_Section):
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

    @field_validator("global_test")
    @classmethod
    def _of_test_data(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("validation_fraction"):
            raise ValueError("must be false with data.validation-fraction, which leaves all test data alone")
        return value


class HyperFLConfig(_Section):
    """`hyperfl.*`: the settings of HyperFL alone."""

    initialisation: Initialisation
    embedding: Literal["trained", "own", "common-frozen"]
    embedding_dim: Positive
    hidden_width: Positive
    classifier_learning_rate: PositiveFloat
    embedding_learning_rate: Auto | PositiveFloat
    clip_norm: NonNegativeFloat
    head_optimiser: Literal["factored", "plain"]


class FedRepConfig(_Section):
    """`fedrep.*`: the settings of FedRep alone."""

    classifier_learning_rate: PositiveFloat
    classifier_epochs: Positive
    clip_norm: NonNegativeFloat


class PFedHNConfig(_Section):
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
    combine: Combine


class PrivacyConfig(_Section):
    """`privacy.*`: what a client does to its upload before it leaves."""

    clip_norm: NonNegativeFloat
    noise_multiplier: NonNegativeFloat

    @field_validator("noise_multiplier")
    @classmethod
    def _of_a_norm(cls, value: float, info: ValidationInfo) -> float:
        if value and not info.data.get("clip_norm"):
            raise ValueError("needs privacy.clip-norm above 0, of which it is a multiple")
        return value


class AuditConfig(_Section):
    """`audit.*`: of which clients and rounds the server writes down what it sees."""

    clients: Numbers
    rounds: Numbers

    def covers(self, client: int, server_round: int) -> bool:
        """Say whether what the server sees of a client in a round is written down."""
        chosen = ((self.clients, client), (self.rounds, server_round))
        return all(text == "all" or str(number) in text.split(",") for text, number in chosen)


class RunConfig(_Section):
    """All settings of a run; docs/configuration.md explains each."""

    method: str
    dataset: str
    data_root: str
    output: str
    resume: str
    seed: Seed
    num_clients: Positive
    num_rounds: Positive
    fraction_train: Annotated[float, Field(gt=0, le=1)]
    local_epochs: Positive
    batch_size: Positive
    learning_rate: Auto | PositiveFloat
    momentum: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: NonNegativeFloat
    target: str
    device: str
    threads: Auto | Positive
    checkpoint_every: Positive
    failure_budget: Share
    max_failed_rounds: Positive
    node_timeout: PositiveFloat
    round_timeout: PositiveFloat
    data: DataConfig
    hyperfl: HyperFLConfig
    fedrep: FedRepConfig
    pfedhn: PFedHNConfig
    privacy: PrivacyConfig
    audit: AuditConfig

    @field_validator("data_root", "output", "resume")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not Path(value).is_absolute():
            raise ValueError(f"must be an absolute path, since the app runs in a folder of its own; got {value!r}")
        return value

    @field_validator("device")
    @classmethod
    def _supported(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError(f"must be auto, cpu, cuda or cuda:NUMBER, others (mps) are not tested; got {value!r}")
        return value

    @field_validator("method", "target", "dataset")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        if info.field_name == "dataset" and value.startswith("npz:"):
            # A relative path is looked up in data-root, which each node's owner may set: only loading tells.
            if value in ("npz:", "npz:PATH"):
                raise ValueError(f"must name a file after npz:, absolute or in data-root; got {value!r}")
            return value
        known = {"target": TARGETS, "dataset": DATASETS, "method": (info.context or {}).get("methods", ())}[
            str(info.field_name)
        ]
        if known and value not in known:
            raise ValueError(f"must be one of {', '.join(known)}; got {value!r}{nearest(value, known)}")
        return value

    @classmethod
    def from_flat(cls, flat: Mapping[str, Scalar], *, methods: Collection[str] = ()) -> "RunConfig":
        """Validate a flat dict of all settings.

        Args:
            flat: Every setting, by dotted key.
            methods: Names that `method` may have; none leaves it unchecked.

        Raises:
            ConfigError: Naming every key that is missing, unknown (with the nearest known one) or has a wrong value.
        """
        nested: dict[str, Any] = {}
        for key, value in sorted(flat.items(), key=lambda item: "." in item[0]):
            section, _, name = key.partition(".")
            table = nested.setdefault(section, {}) if name else nested
            # `seed.x` beside `seed`: kept as it is, so that it is reported as unknown.
            (table if isinstance(table, dict) else nested)[(name or section) if isinstance(table, dict) else key] = (
                value
            )
        try:
            return cls.model_validate(nested, context={"methods": methods})
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    def data_settings(self) -> DataSettings:
        """Return what decides which samples each client holds."""
        return DataSettings(
            dataset=self.dataset,
            data_root=self.data_root,
            num_clients=self.num_clients,
            partition=self.data.partition,
            seed=self.data.seed,
            train_samples=self.data.train_samples,
            test_samples=self.data.test_samples,
            iid_fraction=self.data.iid_fraction,
            dirichlet_alpha=self.data.dirichlet_alpha,
            shards_per_client=self.data.shards_per_client,
            augmentation=self.data.augmentation,
            validation_fraction=self.data.validation_fraction,
        )

    def flat(self) -> dict[str, Scalar]:
        """Return all settings as Flower's flat dict."""
        flat: dict[str, Scalar] = {}
        for key, value in self.model_dump(by_alias=True).items():
            if isinstance(value, dict):
                flat |= {f"{key}.{name}": part for name, part in value.items()}
            else:
                flat[key] = value
        return flat


def app_file(name: str) -> Path:
    """Return `pyproject.toml` or `LICENSE` of this installation: beside the packages, or inside an installed wheel.

    Raises:
        InstallationError: If the file is in neither place.
    """
    for path in (ROOT / "hyperfl_flwr" / name, ROOT / name):
        if path.is_file():
            return path
    raise InstallationError(f"{name} is missing from the installation under {ROOT}; install hyperfl-flwr again")


def default_settings() -> dict[str, Scalar]:
    """Return the default settings as a flat dict, read from pyproject.toml."""
    document = tomllib.loads(app_file("pyproject.toml").read_text())
    return flatten(document["tool"]["flwr"]["app"]["config"])


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Turn nested tables into dotted keys."""
    flat: dict[str, Scalar] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _explain(error: ValidationError) -> str:
    known = list(default_settings())
    problems: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for detail in error.errors():
        # A union (auto | number) reports each of its branches with a location of its own below the key.
        path = [str(part) for part in detail["loc"]]
        key = next((".".join(path[:end]) for end in (2, 1) if ".".join(path[:end]) in known), ".".join(path))
        problems.setdefault(key, []).append(_problem(detail, key, known))
        if detail["type"] not in ("missing", "value_error", "extra_forbidden"):
            given[key] = f"; got {detail['input']!r}"
    lines = [f"{key} {' or '.join(parts)}{given.get(key, '')}".strip() for key, parts in problems.items()]
    if len(lines) == 1:
        return lines[0]
    return "\n".join([f"{len(lines)} settings are wrong:", *(f"  - {line}" for line in lines)])


def _problem(detail: ErrorDetails, key: str, known: Sequence[str]) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "extra_forbidden":
        return f"is unknown{nearest(key, known) or '; `hyperfl settings` lists all'}"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    return detail["msg"].replace("Input should be", "must be")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known name that is closest, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
