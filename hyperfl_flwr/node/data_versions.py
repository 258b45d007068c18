"""Versions of the data of a node: their SHA-256 in each run, in a file that only the owner can read."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from hyperfl_flwr.core.append_only import append, locked
from hyperfl_flwr.core.errors import StateError

FILE = "data.jsonl"


@dataclass(frozen=True, kw_only=True)
class Version:
    """Data of a node.

    Attributes:
        title: Name of the data, without a path.
        sha256: SHA-256 of samples and labels, see `hyperfl_flwr.data.digests.data_digest`.
        train: Number of training samples.
        test: Number of test samples.
        since: Time of the first run with them, UTC, ISO 8601; empty for a version that is not recorded yet.
    """

    title: str
    sha256: str
    train: int
    test: int
    since: str = ""


def note(folder: Path, version: Version) -> Version | None:
    """Record a version if it is another than the last one.

    Args:
        folder: The node's state folder.
        version: The data of this run.

    Returns:
        The last version, if it was of the same name and another content; otherwise None.

    Raises:
        StateError: If the file cannot be written or is damaged.
    """
    file = folder / FILE
    try:
        with locked(file) as descriptor:
            known = versions_of(folder)
            if known and (known[-1].title, known[-1].sha256) == (version.title, version.sha256):
                return None
            since = datetime.now(UTC).isoformat(timespec="seconds")
            append(descriptor, (json.dumps(asdict(version) | {"since": since}) + "\n").encode())
    except OSError as error:
        raise StateError(f"{file} cannot be written: {error.strerror}; check the disk and its permissions") from error
    return known[-1] if known and known[-1].title == version.title else None


def versions_of(folder: Path) -> list[Version]:
    """Return the versions of a node's data, the oldest first.

    Raises:
        StateError: If the file is damaged.
    """
    file = folder / FILE
    if not file.is_file():
        return []
    found = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            found.append(Version(**json.loads(line)))
        except (TypeError, ValueError):
            raise StateError(f"line {number} of {file} is damaged; delete it, or the file") from None
    return found


def changed_text(before: Version, now: Version) -> str:
    """Describe a change of the data in one line."""
    return (
        f"the data {now.title} have changed since the run of {before.since}: {before.train} training and {before.test} "
        f"test samples with SHA-256 {before.sha256[:8]}... are now {now.train} and {now.test} with {now.sha256[:8]}..."
    )
