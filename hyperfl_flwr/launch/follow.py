"""Follow a run to its end, and report its rounds, log lines and notes to an observer."""

import contextlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hyperfl_flwr.core.errors import DIVERGES_AGAIN, RunFailedError, StateError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import Task, task_of
from hyperfl_flwr.launch.console import parse_value
from hyperfl_flwr.launch.flower.client import RunStatus
from hyperfl_flwr.launch.plans import Plan
from hyperfl_flwr.runs.metrics_tail import NewRecords

POLL_SECONDS = 0.5

ENGINE_FAILED = "An error was encountered. Ending simulation."
"""All that Flower states about a run whose engine failed, for example because Ray did not start."""

FIRST_ERROR = re.compile(r"An exception occurr?ed ?!! (.+)")
"""Line of the log in which Flower's simulation engine states an error."""


class SuperLink(Protocol):
    """Interface of a SuperLink or process on which a run can be followed."""

    def status(self, run_id: int) -> RunStatus:
        """Return the status of a run."""

    def new_notes(self) -> Iterable[str]:
        """Return new notes for the user since the last call."""

    def read_log(self, run_id: int, position: int = 0) -> tuple[str, int]:
        """Return the run's output after `position`, and the position for the next call."""

    def log_tail(self, run_id: int, lines: int = 20) -> str:
        """Return the last lines of the run's output."""


@dataclass(frozen=True, kw_only=True)
class RunCallbacks:
    """Callbacks for the events of a run; all are called from the caller's own thread.

    Attributes:
        on_task: Called with what the run predicts, before the first round.
        on_round: Called with the last finished round, the number of rounds, and that round's mean personalized
            accuracy, or main score of another task, or None.
        on_log: Called with new lines of Flower's and the server's log.
        on_note: Called with one line for the user.
    """

    on_task: Callable[[Task], None] = lambda _: None
    on_round: Callable[[int, int, float | None], None] = lambda *_: None
    on_log: Callable[[str], None] = lambda _: None
    on_note: Callable[[str], None] = lambda _: None


Display = Callable[[str], AbstractContextManager[RunCallbacks]]
"""Shows a run with a title for as long as its `with` block lasts."""


@dataclass(frozen=True, kw_only=True)
class ReadyRun:
    """A run that can start.

    Attributes:
        plan: Its settings.
        launch: Starts it, waits for its end and returns its folder.
    """

    plan: Plan
    launch: Callable[[RunCallbacks], Path]


Platform = Callable[[Mapping[str, Scalar]], AbstractContextManager[ReadyRun]]
"""Where runs train: checks changes of settings and gives a run with them that can start within the `with` block."""


def watch(
    superlink: SuperLink, run_id: int, observer: RunCallbacks, on_poll: Callable[[], None] = lambda: None
) -> None:
    """Report a run's log lines and new notes of its SuperLink to an observer until the run has ended.

    Args:
        superlink: SuperLink or process that executes the run.
        run_id: Flower's id of the run.
        observer: Receives log lines and notes.
        on_poll: Called every `POLL_SECONDS`.

    Raises:
        RunFailedError: If the run failed.
    """
    position, log = 0, ""
    while True:
        status = superlink.status(run_id)  # before the log, so that the last lines of an ended run are read
        lines, position = superlink.read_log(run_id, position)
        if lines:
            observer.on_log(lines)
            log += lines
        for note in superlink.new_notes():
            observer.on_note(note)
        on_poll()
        if status.finished:
            break
        time.sleep(POLL_SECONDS)
    if not status.completed:
        raise RunFailedError(_reason(status, log) or superlink.log_tail(run_id))


def _reason(status: RunStatus, log: str) -> str:
    """Return why a run failed: what Flower states, or, where that says nothing, the first error in the run's log."""
    problem = re.sub(r"^(Simulation|ServerApp) failed with exception: ", "", status.details) or status.status
    if problem != ENGINE_FAILED:
        return problem
    first = FIRST_ERROR.search(log)
    if first is None:
        last = [line for line in log.splitlines() if line.strip()][-20:]
        return "\n".join(["Flower's simulation engine failed; the last lines of its log:", *last])
    remedy = "--verbose shows its log, --engine in-process needs no Ray"
    return f"Flower's simulation engine failed: {first[1].strip()}; {remedy}"


def follow(superlink: SuperLink, run_id: int, planned: Plan, observer: RunCallbacks) -> Path:
    """Report a training run's progress to an observer until the run has ended.

    Args:
        superlink: SuperLink or process that executes the run.
        run_id: Flower's id of the run.
        planned: Plan of the run.
        observer: Receives rounds, log lines and notes.

    Returns:
        The run's folder.

    Raises:
        RunFailedError: If the run failed, or left no summary although Flower reports it as completed.
    """
    directory = planned.directory
    task = task_of(planned.settings)
    observer.on_task(task)
    rounds = _Rounds(directory, task)
    reported = -1

    def on_poll() -> None:
        nonlocal reported
        rounds.read_new()
        if rounds.last != reported:
            reported = rounds.last
            observer.on_round(reported, planned.num_rounds, rounds.score)

    watch(superlink, run_id, observer, on_poll)
    if not (directory / "summary.json").is_file():
        raise RunFailedError(f"Flower reports the run as completed, but there is no summary.json in {directory}")
    return directory


