"""Findings of the checks of a machine, a deployment or a node: level, text and remedy, as a line or as JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.console import Console
from rich.text import Text


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It works, but slower or less safely than it could."""
    ERROR = "error"
    """It will not work."""


STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check.

    Attributes:
        level: Severity.
        subject: Subject of the check, in a word or two.
        text: Observation.
        remedy: Action to take; required for a warning or an error.

    Raises:
        ValueError: If a warning or an error has no remedy.
    """

    level: Level
    subject: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level is not Level.OK and not self.remedy:
            raise ValueError(f"a finding of level {self.level} needs a remedy; {self.subject!r} has none")


def ok(subject: str, text: str) -> Finding:
    """Return a finding that something is in order."""
    return Finding(level=Level.OK, subject=subject, text=text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding that something works, but slower or less safely than it could."""
    return Finding(level=Level.WARNING, subject=subject, text=text, remedy=remedy)


def error(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding that something will not work."""
    return Finding(level=Level.ERROR, subject=subject, text=text, remedy=remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the exit code of a command with these findings: 1 if there is an error, else 0."""
    return int(any(finding.level is Level.ERROR for finding in findings))


def print_finding(console: Console, finding: Finding) -> None:
    """Print a finding as one line, without truncation or line breaks: `level  subject: text; remedy`."""
    line = Text(no_wrap=True, overflow="ignore")
    line.append(f"{finding.level.value:<8}", style=STYLES[finding.level])
    line.append(f"{finding.subject}: {_one_line(finding.text)}")
    if finding.remedy:
        line.append(f"; {_one_line(finding.remedy)}")
    console.print(line, soft_wrap=True)


def as_json(findings: Sequence[Finding]) -> str:
    """Return findings as a JSON list of objects with `level`, `subject`, `text` and `remedy`."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def _one_line(text: str) -> str:
    return " ".join(text.split())
