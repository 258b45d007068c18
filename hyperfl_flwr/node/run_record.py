"""A node's record of a run, from its first message on: its settings, and whether the owner lets models leave.

The server names a run by its identity, and sends the settings with each message. Without a record, it could train with
settings that bound what leaves the node less, or not at all, store the result as a client's private state, and then
name the same run with settings under which that state leaves: of another method, with noise that the state never had,
or with a cross-site matrix. Of a run's settings only those may change that a resumed run may change.
"""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import RefusalError, StateError
from hyperfl_flwr.core.files.append_only import append, locked
from hyperfl_flwr.core.files.atomic_files import unwritable
from hyperfl_flwr.core.setting_types import Scalar

FILE = "run.json"
"""Name of the record in the node's folder of the run: a line with a JSON object."""


def keep_record(
    folder: Path,
    settings: Mapping[str, Scalar],
    *,
    defaults: Mapping[str, Scalar],
    may_change: Collection[str],
    allows_matrix: bool,
) -> bool:
    """Record a run in its first message, and refuse later messages that do not fit the record.

    Args:
        folder: The node's folder of the run.
        settings: All settings of the message, as the server has sent them, with numbers instead of `auto` where these
            determine the training.
        defaults: The defaults of all settings, for those that the version of the first message did not have.
        may_change: Settings that may change during a run.
        allows_matrix: Whether the settings and the owner ask for and allow a cross-site matrix.

    Returns:
        Whether models may be sent for a cross-site matrix: that was allowed in the first message, and is now.

    Raises:
        RefusalError: If the settings differ from those of the first message, or a matrix was allowed then and is not
            now (the run could promise more privacy now), or the folder has files but no record.
        StateError: If the record cannot be read or written.
    """
    try:
        with locked(folder / FILE) as file:
            found = _read(file)
            if found is None:
                if any(entry.name != FILE for entry in folder.iterdir()):
                    raise RefusalError(
                        "the files of this run on this node are of an earlier version, which did not record the run's "
                        "settings; start a new run"
                    )
                record = {"settings": dict(settings), "matrix": allows_matrix}
                append(file, json.dumps(record, sort_keys=True).encode() + b"\n")
                return allows_matrix
    except OSError as error:
        problem = unwritable(folder, error, 10_000)
        raise StateError(f"the record of this run is not kept, so the node takes no part in it: {problem}") from error
    old = {**defaults, **found["settings"]}
    if changed := sorted(key for key in {*old, *settings}.difference(may_change) if old.get(key) != settings.get(key)):
        raise RefusalError(
            f"the settings {', '.join(changed)} are not those of this run's first message to this node; a run keeps "
            f"its settings, so start a new one"
        )
    if found["matrix"] and not allows_matrix:
        raise RefusalError(
            "this run began with cross-site = true, which must stay, at the server and at the node's owner; begin a "
            "new run without it"
        )
    return bool(found["matrix"])


def _read(file: int) -> dict[str, Any] | None:
    """Return the record; None if there is none, or only a part that a crash has left."""
    for line in os.pread(file, os.fstat(file).st_size, 0).split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None
