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


def ignored_text(changes: Mapping[str, Scalar], settings: Mapping[str, Scalar]) -> str:
    """Return which given settings an audit ignores, in a line; empty if there are none.

    Args:
        changes: What was given.
        settings: The settings of the attacked round.
    """
    own = changes.keys() - without_replaced(changes).keys()
    ignored = sorted(key for key in own if settings[key] != changes[key])
    return f"warning: the audit chooses {', '.join(ignored)} itself and ignores what was given" if ignored else ""
