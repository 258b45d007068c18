"""Typed settings of a run, validated once; no other module reads settings by string keys.

Names, defaults and meanings are declared in sections, see `hyperfl_flwr.config.table`. Flower passes one flat dict to
an app (`"data.partition": "similarity"`) and checks its keys but not its types; `RunConfig.from_flat` checks everything
and reports all problems at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails

from hyperfl_flwr.config.adversary import AdversaryConfig
from hyperfl_flwr.config.data import DataConfig
from hyperfl_flwr.config.general import FederationConfig, LocalTrainingConfig, MachineConfig
from hyperfl_flwr.config.nodes import NodesConfig
from hyperfl_flwr.config.pretrained import LpmConfig
from hyperfl_flwr.config.privacy import PrivacyConfig, RecordPrivacyConfig
from hyperfl_flwr.config.refusals import explain
from hyperfl_flwr.config.robust import RobustConfig
from hyperfl_flwr.config.sections import AuditConfig, NovelConfig, PersonalizeConfig
from hyperfl_flwr.config.secure_sums import SecureSumConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.settings import Section
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.core.tasks import CLASSIFICATION, REGRESSION, TASKS
from hyperfl_flwr.data.sample_format import SampleFormat, parse_classes, parse_normalisation, parse_shape, parse_window
from hyperfl_flwr.data.sample_weights import Weighting
from hyperfl_flwr.methods import METHODS, method_sections
from hyperfl_flwr.models.names import TARGETS

if TYPE_CHECKING:
    from hyperfl_flwr.data.federated_data import DataSettings

S = TypeVar("S", bound=Section)


class RunConfig(FederationConfig, LocalTrainingConfig, MachineConfig, NodesConfig):
    """All settings of a run, see docs/reference/settings.md; `section` returns those of a method."""

    data: DataConfig
    lpm: LpmConfig
    novel: NovelConfig
    personalize: PersonalizeConfig
    dp: RecordPrivacyConfig
    privacy: PrivacyConfig
    secagg: SecureSumConfig
    adversary: AdversaryConfig
    robust: RobustConfig
    audit: AuditConfig

    @classmethod
    def from_flat(cls, flat: Mapping[str, Scalar]) -> "RunConfig":
        """Validate a flat dict of all settings.

        Args:
            flat: Every setting, by dotted key.

        Raises:
            ConfigError: Naming every key that is missing, unknown (with the nearest known one) or has a wrong value; or
                that a method of the user's own cannot be imported.
        """
        given = tuple((key, type(value), value) for key, value in flat.items())
        # All messages of a run have the same settings. A method of the user's own may be another one the next time.
        is_built_in = str(flat.get("method", "")) in METHODS.built_in
        is_cached = is_built_in and all(isinstance(value, bool | int | float | str) for value in flat.values())
        return _validate(cls, given) if is_cached else _validate.__wrapped__(cls, given)

    def section(self, kind: type[S]) -> S:
        """Return the settings of one section, for example of a method.

        Raises:
            TypeError: If the section of this key has another type.
        """
        found = getattr(self, kind.key.replace("-", "_"))
        if not isinstance(found, kind):
            raise TypeError(f"the section {kind.key} is of the type {type(found).__name__}, not {kind.__name__}")
        return found

    @model_validator(mode="after")
    def _known_targets(self) -> Self:
        names = METHODS[self.method].targets(self)
        if names:
            for name in names:
                if name not in TARGETS:
                    raise ValueError(
                        f"pfedhn.targets must list names among {', '.join(TARGETS)}, separated by commas; got "
                        f"{name!r}{nearest(name, TARGETS)}"
                    )
        return self

    @model_validator(mode="after")
    def _fits_task(self) -> Self:
        names = parse_classes(self.data.classes)
        if self.task == CLASSIFICATION.name and names is not None and len(names) < 2:
            raise ValueError(f"data.classes must be auto or two or more names; got {self.data.classes!r}")
        if self.task != REGRESSION.name and self.data.target_scale != "auto":
            raise ValueError(f"data.target-scale must be auto with task = {self.task}: it is for regression")
        if self.task == CLASSIFICATION.name:
            return self
        known = METHODS[self.method].tasks
        if self.task not in known:
            raise ValueError(f"task must be {' or '.join(known)} with method = {self.method}; got {self.task!r}")
        unfit = {
            "class-weights must be none": self.class_weights != "none",
            "cross-site must be false": self.cross_site,
            "novel.clients must be 0": self.novel.clients > 0,
            "adversary.attack must be none": self.adversary.attack != "none",
            "audit.rounds must be empty": bool(self.audit.rounds),
        }
        if found := [text for text, is_so in unfit.items() if is_so]:
            raise ValueError(f"{found[0]} with task = {self.task}: it is for classification")
        return self

    @model_validator(mode="after")
    def _validation_data(self) -> Self:
        asked = "early-stopping" if self.early_stopping else "keep = best" if self.keep == "best" else ""
        if asked and not self.data.validation_fraction:
            raise ValueError(
                f"data.validation-fraction must be above 0 with {asked}, which needs validation data; 0.2 holds back a "
                f"fifth of each client's training samples"
            )
        if self.data.global_test and self.data.validation_fraction and not asked:
            raise ValueError(
                "data.global-test must be false with data.validation-fraction above 0, since test data are then not "
                "used; leave out one of them"
            )
        if self.data.global_test and asked:
            raise ValueError(
                f"data.global-test must be false with {asked}: it is for models of the last round; leave out one"
            )
        return self

    @model_validator(mode="after")
    def _whole_models(self) -> Self:
        private = {
            "dp.epsilon above 0": self.dp.epsilon > 0,
            "privacy.unit = client": self.privacy.protects_clients,
            "privacy.noise-multiplier above 0": self.privacy.noise_multiplier > 0,
            "secagg.enabled": self.secagg.enabled,
            self.method: self.weight_epsilon > 0,
        }
        if self.cross_site and (reasons := [name for name, is_so in private.items() if is_so]):
            raise ValueError(
                f"cross-site must be false with {reasons[0]}: it takes the whole model of each client, without noise"
            )
        return self

    @model_validator(mode="after")
    def _equal_weights(self) -> Self:
        if self.dp.epsilon and self.class_weights != "none":
            raise ValueError(
                f"class-weights must be none with dp.epsilon above 0, whose batches have all samples with the same "
                f"probability; got {self.class_weights}"
            )
        return self

    @property
    def selects_rounds(self) -> bool:
        """Whether validation data decide about rounds; they are then evaluated beside the test data in each round."""
        return self.early_stopping > 0 or self.keep == "best"

    @property
    def targets(self) -> Sequence[str]:
        """Names of the clients' target networks: client i trains the one at position i modulo their number."""
        return METHODS[self.method].targets(self) or [self.target]

    def of_client(self, client: int) -> "RunConfig":
        """Return the settings as they hold for one client: `target` is the network that it trains."""
        return self.model_copy(update={"target": self.targets[client % len(self.targets)]})

    def trains_all(self, server_round: int) -> bool:
        """Return whether a round trains all clients that are present, and not only a share of them."""
        return self.fraction_train == 1 or (self.last_round == "all" and server_round == self.num_rounds)

    def num_evaluated(self, num_clients: int) -> int:
        """Return how many of the clients that are present evaluate the final global state."""
        return num_clients if self.evaluate == "all" else min(self.evaluate, num_clients)

    @property
    def weight_epsilon(self) -> float:
        """Epsilon of local differential privacy of each number of an upload; 0 if clients do not randomise them."""
        found = METHODS[self.method].weight_epsilon
        return found(self) if found else 0.0

    @property
    def hosted_clients(self) -> int:
        """Number of clients that nodes host: the N trained ones, with ids from 0, and after them the novel ones."""
        return self.num_clients + self.novel.clients

    @property
    def weighting(self) -> Weighting:
        """How training samples are weighted."""
        return Weighting(classes=self.class_weights, samples=self.sample_weights, allowed=not self.dp.epsilon)

    def data_settings(self) -> "DataSettings":
        """Return the settings that determine the samples of each client."""
        from hyperfl_flwr.data.federated_data import (
            DataSettings,  # deferred: imports torch, which listing settings does not need
        )

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
            keeps_test=self.selects_rounds,
            weighting=self.weighting,
            distinct=self.dp.epsilon > 0 or any(self.novel.budgets),
            sample_format=SampleFormat(
                input_shape=parse_shape(self.data.input_shape),
                classes=parse_classes(self.data.classes),
                normalisation=parse_normalisation(self.data.normalisation),
                window=parse_window(self.data.window),
                grouping=self.data.group_by,
                seed=self.data.seed,
                task=TASKS[self.task],
                target_scale=parse_normalisation(self.data.target_scale),
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
        return {key: flat[key] for key in default_settings(self.method)}


def randomises_weights(method: str) -> bool:
    """Return whether the clients of a method, by its name, randomise each number that they send."""
    return method in METHODS and METHODS[method].weight_epsilon is not None


def has_private_classifier(method: str) -> bool:
    """Return whether the clients of a method, by its name, train a classifier that `dp.heads` is about."""
    return method in METHODS and METHODS[method].private_classifier


@cache
def _with_methods(base: type[RunConfig], sections: Sequence[type[Section]]) -> type[RunConfig]:
    """Return the class extended by a field for each section of methods."""
    fields: dict[str, Any] = {kind.key.replace("-", "_"): (kind, ...) for kind in sections}
    if taken := [key.replace("_", "-") for key in fields if key in base.model_fields or hasattr(base, key)]:
        raise ConfigError(f"a method's settings must not have the key {taken[0]}, which is taken; choose another key")
    return create_model("RunConfig", __base__=base, __module__=__name__, **fields)


@lru_cache(maxsize=256)
def _validate(base: type[RunConfig], given: Sequence[tuple[str, type, Scalar]]) -> RunConfig:
    """Return the settings of `RunConfig.from_flat`, given as (key, type, value): 1, 1.0 and True are equal."""
    flat = {key: value for key, _, value in given}
    nested, method = _nested(flat), str(flat.get("method", ""))
    known = list(default_settings(method))
    problems = list(_missing(nested, known))
    try:
        config = _with_methods(base, tuple(method_sections(method))).model_validate(nested)
    except ValidationError as error:
        problems += error.errors()
    if problems:
        text = explain(problems, known, "; `hyperfl settings` lists all")
        raise ConfigError(text, public=text) from None
    return config


def _nested(flat: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return flat settings as nested tables, one for each section."""
    nested: dict[str, Any] = {}
    for key, value in sorted(flat.items(), key=lambda item: "." in item[0]):
        section, _, name = key.partition(".")
        table = nested.setdefault(section, {}) if name else nested
        # If both `seed` and `seed.x` are given, the dotted key is kept flat, so that it is reported as unknown.
        (table if isinstance(table, dict) else nested)[(name or section) if isinstance(table, dict) else key] = value
    return nested


def _missing(nested: Mapping[str, Any], known: Sequence[str]) -> Iterator[ErrorDetails]:
    """Yield a pydantic error for each missing setting: defaults are applied when a run is planned, not here."""
    for key in known:
        section, _, name = key.rpartition(".")
        table = nested.get(section, {}) if section else nested
        if isinstance(table, dict) and name not in table and (not section or section in nested):
            loc = (section, name) if section else (name,)
            yield {"type": "missing", "loc": loc, "msg": "Field required", "input": table}
