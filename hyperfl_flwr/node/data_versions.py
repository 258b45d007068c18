"""Versions of the data of a node: their SHA-256 in each run, in a file that only the owner can read."""

import contextlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.append_only import append, locked

FILE = "data.jsonl"


@dataclass(frozen=True, kw_only=True)
class Version:
    """Data of a node.

    Attributes:
        title: Name of the data, without a path.
        sha256: SHA-256 of samples and labels, see `hyperfl_flwr.data.digests.sample_digest`.
        train: Number of training samples.
        test: Number of test samples.
        form: Identity of the run's settings that decide how the data are read; other settings make other samples.
        since: Time of the first run with them, UTC, ISO 8601; empty for a version that is not recorded yet.
    """

    title: str
    sha256: str
    train: int
    test: int
    form: str = ""
    since: str = ""


def note(folder: Path, version: Version) -> Version | None:
    """Record a version if it is another than the last one that was read in the same way.

    Args:
        folder: The node's state folder.
        version: The data of this run.

    Returns:
        The last version of the same name that was read in the same way, if its content was another; otherwise None.

    Raises:
        StateError: If the file cannot be written.
    """
    file = folder / FILE
    try:
        with locked(file) as descriptor:
            alike = [each for each in versions_of(folder) if (each.title, each.form) == (version.title, version.form)]
            if alike and alike[-1].sha256 == version.sha256:
                return None
            since = datetime.now(UTC).isoformat(timespec="seconds")
            append(descriptor, (json.dumps(asdict(version) | {"since": since}) + "\n").encode())
    except OSError as error:
        raise StateError(f"{file} cannot be written: {error.strerror}; check the disk and its permissions") from error
    return alike[-1] if alike else None


def versions_of(folder: Path) -> list[Version]:
    """Return the versions of a node's data, the oldest first; a damaged line is left out."""
    file = folder / FILE
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(errors="replace").splitlines():
        with contextlib.suppress(TypeError, ValueError):
            found.append(Version(**json.loads(line)))
    return found


def changed_versions(folder: Path) -> list[Version]:
    """Return the versions of data that have changed between runs that read them in the same way, the oldest first."""
    found = versions_of(folder)
    numbers = Counter((each.title, each.form) for each in found)
    return [each for each in found if numbers[each.title, each.form] > 1]


def changed_text(before: Version, now: Version) -> str:
    """Describe a change of the data in one line."""
    return (
        f"the data {now.title} have changed since the run of {before.since}: {before.train} training and {before.test} "
        f"test samples with SHA-256 {before.sha256[:8]}... are now {now.train} and {now.test} with {now.sha256[:8]}..."
    )
