"""Tell whether runs have the same clients with the same test data: only then can their scores be paired."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyperfl_flwr.core.setting_types import Scalar

NOT_DIVIDING = frozenset({"data.seed", "data.augmentation", "data.normalisation"})
"""Settings `data.*` that change neither the clients of a seed of the data nor their test samples."""

NOT_KNOWN = "not recorded"
"""Value of what a manifest of an earlier version lacks; it is equal to all."""

Division = Mapping[str, object]
"""What determines the clients and their test data, by the name of the setting or of the manifest's entry."""


def division_of(settings: Mapping[str, Scalar], manifest: Mapping[str, Any]) -> Division:
    """Return what determines the clients of a run and their test data, for a given seed of the data.

    Args:
        settings: The run's settings, with numbers in place of `auto`.
        manifest: Its manifest, of which the entry `data` has the SHA-256 of custom data.
    """
    chosen = {key: value for key, value in settings.items() if key.startswith("data.") and key not in NOT_DIVIDING}
    if settings["early-stopping"] or settings["keep"] == "best":
        # Validation data that decide about rounds do not replace the test data.
        chosen["data.validation-fraction"] = 0.0
    # The samples of the trained clients depend on how many novel ones get some, too.
    named = {key: settings[key] for key in ("dataset", "num-clients", "novel.clients")}
    return {**named, **chosen, "the data's description in manifest.json": manifest.get("data", NOT_KNOWN)}


def namespace(settings: Mapping[str, Scalar]) -> Scalar:
    """Return what tells a run's clients from those with equal numbers in other runs.

    It is the seed of the data's division, unless the data name the clients, which are then the same for each seed.

    Args:
        settings: The run's settings.
    """
    is_named = settings["data.partition"] == "natural" and not settings["novel.clients"]
    return "" if is_named else settings["data.seed"]


def differing(divisions: Sequence[Division]) -> dict[str, list[object]]:
    """Return what differs between divisions, with the value of each; nothing if the clients are the same."""
    names = dict.fromkeys(name for division in divisions for name in division)
    found = {name: [division.get(name) for division in divisions] for name in names}
    return {
        name: values
        for name, values in found.items()
        if any(value != other for value in values for other in values if NOT_KNOWN not in (value, other))
    }


def numbers_text(counts: Mapping[str, object]) -> str:
    """Return that means of some runs are over different numbers of their clients; empty if they are not.

    Args:
        counts: Number of clients that a run's mean is over, by the run's name.
    """
    if len(set(counts.values())) == 1:
        return ""
    shown = ", ".join(f"{name} {count}" for name, count in counts.items())
    return (
        f"Personalized means are over different numbers of clients: {shown}. A client that has failed, was away or was "
        f"not drawn is in no mean. Differences are of the clients that both have."
    )
