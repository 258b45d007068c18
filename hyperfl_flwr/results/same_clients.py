"""Tell whether runs have the same clients with the same test data: only then can their scores be paired."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyperfl_flwr.core.setting_types import Scalar

NOT_DIVIDING = frozenset({"data.seed", "data.augmentation", "data.normalisation"})
"""Settings `data.*` that change neither the clients of a seed of the data nor their test samples."""

OWN = "own"
"""Value of the manifest's `partitioned_by` in a run of nodes with data of their own."""

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
    return {**named, **chosen, "the data's description in manifest.json": _description(manifest)}


def _description(manifest: Mapping[str, Any]) -> object:
    """Return the data's description without what is empty: an earlier version may not have had the key."""
    if "data" not in manifest:
        return NOT_KNOWN
    return {key: value for key, value in manifest["data"].items() if value != ""}


def namespace(settings: Mapping[str, Scalar], manifest: Mapping[str, Any]) -> Scalar:
    """Return what tells a run's clients from those with equal numbers in other runs.

    It is the seed of the data's division, unless the data name the clients or nodes have data of their own: these are
    the same for each seed.

    Args:
        settings: The run's settings.
        manifest: Its manifest, of which `partitioned_by` says how the data were divided; those of earlier versions lack
            it, and the setting counts.
    """
    divided_by = manifest.get("partitioned_by", settings["data.partition"])
    return "" if divided_by in ("natural", OWN) and not settings["novel.clients"] else settings["data.seed"]


def have_own_data(manifest: Mapping[str, Any]) -> bool:
    """Return whether the nodes of a run have data of their own, of which the server knows no more than the format."""
    return bool(manifest.get("partitioned_by") == OWN)


def have_as_many_samples(one: Sequence[int | None] | None, other: Sequence[int | None] | None) -> bool:
    """Return whether clients with equal numbers can be the same: as many test samples, of those that are known.

    Args:
        one: Number of test samples of each client; None for clients or runs of which it is not known.
        other: Those of another run.
    """
    pairs = zip(one or (), other or (), strict=False)
    return all(first == second for first, second in pairs if first is not None and second is not None)


def differing(divisions: Sequence[Division]) -> dict[str, list[object]]:
    """Return what differs between divisions, with the value of each; nothing if the clients are the same."""
    names = dict.fromkeys(name for division in divisions for name in division)
    found = {name: [division.get(name) for division in divisions] for name in names}
    return {
        name: values
        for name, values in found.items()
        if any(value != other for value in values for other in values if NOT_KNOWN not in (value, other))
    }


def numbers_text(counts: Mapping[str, tuple[int, int]]) -> str:
    """Return over how many of their clients the means of some runs are; empty if each is over all of its run's.

    Args:
        counts: Number of clients that a run's mean is over, and of all its clients, by the run's name.
    """
    if all(number == of for number, of in counts.values()):
        return ""
    shown = ", ".join(f"{name} {number} of {of}" for name, (number, of) in counts.items())
    return (
        f"Personalized means are not over all clients: {shown}. A client that has failed, was away, was not drawn or "
        f"belongs to a malicious node is in no mean, and these need not be the same in all runs. Differences are of "
        f"the clients that both have."
    )
