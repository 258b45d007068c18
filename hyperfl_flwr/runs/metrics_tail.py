"""Follow a run's metrics.jsonl while it is being written."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperfl_flwr.runs.run_directory import Record


class NewRecords:
    """Reader that returns each record once.

    Args:
        directory: The run's folder; it need not exist yet.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / "metrics.jsonl"
        self._identity, self._position = 0, 0

    def read(self) -> "tuple[list[Record], bool]":
        """Return the new records, and True if the file was replaced (a resumed run), so that they start again."""
        if not self._file.is_file():
            return [], False
        with self._file.open("rb") as file:
            identity = os.fstat(file.fileno()).st_ino
            is_new_file = identity != self._identity  # a resumed run first replaces the file
            if is_new_file:
                self._identity, self._position = identity, 0
            file.seek(self._position)
            added, newline, _ = file.read().rpartition(b"\n")  # the last line may be incomplete: read it next time
        self._position += len(added) + len(newline)
        return [json.loads(line) for line in added.splitlines()], is_new_file
