"""The run's settings: typed, validated once, the only reader of string keys.

Names, defaults and meanings are those of the sections: `hyperfl_flwr.config.general`, `hyperfl_flwr.config.sections`
and the methods' own. Flower hands an app one flat dict (`"data.partition": "similarity"`), in which it checks the keys
but not the types; `RunConfig.from_flat` checks all of it and reports every problem at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails

from hyperfl_flwr.config.general import FederationConfig, LocalTrainingConfig, MachineConfig, NodesConfig
from hyperfl_flwr.config.sections import AuditConfig, DataConfig, NovelConfig, PersonalizeConfig, PrivacyConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.settings import Section, Setting, declared
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.data.sample_format import Reading, parse_classes, parse_normalisation, parse_shape
from hyperfl_flwr.methods import method_sections

if TYPE_CHECKING:
    from hyperfl_flwr.data.federated_data import DataSettings

S = TypeVar("S", bound=Section)

GENERAL: Sequence[type[Section]] = (FederationConfig, LocalTrainingConfig, MachineConfig, NodesConfig)
"""Topics of the settings without a dot."""

DOTTED: Sequence[type[Section]] = (DataConfig, NovelConfig, PersonalizeConfig, PrivacyConfig, AuditConfig)
"""Sections that belong to no method."""


def topics() -> Sequence[type[Section]]:
    """Return all groups of settings, in the order in which people read them."""
    return [*GENERAL, *DOTTED, *method_sections()]


def all_settings() -> Mapping[str, Setting]:
    """Return all settings by key, in the same order."""
    return {each.key: each for topic in topics() for each in declared(topic)}


def default_settings() -> dict[str, Scalar]:
    """Return the default settings as a flat dict."""
    return {key: each.default for key, each in all_settings().items()}


RESUMABLE_CHANGES = frozenset(key for key, each in all_settings().items() if each.resumable)
"""Settings that a resumed run may change; `num-rounds` may only grow. All others decide what is trained."""

TRAINING_AUTOS = frozenset(
    each.key
    for topic in topics()
    for each in declared(topic)
    if each.of_method or (each.is_auto and topic in method_sections())
)
"""Settings with an `auto` that becomes a number of the method; it decides what is trained."""


class RunConfig(FederationConfig, LocalTrainingConfig, MachineConfig, NodesConfig):
    """All settings of a run; docs/reference/settings.md explains each. Those of the methods are got by `section`."""

    data: DataConfig
    novel: NovelConfig
    personalize: PersonalizeConfig
    privacy: PrivacyConfig
    audit: AuditConfig

    @classmethod
    def from_flat(cls, flat: Mapping[str, Scalar]) -> "RunConfig":
        """Validate a flat dict of all settings.

        Args:
            flat: Every setting, by dotted key.

        Raises:
            ConfigError: Naming every key that is missing, unknown (with the nearest known one) or has a wrong value.
        """
        nested = _nested(flat)
        problems = list(_missing(nested))
        try:
            config = _with_methods(cls).model_validate(nested)
        except ValidationError as error:
            problems += error.errors()
        if problems:
            text = explain(problems, list(default_settings()), "; `hyperfl settings` lists all")
            raise ConfigError(text, public=text) from None
        return config

    def section(self, kind: type[S]) -> S:
        """Return the settings of a section, for example of a method."""
        found = getattr(self, kind.key.replace("-", "_"))
        if not isinstance(found, kind):
            raise TypeError(f"the section {kind.key} is of the type {type(found).__name__}, not {kind.__name__}")
        return found

    @property
    def hosted_clients(self) -> int:
        """Number of clients that nodes host: N that are trained, with ids from 0, and after them the novel ones."""
        return self.num_clients + self.novel.clients

    def data_settings(self) -> "DataSettings":
        """Return what decides which samples each client holds."""
        from hyperfl_flwr.data.federated_data import DataSettings  # with torch, which lists of settings do without

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
        return {key: flat[key] for key in default_settings()}


@cache
def _with_methods(base: type[RunConfig]) -> type[RunConfig]:
    """Return the class with a field for the section of each method."""
    fields: dict[str, Any] = {kind.key.replace("-", "_"): (kind, ...) for kind in method_sections()}
    return create_model("RunConfig", __base__=base, __module__=__name__, **fields)


def _nested(flat: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return settings with those of each section in a table of its own."""
    nested: dict[str, Any] = {}
    for key, value in sorted(flat.items(), key=lambda item: "." in item[0]):
        section, _, name = key.partition(".")
        table = nested.setdefault(section, {}) if name else nested
        # `seed.x` beside `seed`: kept as it is, so that it is reported as unknown.
        (table if isinstance(table, dict) else nested)[(name or section) if isinstance(table, dict) else key] = value
    return nested


def _missing(nested: Mapping[str, Any]) -> Iterator[ErrorDetails]:
    """Yield pydantic's error for each setting that is not given: a default takes effect where a run is planned only."""
    for key in default_settings():
        section, _, name = key.rpartition(".")
        table = nested.get(section, {}) if section else nested
        if isinstance(table, dict) and name not in table and (not section or section in nested):
            loc = (section, name) if section else (name,)
            yield {"type": "missing", "loc": loc, "msg": "Field required", "input": table}


def explain(details: Sequence[ErrorDetails], known: Sequence[str], hint: str = "") -> str:
    """Return the text of an error message for settings that pydantic has refused; names each wrong key once.

    Args:
        details: Pydantic's errors.
        known: All keys, with dots between a section and its key.
        hint: Follows an unknown key that resembles none of these; empty for a list of them.
    """
    hint = hint or f"; known are {', '.join(known)}"
    problems: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for detail in details:
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
