"""The table of all settings: their keys, defaults and meanings, also of a method of the user's own.

Where a function takes a method, only one of the user's own (`package.module:METHOD`) adds settings; those of the
built-in methods are always in the table.
"""

from collections.abc import Mapping, Sequence

from hyperfl_flwr.config.adversary import AdversaryConfig
from hyperfl_flwr.config.data import DataConfig
from hyperfl_flwr.config.general import FederationConfig, LocalTrainingConfig, MachineConfig
from hyperfl_flwr.config.nodes import NodesConfig
from hyperfl_flwr.config.pretrained import LpmConfig
from hyperfl_flwr.config.privacy import PrivacyConfig, RecordPrivacyConfig
from hyperfl_flwr.config.robust import RobustConfig
from hyperfl_flwr.config.sections import AuditConfig, NovelConfig, PersonalizeConfig
from hyperfl_flwr.config.secure_sums import SecureSumConfig
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.settings import Section, Setting, declared
from hyperfl_flwr.methods import METHODS, method_sections

GENERAL: Sequence[type[Section]] = (FederationConfig, LocalTrainingConfig, MachineConfig, NodesConfig)
"""Sections of the settings without a dot in their keys."""

DOTTED: Sequence[type[Section]] = (
    DataConfig,
    LpmConfig,
    NovelConfig,
    PersonalizeConfig,
    RecordPrivacyConfig,
    PrivacyConfig,
    SecureSumConfig,
    AdversaryConfig,
    RobustConfig,
    AuditConfig,
)
"""Sections of dotted settings that do not belong to a method."""


def topics(method: str = "") -> Sequence[type[Section]]:
    """Return all sections of settings, in the order of the documentation.

    Raises:
        ConfigError: If the method is of the user's own and cannot be imported, or its declaration is wrong.
    """
    return [*GENERAL, *DOTTED, *method_sections(method)]


_BUILT_IN: Mapping[str, Setting] = {setting.key: setting for topic in topics() for setting in declared(topic)}


def all_settings(method: str = "") -> Mapping[str, Setting]:
    """Return all settings by key, in the order of `topics`; raises as it does."""
    if not is_user_code(method):
        return _BUILT_IN
    own = {setting.key: setting for section in METHODS[method].settings for setting in declared(section)}
    return {**_BUILT_IN, **own}


def default_settings(method: str = "") -> dict[str, Scalar]:
    """Return the default settings as a flat dict; raises as `topics` does."""
    return {key: setting.default for key, setting in all_settings(method).items()}


def with_defaults(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return settings with the defaults of all others, also of the method that they name; raises as `topics` does."""
    return default_settings(str(settings.get("method", ""))) | dict(settings)


def resumable_changes(method: str = "") -> frozenset[str]:
    """Return the settings that a resumed run may change; `num-rounds` may only grow. All others determine the training.

    Raises as `topics` does.
    """
    return frozenset(key for key, setting in all_settings(method).items() if setting.resumable)


RESULT_NEUTRAL = resumable_changes() - {"num-rounds", "early-stopping", "max-update-ratio", "exclusion-rounds"}
"""Settings that do not change the results of a run: of its machine, its nodes and its records; see `neutral_keys`.

`failure-budget`, `round-timeout` and others of nodes that fail are among them: they change no result of a run in which
no node is missing. `max-update-ratio` and `exclusion-rounds` decide which replies count, and are not.
"""


def neutral_keys(settings: Mapping[str, Scalar]) -> frozenset[str]:
    """Return the settings that do not change the results of a run with some settings, of which defaults may be missing.

    `num-nodes` changes them where nodes count as one (`robust.reduction`) or are malicious (`adversary.attack`).
    """
    given = {key: settings.get(key, _BUILT_IN[key].default) for key in ("robust.reduction", "adversary.attack")}
    is_neutral = given == {"robust.reduction": "mean", "adversary.attack": "none"}
    return RESULT_NEUTRAL if is_neutral else RESULT_NEUTRAL - {"num-nodes"}


def training_autos(method: str = "") -> frozenset[str]:
    """Return the settings of which `auto` is replaced by a number of the method; they determine the training.

    Raises as `topics` does.
    """
    of_methods = method_sections(method)
    return frozenset(
        setting.key
        for topic in topics(method)
        for setting in declared(topic)
        if setting.resolved_by_method or (setting.is_auto and topic in of_methods)
    )
