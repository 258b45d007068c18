"""Say in a sentence what an attack on an upload has found, for the command line and the pages of an audit."""

from collections.abc import Mapping
from typing import Any

from hyperfl_flwr.attacks.scoring import CLEAR_MARGIN, MARGIN


def verdicts(document: Mapping[str, Any]) -> dict[str, str]:
    """Return what each attack of an audit has found, in a sentence by its name; see `sentence`."""
    return {name: sentence(document, name) for name in document["attacks"]}


def sentence(document: Mapping[str, Any], name: str) -> str:
    """Return the verdict on one attack as a sentence."""
    found, where = document["attacks"][name], document["threat"]
    if "verdict" not in found:
        share, silent = found["labels_found"], found.get("nothing_to_read", ())
        if share is None and silent:
            reasons = "; ".join(dict.fromkeys(each["reason"] for each in silent))
            return f"After {where}, {name} had nothing to read and has tested nothing: {reasons}."
        labels = "" if share is None else f" found {100 * share:.0f} % of the labels"
        return f"After {where}, {name}{labels or ' looked for no images'}.{_silent(found)}{_histogram(found)}"
    ours, mean = found["psnr"]["median"], found["control"]["mean_image"]["psnr"]["median"]
    control = max(found["control"]["unrelated"]["psnr"]["median"], mean)
    numbers = (
        f"median PSNR {ours:.1f} dB, where the better control, which knows nothing of the client, has {control:.1f}"
    )
    if found["verdict"] == "recovered nothing":
        numbers += f" dB; {_ahead(found)}. A failed attack is no proof of safety."
        return (
            f"After {where}, {name} recovered nothing: {numbers}{_untested(found)}{_silent(found)}{_histogram(found)}"
        )
    which = "the private images" if found["verdict"] == "recovered" else "some of the private images"
    count = f"{found['images_recovered']} of {len(found['psnr']['per_image'])} clearly"
    if crossed := (found["control"]["next_client"] or {}).get("images_recovered"):
        count += f", and {crossed} if each client's results are compared with another's images"
    return (
        f"After {where}, {name} recovered {which} ({count}): {numbers} dB.{_by_labels(found)}{_silent(found)}"
        f"{_histogram(found)}"
    )


def _ahead(found: Mapping[str, Any]) -> str:
    """Return how many images are clearly ahead of their control, where that does not make a verdict."""
    if not (ahead := found.get("images_recovered", 0)):
        return f"no image is {CLEAR_MARGIN:g} dB ahead of its control"
    chance = found["control"]["unrelated"]["images_ahead"]
    return (
        f"{ahead} of {len(found['psnr']['per_image'])} images are {CLEAR_MARGIN:g} dB ahead of their control, and for "
        f"{chance} an unrelated image is as far ahead of the attack: that is chance"
    )


def _by_labels(found: Mapping[str, Any]) -> str:
    """Return that labels alone explain the median score of an attack; empty if they do not, or it is no verdict's."""
    of_classes = found["control"]["class_means"]["psnr"]["median"]
    if found["verdict"] != "recovered" or found["psnr"]["median"] > of_classes + MARGIN:
        return ""
    return f" The mean images of the classes have {of_classes:.1f} dB: in the median, labels alone are as good."


def _untested(found: Mapping[str, Any]) -> str:
    """Return that there was nothing to read in uploads whose gradient is lost in rounding; empty if there is none."""
    known = [readout["rounding"] for readout in found["findings"] if "rounding" in readout]
    lost = sum(rounding > 1 for rounding in known)
    if not lost:
        return ""
    which = "the only upload" if len(known) == 1 else f"{lost} of {len(known)} uploads"
    return (
        f" In {which} the gradient is below the rounding to float32 (rounding above 1 in audit.json), so that the "
        f"attack had nothing to read there and has tested nothing."
    )


def _silent(found: Mapping[str, Any]) -> str:
    """Return of which clients there was nothing to read; empty if there are none."""
    silent = found.get("nothing_to_read", ())
    if not silent:
        return ""
    reasons = "; ".join(f"client {each['client']}: {each['reason']}" for each in silent)
    images = ", and its images were compared with the mean image" if "verdict" in found else ""
    return f" Where there was nothing to read, the attack has tested nothing{images} ({reasons})."


def _histogram(found: Mapping[str, Any]) -> str:
    mean = found.get("label_counts", {}).get("correlation", {}).get("mean")
    if mean is None:
        return ""
    return f" Its estimate of each class's number of samples has a rank correlation of {mean:.2f} with the truth."
