"""Keep what was measured in small files, from which `make results` writes the tables of the pages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from hyperfl_flwr.core.packages.versions import versions
from hyperfl_flwr.runs import manifest

RECORDS = Path(__file__).with_name("records")
"""Folder of the records that the pages show."""

SHOWN = ("torch", "flwr", "ray")
"""Packages whose versions are named below a table."""


class Record(BaseModel):
    """What a section has measured, and the circumstances.

    Attributes:
        command: Command that repeats the measurement.
        commit: The commit, with `-dirty` if files differed from it; empty outside a checkout.
        hardware: Processor, cores, memory and so on by name.
        versions: Versions of Python and of the packages by name.
        measured: The numbers, as JSON has them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str
    commit: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    measured: Any

    def source(self) -> str:
        """Return a line that says where the numbers come from."""
        commit, _, changed = self.commit.partition("-")
        shown = [f"{name} {self.versions[name]}" for name in SHOWN if name in self.versions]
        return (
            f"`{self.command}`; commit {commit[:7] or 'unknown'}{' with changes' if changed else ''}; "
            f"{self.hardware['processor']}, {self.hardware['cores']} cores; {', '.join(shown)}."
        )


def new_record(command: str, commit: str, measured: object) -> Record:
    """Return a record of numbers that this machine has measured."""
    return Record(command=command, commit=commit, hardware=manifest.hardware(), versions=versions(), measured=measured)


def record_file(name: str) -> Path:
    """Return the file of a section's record."""
    return RECORDS / f"{name}.json"


def write_record(name: str, record: Record) -> Path:
    """Write a section's record and return its file."""
    file = record_file(name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(record.model_dump_json(indent=1) + "\n")
    return file


def read_record(name: str) -> Record:
    """Read a section's record.

    Raises:
        FileNotFoundError: If the section has none.
        pydantic.ValidationError: If the file is damaged.
    """
    return Record.model_validate_json(record_file(name).read_text())
