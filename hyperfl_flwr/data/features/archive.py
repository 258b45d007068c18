"""Write the feature vectors of a natural federation to an `npz:` data set, with a report of what they are."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperfl_flwr.core.errors import DataError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.files.storage import Pieces, write_npz
from hyperfl_flwr.core.packages.versions import versions
from hyperfl_flwr.data.features.images import CROPPED, RESIZED, locate
from hyperfl_flwr.data.features.listing import Listing
from hyperfl_flwr.data.features.parts import Computation, compute, read_parts
from hyperfl_flwr.data.features.places import hold_parts, remove_parts, report_of

PACKAGES = ("numpy", "pillow", "torch", "torchvision")
"""Packages that decide the bits of features."""

LISTED = 1000
"""Largest number of missing or broken images that a report lists."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written.

    Attributes:
        path: The `.npz` file.
        report: The report beside it.
        facts: The report's content.
        notes: What its user should know, as sentences.
    """

    path: Path
    report: Path
    facts: Mapping[str, Any]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What to do about images and users.

    Attributes:
        fail_on_missing: Whether missing and broken images are an error.
        min_images: Users with fewer usable training images are left out.
    """

    fail_on_missing: bool = False
    min_images: int = 1


def write_features(
    listing: Listing,
    folder: Path,
    output: Path,
    computation: Computation,
    rules: Rules,
    on_images: Callable[[int], None] = lambda count: None,
) -> Written:
    """Compute the features of listed images, and write them with labels and users to an `.npz` file.

    Finished parts are kept in the folder `OUTPUT.parts` until all of it is done. It stays if images are missing or
    broken: a later call then computes only the parts with changed files.

    Args:
        listing: The images.
        folder: Folder of their files.
        output: File to write, which must not exist: `features`, `labels`, `clients` if there are users, and `test_` of
            each if there are test images. `OUTPUT.json` is the report.
        computation: How features are computed.
        rules: What to do about missing images and small users.
        on_images: Receives the numbers of images that are done.

    Raises:
        DataError: If no image of a part of the data can be read, one is missing or broken and must not be, or one
            cannot be read for a reason that may pass.
        RunDirectoryError: If the output exists, `OUTPUT.json` is no report, or `OUTPUT.parts` is another user's or
            belongs to a call with other inputs.
        FolderInUseError: If another process writes the same output.
    """
    images = listing.images
    files, repeated = ([folder / image for image in images], 0) if listing.has_paths else locate(folder, images)
    missing = [position for position, file in enumerate(files) if file is None]
    if missing and rules.fail_on_missing:
        raise DataError(_refusal(folder, "missing", [images[position] for position in missing], len(images)))
    inputs = {**computation.inputs, "images": hashlib.sha256(json.dumps(images).encode()).hexdigest()}
    report = report_of(output)
    with hold_parts(output) as parts:
        compute(files, parts, replace(computation, inputs=inputs), on_images)
        usable, broken, width = _summary(files, parts)
        if broken and rules.fail_on_missing:
            raise DataError(_refusal(folder, "broken", [images[position] for position in broken], len(images)))
        kept, left_out = _without_small(listing, usable, rules.min_images)
        _check(listing, kept, left_out, rules, next(iter(broken.values()), ""))
        facts = _facts(listing, kept, inputs) | {
            "users_left_out": len(left_out),
            "images_with_several_files": repeated,
            "missing": {"count": len(missing), "images": [images[position] for position in missing[:LISTED]]},
            "broken": {
                "count": len(broken),
                "images": [images[position] for position in list(broken)[:LISTED]],
                "reasons": list(broken.values())[:LISTED],
            },
        }
        write_atomically(report, json.dumps(facts, indent=2).encode(), mode=0o600)
        write_npz(output, _arrays(listing, kept, width, files, parts), mode=0o600)
        if not missing and not broken:
            remove_parts(parts)
    return Written(path=output, report=report, facts=facts, notes=_notes(listing, facts, parts, report))


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content.

    Raises:
        DataError: If it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; check the path") from None


def _summary(files: Sequence[Path | None], parts: Path) -> tuple[Flags, dict[int, str], int]:
    """Return which images have features [n], why others are broken, by ascending position, and the features' number."""
    usable, width = np.zeros(len(files), dtype=bool), 0
    broken: dict[int, str] = {}
    for part in read_parts(files, parts):
        usable[part.positions] = True
        broken |= dict(part.broken)
        width = max(width, part.features.shape[1])
    return usable, broken, width


def _refusal(folder: Path, kind: str, images: Sequence[str], count: int) -> str:
    return (
        f"{folder}: {len(images)} of {count} images are {kind}, the first is {images[0]}; add or replace them, "
        f"or leave out --fail-on-missing"
    )


