"""Show the progress of a run on standard error: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import re

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hyperfl_flwr.core.tasks import CLASSIFICATION, Task
from hyperfl_flwr.launch.console import err
from hyperfl_flwr.launch.core_locks import WAITING
from hyperfl_flwr.launch.follow import RunCallbacks

SHOWN = ("is left out", "novel client", "warning:")
"""Parts of the server's log lines that are always shown, even with `--quiet`."""

PROGRESS = (
    "the phase ", "privacy: ", "target-accuracy: ", "training ends after ", "round 1 took ", "data would agree with ",
)  # fmt: skip
"""Parts of lines that are shown without `--quiet`."""

_NODE = re.compile(
    r"\bnode \d+ (takes (no )?part|runs|is missing|is away|is back|joins|is refused)|\bwaiting (for|up to) "
)
_ROUND = re.compile(r"\bround \d+/\d+")
_LEVEL = re.compile(r"^(INFO|WARNING) *: *")


class ShownProgress:
    """Show a run's progress on standard error while the `with` block lasts; yields the observer of the run.

    Args:
        title: Label of the progress bar.
        verbose: Show the whole log.
        quiet: Show only warnings.
        rounds: Print a line for each round, for an operator's log.
        noted: The notes of earlier runs, for several runs in turn; what they have in common is shown once.
    """

    def __init__(
        self,
        title: str,
        *,
        verbose: bool = False,
        quiet: bool = False,
        rounds: bool = False,
        noted: set[str] | None = None,
    ) -> None:
        self._verbose, self._quiet, self._rounds = verbose, quiet, rounds
        self._noted: set[str] = set() if noted is None else noted
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[score]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=err,
            disable=quiet or err.is_jupyter,  # where rich needs ipywidgets for a bar
        )  # fmt: skip
        self._row = self._bar.add_task(title, total=None, score="starting")
        self._task = CLASSIFICATION

    def __enter__(self) -> RunCallbacks:
        self._bar.start()
        return RunCallbacks(on_task=self._on_task, on_round=self._on_round, on_log=self._on_log, on_note=self._on_note)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _on_task(self, task: Task) -> None:
        self._task = task

    def _on_round(self, finished: int, total: int, score: float | None) -> None:
        text = "starting" if score is None else f"personalized {self._task.score_title} {self._task.text(score, 1)}"
        self._bar.update(self._row, completed=finished, total=total, score=text)

    def _on_log(self, lines: str) -> None:
        for line in lines.splitlines():
            is_progress = (
                any(word in line for word in PROGRESS) or _NODE.search(line) or (self._rounds and _ROUND.search(line))
            )
            if self._verbose or (is_progress and not self._quiet) or any(word in line for word in SHOWN):
                self._bar.console.print(line if self._verbose else _LEVEL.sub("", line), markup=False)

    def _on_note(self, note: str) -> None:
        if not self._quiet and (note == WAITING or note not in self._noted):  # each run may have to wait
            self._bar.console.print(note, markup=False)
        self._noted.add(note)
