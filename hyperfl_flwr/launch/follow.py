"""Follows a run that Flower executes, to its end."""

import contextlib
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.flower_client import RunStatus
from hyperfl_flwr.launch.plans import Plan
from hyperfl_flwr.runs.metrics_tail import NewRecords

POLL_SECONDS = 0.5


class Followed(Protocol):
    """The SuperLink on which a run can be followed."""

    def status(self, run_id: int) -> RunStatus:
        """Return how a run stands."""

    def news(self) -> Iterable[str]:
        """Return what is worth telling and was not told yet."""

    def read_log(self, run_id: int, position: int = 0) -> tuple[str, int]:
        """Return what the run printed after `position`, and the position to go on from."""

    def log_tail(self, run_id: int, lines: int = 20) -> str:
        """Return the last lines that the run printed."""


@dataclass(frozen=True, kw_only=True)
class Observer:
    """What a caller wants to hear of a run; each is called from the caller's own thread.

    Attributes:
        on_round: (last finished round, number of rounds, mean own accuracy of that round or None).
        on_log: New lines of Flower's and the server's log.
        on_note: One line for people.
    """

    on_round: Callable[[int, int, float | None], None] = lambda *_: None
    on_log: Callable[[str], None] = lambda _: None
    on_note: Callable[[str], None] = lambda _: None


Display = Callable[[str], AbstractContextManager[Observer]]
"""Shows a run with a title for as long as its `with` block lasts."""


@dataclass(frozen=True, kw_only=True)
class ReadyRun:
    """A run that can start.

    Attributes:
        plan: Its settings.
        launch: Starts it, waits for its end and returns its folder.
    """

    plan: Plan
    launch: Callable[[Observer], Path]


Platform = Callable[[Mapping[str, Scalar]], ReadyRun]
"""Where runs train: checks changes of settings and returns a run with them that can start."""


def watch(superlink: Followed, run_id: int, observer: Observer, look: Callable[[], None] = lambda: None) -> None:
    """Tell an observer what a run prints and what its SuperLink tells, until it has ended.

    Args:
        superlink: Where it runs.
        run_id: Flower's name for it.
        observer: Hears of log lines and notes.
        look: Is called now and then.

    Raises:
        RunFailedError: If the run failed.
    """
    position = 0
    while True:
        status = superlink.status(run_id)
        lines, position = superlink.read_log(run_id, position)
        if lines:
            observer.on_log(lines)
        for note in superlink.news():
            observer.on_note(note)
        look()
        if status.finished:
            break
        time.sleep(POLL_SECONDS)
    if not status.completed:
        problem = status.details.removeprefix("Simulation failed with exception: ") or status.status
        raise RunFailedError(problem if problem else superlink.log_tail(run_id))


def follow(superlink: Followed, run_id: int, planned: Plan, observer: Observer) -> Path:
    """Tell an observer of a training run until it has ended.

    Args:
        superlink: Where it runs.
        run_id: Flower's name for it.
        planned: Its settings.
        observer: Hears of rounds, log lines and what else the SuperLink tells.

    Returns:
        The run's folder.

    Raises:
        RunFailedError: If the run failed, whatever Flower calls it.
    """
    directory = planned.directory
    rounds = _Rounds(directory)
    told = -1

    def look() -> None:
        nonlocal told
        rounds.read_on()
        if rounds.last != told:
            told = rounds.last
            observer.on_round(told, planned.num_rounds, rounds.accuracy)

    watch(superlink, run_id, observer, look)
    if not (directory / "summary.json").is_file():
        raise RunFailedError(f"Flower calls the run completed, but it left no summary in {directory}")
    return directory


@contextlib.contextmanager
def explained(planned: Plan, observer: Observer, words: str = "") -> Iterator[None]:
    """Add the command that goes on with the run to whatever ends it early.

    Args:
        planned: The run's settings.
        observer: Is told if the user ends it.
        words: What the command needs besides.
    """
    directory = planned.directory
    plain = f"resume with: hyperfl run --resume {shlex.quote(str(directory))}"  # as the server says
    hint = f"{plain} {words}".rstrip()
    try:
        yield
    except KeyboardInterrupt:
        if (directory / "manifest.json").is_file():
            observer.on_note(hint)
        raise
    except RunFailedError as error:
        problem = str(error).replace(hint, "").replace(plain, "").rstrip()
        told = [problem, hint] if (directory / "manifest.json").is_file() else [problem]
        raise RunFailedError("\n".join(told)) from None


class _Rounds:
    """What a run's metrics tell of its progress.

    Attributes:
        last: The last finished round.
        accuracy: Its mean own accuracy.
    """

    def __init__(self, directory: Path) -> None:
        self._records = NewRecords(directory)
        self.last = 0
        self.accuracy: float | None = None

    def read_on(self) -> None:
        """Read what was added."""
        for record in self._records.read()[0]:
            if record["kind"] == "train":
                self.last, self.accuracy = record["round"], record.get("own_accuracy")
