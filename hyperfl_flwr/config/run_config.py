"""The run's settings: typed, validated once, the only reader of string keys.

Default values live in pyproject.toml under `[tool.flwr.app.config]` and nowhere else. Flower hands an app one flat dict
(`"data.partition": "similarity"`), in which it checks the keys but not the types; `RunConfig.from_flat` checks all of
it and reports every problem at once.
"""

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from hyperfl_flwr.config.sections import (
    AuditConfig,
    Auto,
    DataConfig,
    Device,
    FedProxConfig,
    FedRepConfig,
    HyperFLConfig,
    ITPFLConfig,
    NonNegativeFloat,
    NovelConfig,
    PersonalizeConfig,
    PFedHNConfig,
    Positive,
    PositiveFloat,
    PrivacyConfig,
    PrivHFLConfig,
    Section,
    Seed,
    Share,
    absolute,
)
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.toml_files import app_file, flatten
from hyperfl_flwr.data.federated_data import DataSettings
from hyperfl_flwr.data.registry import DATASETS
from hyperfl_flwr.data.sample_format import (
    FOLDER_PREFIX,
    NPZ_PREFIX,
    Reading,
    is_own,
    own_path,
    parse_classes,
    parse_normalisation,
    parse_shape,
)
from hyperfl_flwr.models.custom.source import is_factory
from hyperfl_flwr.models.targets import TARGETS

RESUMABLE_CHANGES = frozenset(
    {
        "checkpoint-every",
        "data-root",
        "device",
        "exclusion-rounds",
        "failure-budget",
        "ledger",
        "max-failed-rounds",
        "max-update-ratio",
        "min-nodes",
        "node-timeout",
        "novel.a-distance-learning-rate",
        "novel.a-distance-rounds",
        "novel.corruptions",
        "novel.delta",
        "novel.epsilons",
        "novel.samples",
        "num-rounds",
        "output",
        "resume",
        "round-timeout",
        "threads",
    }
)
"""Settings that a resumed run may change; `num-rounds` may only grow. All others decide what is trained."""

TRAINING_AUTOS = frozenset(
    {
        "learning-rate",
        "hyperfl.embedding-learning-rate",
        "pfedhn.embedding-dim",
        "pfedhn.server-learning-rate",
        "pfedhn.embedding-learning-rate",
        "pfedhn.embedding-weight-decay",
        "pfedhn.embedding-std",
        "priv-hfl.sigma",
        "priv-hfl.dual-step",
    }
)
"""Settings with an `auto` that becomes a number of the method; it decides what is trained."""


class RunConfig(Section):
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
    device: Device
    threads: Auto | Positive
    checkpoint_every: Positive
    failure_budget: Share
    max_failed_rounds: Positive
    max_update_ratio: NonNegativeFloat
    exclusion_rounds: Annotated[int, Field(ge=0)]
    min_nodes: Auto | Positive
    node_timeout: PositiveFloat
    round_timeout: PositiveFloat
    ledger: bool
    data: DataConfig
    hyperfl: HyperFLConfig
    fedrep: FedRepConfig
    fedprox: FedProxConfig
    pfedhn: PFedHNConfig
    it_pfl: ITPFLConfig
    priv_hfl: PrivHFLConfig
    novel: NovelConfig
    personalize: PersonalizeConfig
    privacy: PrivacyConfig
    audit: AuditConfig

    @field_validator("data_root", "output", "resume")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return absolute(value)

    @field_validator("method", "target", "dataset")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        if info.field_name == "dataset" and is_own(value):
            # A relative path is looked up in data-root, which each node's owner may set: only loading tells.
            if str(own_path(value)) in (".", "PATH"):
                what = f"must name a file after {NPZ_PREFIX} or a folder after {FOLDER_PREFIX}"
                raise ValueError(f"{what}, absolute or in data-root; got {value!r}")
            return value
        if info.field_name == "target" and ":" in value:
            if not is_factory(value):
                raise ValueError(f"must name a function as package.module:factory, or be a built-in one; got {value!r}")
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
            text = explain(error, list(default_settings()), "; `hyperfl settings` lists all")
            raise ConfigError(text, public=text) from None

    @property
    def hosted_clients(self) -> int:
        """Number of clients that nodes host: N that are trained, with ids from 0, and after them the novel ones."""
        return self.num_clients + self.novel.clients

    def data_settings(self) -> DataSettings:
        """Return what decides which samples each client holds."""
        return DataSettings(
            dataset=self.dataset,
            data_root=self.data_root,
            num_clients=self.hosted_clients,
            novel_clients=self.novel.clients,
            partition=self.data.partition,
            seed=self.data.seed,
            train_samples=self.data.train_samples,
            test_samples=self.data.test_samples,
            iid_fraction=self.data.iid_fraction,
            dirichlet_alpha=self.data.dirichlet_alpha,
            shards_per_client=self.data.shards_per_client,
            augmentation=self.data.augmentation,
            validation_fraction=self.data.validation_fraction,
            reading=Reading(
                input_shape=parse_shape(self.data.input_shape),
                classes=parse_classes(self.data.classes),
                normalisation=parse_normalisation(self.data.normalisation),
                seed=self.data.seed,
            ),
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


def default_settings() -> dict[str, Scalar]:
    """Return the default settings as a flat dict, read from pyproject.toml."""
    document = tomllib.loads(app_file("pyproject.toml").read_text())
    return flatten(document["tool"]["flwr"]["app"]["config"])


def explain(error: ValidationError, known: Sequence[str], hint: str = "") -> str:
    """Return the text of an error message for settings that pydantic has refused; names each wrong key once.

    Args:
        error: Pydantic's error.
        known: All keys, with dots between a section and its key.
        hint: Follows an unknown key that resembles none of these; empty for a list of them.
    """
    hint = hint or f"; known are {', '.join(known)}"
    problems: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for detail in error.errors():
        # A union (auto | number) reports each of its branches with a location of its own below the key.
        path = [str(part) for part in detail["loc"]]
        key = next((".".join(path[:end]) for end in (2, 1) if ".".join(path[:end]) in known), ".".join(path))
        problems.setdefault(key, []).append(_problem(detail, key, known, hint))
        if detail["type"] not in ("missing", "value_error", "extra_forbidden"):
            given[key] = f"; got {detail['input']!r}"
    lines = [f"{key} {' or '.join(parts)}{given.get(key, '')}".strip() for key, parts in problems.items()]
    if len(lines) == 1:
        return lines[0]
    return "\n".join([f"{len(lines)} settings are wrong:", *(f"  - {line}" for line in lines)])


def _problem(detail: ErrorDetails, key: str, known: Sequence[str], hint: str) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "extra_forbidden":
        return f"is unknown{nearest(key, known) or hint}"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    return detail["msg"].replace("Input should be", "must be")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known name that is closest, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