def _without_small(listing: Listing, usable: Flags, fewest: int) -> tuple[Flags, list[str]]:
    """Return which images are kept, and the users that are left out since they have too few, or none.

    Where test images have users, each user needs one, as `npz:` data sets do.
    """
    places = (listing.train, usable[: len(listing.train)]), (listing.test, usable[len(listing.train) :])
    found = [(np.array(part.clients), flags) for part, flags in places if part is not None and part.clients is not None]
    if not found:
        return usable, []
    counts = [Counter(users[flags].tolist()) for users, flags in found]
    small = sorted(
        user
        for user in {user for users, _ in found for user in users.tolist()}
        if counts[0][user] < max(fewest, 1) or not all(count[user] for count in counts)
    )
    without = [flags & ~np.isin(users, small) if small else flags for users, flags in found]
    return np.concatenate([*without, usable[sum(map(len, without)) :]]), small


def _check(listing: Listing, kept: Flags, left_out: Sequence[str], rules: Rules, reason: str) -> None:
    for name, part in (("training", kept[: len(listing.train)]), ("test", kept[len(listing.train) :])):
        if len(part) and not part.any():
            few = f" or belong to users with fewer than {rules.min_images}" if left_out else ""
            first = f" (the first that is broken: {reason})" if reason else ""
            raise DataError(
                f"none of the {len(part)} {name} images can be used: they are missing or broken{few}{first}; check "
                f"--images"
            )


def _arrays(
    listing: Listing, kept: Flags, width: int, files: Sequence[Path | None], parts: Path
) -> dict[str, npt.NDArray[Any] | Pieces]:
    """Return the arrays of the file; features are read from the parts while they are written."""
    arrays: dict[str, npt.NDArray[Any] | Pieces] = {}
    start = 0
    for prefix, part in (("", listing.train), ("test_", listing.test)):
        if part is None:
            continue
        wanted = np.zeros_like(kept)
        wanted[start : start + len(part)] = kept[start : start + len(part)]
        chosen = np.flatnonzero(wanted) - start
        pieces = _pieces(wanted, files, parts)
        arrays[f"{prefix}features"] = Pieces((len(chosen), width), np.float32, pieces)
        arrays[f"{prefix}labels"] = part.labels[chosen]
        if part.clients is not None:
            arrays[f"{prefix}clients"] = np.array(part.clients)[chosen]
        start += len(part)
    return arrays


def _pieces(wanted: Flags, files: Sequence[Path | None], parts: Path) -> Iterator[npt.NDArray[np.float32]]:
    for part in read_parts(files, parts):
        yield part.features[wanted[part.positions]]


def _facts(listing: Listing, kept: Flags, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a report says of the inputs and of the written data."""
    train = kept[: len(listing.train)]
    facts: dict[str, Any] = {
        "inputs": inputs,
        "training_images": int(train.sum()),
        "test_images": int(kept[len(listing.train) :].sum()),
        "classes": listing.classes or int(max(part.labels.max() for part in (listing.train, listing.test) if part) + 1),
        "rows_without_user": listing.unused,
        "images_in_both": listing.in_both,
    }
    if listing.train.clients is not None:
        sizes = Counter(np.array(listing.train.clients)[train].tolist()).values()
        facts |= {"users": len(sizes), "smallest_user_images": min(sizes)}
    return facts


def _notes(listing: Listing, facts: Mapping[str, Any], parts: Path, report: Path) -> list[str]:
    total = len(listing.images)
    notes = [
        f"{facts[name]['count']} of {total} images are {name} and left out, the first is {facts[name]['images'][0]}"
        for name in ("missing", "broken")
        if facts[name]["count"]
    ]
    if notes:
        notes.append(
            f"{report} lists them; to add them, put the files in place, delete the output and repeat the command, "
            f"which takes what is unchanged from {parts}; delete that folder if you do not need it"
        )
    if count := facts["users_left_out"]:
        notes.append(f"{count} users have too few usable images and are left out")
    if count := facts["images_with_several_files"]:
        notes.append(f"{count} images have several files of their name; the first in alphabetical order is used")
    if count := facts["images_in_both"]:
        notes.append(f"{count} images are in the training data and in the test data")
    if facts["rows_without_user"]:
        notes.append(f"{facts['rows_without_user']} rows without a user (NA) are left out")
    return notes


def inputs_of(files: Mapping[str, Path], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides features apart from images: hashes of files, options, preparation and versions.

    Args:
        files: CSV files by their option.
        options: Other inputs by name.
    """
    return {
        **{name: {"name": file.name, "sha256": sha256_of(file)} for name, file in files.items()},
        **options,
        "preparation": f"shorter side {RESIZED} (bilinear), centre {CROPPED}x{CROPPED}",
        "versions": versions(PACKAGES),
    }
