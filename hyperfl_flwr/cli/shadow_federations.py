"""Train the federations of a game in parallel processes: `hyperfl membership` and `hyperfl property`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.console import err, parse_setting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hyperfl_flwr.audit.membership.shadow_runs import Arrays, Data, ShadowGame

POLL_SECONDS = 1.0
"""Seconds between two looks at how many federations are complete, with several processes."""

RunDirectory = Annotated[
    Path | None, typer.Argument(help="Folder of a run whose settings are taken; it is not changed.")
]
Method = Annotated[str | None, typer.Option(help="Training method; default: hyperfl.")]
DatasetName = Annotated[str | None, typer.Option(help="Data set, as for `hyperfl run`; default: digits.")]
DataRoot = Annotated[Path | None, typer.Option(help="Folder of the data sets; default: your cache folder.")]
Jobs = Annotated[int | None, typer.Option(help="Number of parallel runs; default: one per core.", min=1)]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Override a setting with KEY=VALUE; repeatable.")]


def game_settings(
    run_directory: Path | None, method: str | None, dataset: str | None, data_root: Path | None, set_: list[str] | None
) -> dict[str, Scalar]:
    """Return the settings of a run or of the options, with changes.

    Raises:
        ConfigError: If an option is given that the run's folder determines.
    """
    from hyperfl_flwr.config.table import with_defaults
    from hyperfl_flwr.data.sample_format import from_here
    from hyperfl_flwr.models.provenance import find_sources
    from hyperfl_flwr.runs.run_data import require_dataset
    from hyperfl_flwr.runs.run_directory import settings_of
    from hyperfl_flwr.runs.run_sources import find_sources_of

    changes: dict[str, Scalar] = dict(parse_setting(text) for text in set_ or ())
    if data_root is not None:
        changes["data-root"] = str(data_root.absolute())
    given = {key: value for key, value in {"method": method, "dataset": dataset}.items() if value is not None}
    if run_directory is None:
        if "dataset" in given:
            given["dataset"] = from_here(given["dataset"], has_data_root="data-root" in changes)
        find_sources({**given, **changes})
        return with_defaults({**given, **changes})
    if given:
        names = ", ".join(f"--{name}" for name in given)
        raise ConfigError(f"{names} cannot be given with a run's folder, which determines it; leave one of them out")
    require_dataset(run_directory)
    settings = {**settings_of(run_directory), **changes}
    find_sources_of(run_directory, settings)
    return settings


def play_all(game: ShadowGame[Data], folder: Path, jobs: int | None) -> Sequence[Arrays]:
    """Train the missing federations in parallel processes, with a progress bar; return what attackers hold of all."""
    from hyperfl_flwr.audit.membership.shadow_runs import missing_federations, open_game, play
    from hyperfl_flwr.core.device import resolve_device
    from hyperfl_flwr.launch.sizing import Machine, suitable_jobs

    game.load()  # refuses what does not suit the game, before its folder is made
    open_game(game, folder)
    missing = missing_federations(game, folder)
    machine = Machine.detect(resolve_device(game.config.device))
    number = jobs or suitable_jobs(machine, max(1, len(missing)))
    columns = TextColumn("federations"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("", total=game.federations, completed=game.federations - len(missing))

        def on_progress() -> None:
            bar.update(task, completed=game.federations - len(missing_federations(game, folder)))

        _train(game, folder, [share for job in range(number) if (share := missing[job::number])], on_progress)
    return play(game, folder)


def _train(
    game: ShadowGame[Data], folder: Path, shares: Sequence[Sequence[int]], on_progress: Callable[[], None]
) -> None:
    """Train each share of the federations in a process of its own; a single one in this process."""
    from hyperfl_flwr.launch.subprocess_call import call_in_subprocess

    if len(shares) == 1:
        train_share(game, folder, shares[0], on_progress)
        return
    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        waiting = {pool.submit(call_in_subprocess, f"{__name__}:train_share", game, folder, share) for share in shares}
        while waiting:
            done, waiting = wait(waiting, POLL_SECONDS)
            on_progress()
            for future in done:
                future.result()


def train_share(
    game: ShadowGame[Data], folder: Path, numbers: Sequence[int], on_played: Callable[[], None] = lambda: None
) -> None:
    """Train some federations of a game in this process, when there is a core for it."""
    from hyperfl_flwr.audit.membership.shadow_runs import play_some
    from hyperfl_flwr.launch.core_locks import WAITING, CoreSlots

    with CoreSlots() as slots:
        threads = 1 if game.config.threads == "auto" else game.config.threads
        slots.acquire(threads, lambda: err.print(WAITING))
        play_some(game, folder, numbers, on_played)
