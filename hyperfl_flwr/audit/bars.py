"""Show the progress of an audit on standard error: a bar for each attack."""

import contextlib
from collections.abc import Iterator

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hyperfl_flwr.attacks.optimiser_loop import Progress as OnProgress
from hyperfl_flwr.audit.audit import AttackResult
from hyperfl_flwr.launch.console import err


class Bars:
    """Progress bars, one for each attack; see `shown_bars`."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.tasks: dict[str, TaskID] = {}

    def progress(self, name: str) -> OnProgress:
        """Add a bar for an attack and return the callback that advances it."""
        task = self.bar.add_task(name, total=None)

        def on_progress(done: int, total: int) -> None:
            self.bar.update(task, completed=done, total=total)

        self.tasks[name] = task
        return on_progress

    def done(self, name: str, finding: AttackResult) -> None:
        """Fill the bar of an attack that has finished, also if it stopped early."""
        self.bar.update(self.tasks[name], completed=1, total=1)

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        err.print(text, markup=False, soft_wrap=True)


@contextlib.contextmanager
def shown_bars(*, quiet: bool = False) -> Iterator[Bars]:
    """Show bars while the `with` block lasts, or only notes if `quiet`."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, disable=quiet) as bar:
        yield Bars(bar)
