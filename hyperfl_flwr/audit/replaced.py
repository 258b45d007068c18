"""Settings that an audit replaces in the round that it attacks, whatever their values were."""

from collections.abc import Mapping

from hyperfl_flwr.core.setting_types import Scalar

REPLACED = frozenset(
    {
        "audit.clients",
        "audit.rounds",
        "data.augmentation",
        "data.global-test",
        "data.partition",
        "data.test-samples",
        "data.train-samples",
        "data.validation-fraction",
        "early-stopping",
        "fraction-train",
        "keep",
        "num-clients",
        "num-rounds",
        "output",
        "resume",
    }
)
"""Settings that an audit from fresh parameters replaces, beside those of `SECTIONS`."""

SECTIONS = ("robust", "adversary")
"""Sections of settings that an audit replaces by their defaults: what an honest client uploads does not depend on
them."""


def without_replaced(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings that an audit keeps."""
    return {
        key: value for key, value in settings.items() if key not in REPLACED and key.partition(".")[0] not in SECTIONS
    }
