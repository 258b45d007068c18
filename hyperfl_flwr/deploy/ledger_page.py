"""Write the HTML page about a node's ledger: data sent by group, array and message, and groups that stayed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperfl_flwr.deploy.ledger_view import RunLedger, content_of, event_of, phase_of
from hyperfl_flwr.node.ledger import LedgerEntry
from hyperfl_flwr.pages.render import write_page


@dataclass(frozen=True, kw_only=True)
class Section:
    """Contents of the page for one run.

    Attributes:
        run: Ledger of the run.
        totals: Rows of group or record, bytes sent, bytes received.
        arrays: Rows of name, shape, type, bytes, and number of times sent; with received arrays if they are shown.
        messages: Rows of heading, time and size, and content by record.
    """

    run: RunLedger
    totals: list[tuple[str, str, str]]
    arrays: list[tuple[str, str, str, str, str]]
    messages: list[tuple[str, str, list[str]]]

    @classmethod
    def of(cls, run: RunLedger, *, received: bool) -> "Section":
        """Build the section of a run, with or without received messages."""
        return cls(
            run=run,
            totals=[(name, f"{left:,}", f"{came:,}") for name, (left, came) in run.totals().items()],
            arrays=[
                (
                    array.name,
                    "x".join(map(str, array.shape)) or "one number",
                    array.dtype,
                    f"{array.bytes:,}",
                    f"{direction} {times}" if received else str(times),
                )
                for (direction, _, array), times in run.arrays().items()
                if received or direction == "out"
            ],
            messages=[_message(entry) for entry in run.entries if received or entry.direction != "in"],
        )

    def passed(self, direction: str) -> list[int]:
        """Return the sizes in bytes of the messages of one direction, `in` or `out`."""
        return [entry.bytes for entry in self.run.entries if entry.direction == direction]


def write_ledger(file: Path, runs: Iterable[RunLedger], damaged: Sequence[int], *, received: bool) -> Path:
    """Write the page; like the ledger, only its owner can read it.

    Args:
        file: File to write.
        runs: Ledgers of the runs.
        damaged: Numbers of the ledger's lines that cannot be read.
        received: Whether to list received messages and arrays, too.

    Returns:
        The file.
    """
    sections = [Section.of(run, received=received) for run in runs]
    write_page(file, "ledger.html", mode=0o600, sections=sections, damaged=damaged, received=received)
    return file


def _message(entry: LedgerEntry) -> tuple[str, str, list[str]]:
    parts = [f"{record.name}: {content_of(record)}" for record in entry.records]
    error = [f"error: {entry.error}"] if entry.error else []
    finding = [entry.finding] if entry.finding else []
    heading = f"{event_of(entry)}: {entry.kind}, {phase_of(entry)}"
    return heading, f"{entry.time}, {entry.bytes:,} bytes", [*parts, *error, *finding]