def _continues(directory: Path) -> str:
    """Say where a run goes on that is resumed."""
    last = max((file.stem for file in (directory / "checkpoints").glob("round-*.npz")), default=None)
    if last is not None:
        return f"a resumed run goes on after round {int(last.removeprefix('round-'))}, that of its last checkpoint"
    return "there is no checkpoint yet (checkpoint-every): a resumed run begins again at round 1"


def _has_diverged(directory: Path) -> bool:
    from hyperfl_flwr.runs.failures import has_diverged  # deferred: imports Flower, which following a run does not need
    from hyperfl_flwr.runs.run_directory import read_manifest

    try:
        return has_diverged(read_manifest(directory))
    except StateError:  # the message of the failure matters more
        return False


def _changes(planned: Plan) -> str:
    """Return the options for the settings of a resumed run that its manifest does not have, as it was not rewritten."""
    from hyperfl_flwr.config.table import default_settings  # deferred: takes a fraction of a second

    try:
        manifest = json.loads((planned.directory / "manifest.json").read_text())
    except (OSError, ValueError):  # the message of the failure matters more
        return ""
    before = {**default_settings(), **manifest["settings"]}
    # A resumed run takes the numbers that replaced `auto`.
    chosen = {key: value for key, value in manifest.get("resolved", {}).items() if before.get(key) == "auto"}
    changed = {
        key: value
        for key, value in planned.settings.items()
        if key in before and value not in (before[key], chosen.get(key)) and key not in ("resume", "output")
    }
    return " ".join(shlex.join(_option(key, value)) for key, value in changed.items())


def _option(key: str, value: Scalar) -> list[str]:
    """Return the words that give `hyperfl run` a setting."""
    if key in ("num-rounds", "data-root") and value:
        return [f"--{key}", str(value)]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return ["--set", f"{key}={text if parse_value(text) == value else json.dumps(value)}"]


@contextlib.contextmanager
def with_resume_hint(planned: Plan, observer: RunCallbacks, words: str = "") -> Iterator[None]:
    """Add the command that resumes the run to a failure, and show it when the user interrupts.

    It has the settings of a resumed run that ended before they were in the manifest. A run that has diverged would do
    so again, which is what its failure says instead.

    Args:
        planned: Plan of the run.
        observer: Receives the command as a note when the user interrupts.
        words: Further options of the command.

    Raises:
        RunFailedError: If the run failed, with the command.
    """
    directory = planned.directory
    plain = f"resume with: hyperfl run --resume {shlex.quote(str(directory))}"  # the same words as in the server's log
    try:
        yield
    except KeyboardInterrupt:
        if (directory / "manifest.json").is_file():
            observer.on_note(_continues(directory))
            observer.on_note(" ".join(filter(None, [plain, words, _changes(planned)])))
        raise
    except RunFailedError as error:
        hint = " ".join(filter(None, [plain, words, _changes(planned)]))
        problem = str(error).replace(hint, "").replace(plain, "").replace(DIVERGES_AGAIN, "").rstrip()
        parts = [problem]
        if (directory / "manifest.json").is_file():
            parts += [DIVERGES_AGAIN] if _has_diverged(directory) else [_continues(directory), hint]
        raise RunFailedError("\n".join(parts)) from None


@contextlib.contextmanager
def updated_every_round(
    observer: RunCallbacks, update: Callable[[], None], finish: Callable[[], None]
) -> Iterator[RunCallbacks]:
    """Call a function whenever rounds have finished, and another one at the end of the run.

    Args:
        observer: Observer that still receives everything.
        update: Function that is called before the observer hears of a round.
        finish: Function that is called at the end, also of a run that fails.

    Yields:
        The observer to follow the run with.
    """

    def on_round(finished: int, total: int, score: float | None) -> None:
        update()
        observer.on_round(finished, total, score)

    try:
        yield replace(observer, on_round=on_round)
    finally:
        finish()


class _Rounds:
    """Progress of a run, read from its metrics.

    Attributes:
        last: Last finished round.
        score: Mean personalized score of that round; None if there is none.
    """

    def __init__(self, directory: Path, task: Task) -> None:
        self._records, self._task = NewRecords(directory), task
        self.last = 0
        self.score: float | None = None

    def read_new(self) -> None:
        """Read the lines that were added since the last call."""
        for record in self._records.read()[0]:
            if record["kind"] == "train":
                self.last, self.score = record["round"], record.get(f"personalized_{self._task.score}")
