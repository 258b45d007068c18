"""Runs the app on a SuperLink of its own and follows it to the end."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.cores import CoreSlots
from experiments.flower import federation_config
from experiments.superlink import LocalSuperLink
from hyperfl_flwr import ROOT
from hyperfl_flwr.config import RunConfig, Scalar, app_file, default_settings
from hyperfl_flwr.data.client_data import load_federated_data
from hyperfl_flwr.device import resolve_device
from hyperfl_flwr.errors import RunFailedError
from hyperfl_flwr.manifest import COMMIT_VARIABLE
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.recording import read_manifest, refuse_used_directory
from hyperfl_flwr.resume import resume_round

POLL_SECONDS = 0.5

DEFAULT_NUM_NODES = 2
"""Flower's own default number of simulated nodes."""


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


def plan(changes: Mapping[str, Scalar]) -> RunConfig:
    """Check everything that can be checked before a run starts.

    Args:
        changes: Settings that differ from the defaults, or, where `resume` is one of them, from the resumed run's.

    Returns:
        The settings of the run, with an absolute output directory.

    Raises:
        HyperFLError: With all problems of the settings, or the first of data, device and directories.
    """
    resume = changes.get("resume")
    settings = default_settings()
    if isinstance(resume, str) and resume:
        settings |= {key: value for key, value in read_manifest(Path(resume))["settings"].items() if key in settings}
        settings["output"] = ""
    settings |= changes
    if not settings["output"] and not settings["resume"]:
        settings["output"] = str(default_output(settings))
    config = RunConfig.from_flat(settings, methods=METHODS)
    if config.resume:
        resume_round(config)
    else:
        refuse_used_directory(Path(config.output))
    resolve_device(config.device)
    load_federated_data(config.data_settings())
    return config


def default_output(settings: Mapping[str, Scalar]) -> Path:
    """Return a new folder name below `runs` in the working directory."""
    dataset = str(settings["dataset"]).rpartition("/")[2].removesuffix(".npz")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{settings['method']}-{dataset}-seed{settings['seed']}-{secrets.token_hex(2)}"
    return Path.cwd() / "runs" / name


def default_num_nodes(config: RunConfig) -> int:
    """Return the number of nodes of a run whose caller names none: that of the resumed run, or two."""
    nodes = read_manifest(Path(config.resume))["nodes"] if config.resume else []
    return len(nodes) or DEFAULT_NUM_NODES


def launch(config: RunConfig, num_nodes: int, observer: Observer) -> Path:
    """Run the app in Flower's simulation engine and wait for its end.

    Args:
        config: A planned run.
        num_nodes: Number of simulated nodes P.
        observer: Hears of the run.

    Returns:
        The run's folder.

    Raises:
        RunFailedError: If the run failed, whatever Flower's commands said.
    """
    directory = Path(config.resume or config.output)
    with contextlib.ExitStack() as stack:
        slots = stack.enter_context(CoreSlots())
        actors = slots.acquire(
            num_nodes, lambda: observer.on_note("all cores are taken by other runs; waiting for one")
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hyperfl-app-")))
        app = build_app(folder / "app")
        settings = folder / "settings.toml"
        settings.write_text("".join(f"{_toml_key(key)} = {_toml(value)}\n" for key, value in config.flat().items()))
        superlink = stack.enter_context(LocalSuperLink(environment={COMMIT_VARIABLE: commit()}))
        run_id = superlink.submit(app, settings, _federation(config, num_nodes, actors))
        with _explained(directory, observer):
            _follow(superlink, run_id, config, directory, observer)
    return directory


def _federation(config: RunConfig, num_nodes: int, actors: int) -> str:
    if resolve_device(config.device).type != "cuda":
        return federation_config(num_nodes, actors)
    gpus = torch.cuda.device_count()
    return federation_config(num_nodes, actors, gpus, min(1.0, gpus / actors))


def _follow(superlink: LocalSuperLink, run_id: int, config: RunConfig, directory: Path, observer: Observer) -> None:
    position, told, rounds = 0, -1, _Rounds(directory)
    while True:
        status = superlink.status(run_id)
        lines, position = superlink.read_log(run_id, position)
        if lines:
            observer.on_log(lines)
        rounds.read_on()
        if rounds.last != told:
            told = rounds.last
            observer.on_round(told, config.num_rounds, rounds.accuracy)
        if status.finished:
            break
        time.sleep(POLL_SECONDS)
    if not status.completed:
        problem = status.details.removeprefix("Simulation failed with exception: ") or status.status
        raise RunFailedError(problem if problem else superlink.log_tail(run_id))
    if not (directory / "summary.json").is_file():
        raise RunFailedError(f"Flower calls the run completed, but it left no summary in {directory}")


@contextlib.contextmanager
def _explained(directory: Path, observer: Observer) -> Iterator[None]:
    """Add the command that goes on with the run to whatever ends it early."""
    hint = f"resume with: hyperfl run --resume {directory}"
    try:
        yield
    except KeyboardInterrupt:
        if (directory / "manifest.json").is_file():
            observer.on_note(hint)
        raise
    except RunFailedError as error:
        if hint in str(error) or not (directory / "manifest.json").is_file():
            raise
        raise RunFailedError(f"{error}\n{hint}") from None


class _Rounds:
    """Reads a run's metrics while they are being written."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "metrics.jsonl"
        self._position = 0
        self.last = 0
        self.accuracy: float | None = None

    def read_on(self) -> None:
        """Read the lines that were added; `last` and `accuracy` are those of the newest round then."""
        if not self._file.is_file():
            return
        with self._file.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._position:  # a resumed run begins by dropping lines
                self._position = 0
            file.seek(self._position)
            added, _, _ = file.read().rpartition(b"\n")
        for line in added.splitlines():
            record = json.loads(line)
            if record["kind"] == "train":
                self.last, self.accuracy = record["round"], record.get("own_accuracy")
        self._position += len(added) + 1 if added else 0


def build_app(folder: Path) -> Path:
    """Copy the app (packages, pyproject.toml, LICENSE) from this installation to a folder that Flower can submit."""
    for package in ("hyperfl_flwr", "strategies", "clients"):
        shutil.copytree(
            ROOT / package,
            folder / package,
            ignore=lambda path, names: [n for n in names if _is_foreign(Path(path) / n)],
        )
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copyfile(app_file(name), folder / name)
    return folder


def _is_foreign(path: Path) -> bool:
    return path.name == "__pycache__" or (path.is_file() and path.suffix != ".py")


def commit() -> str:
    """Return the checkout's commit, with `-dirty` where files differ from it; empty outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.split()
        if Path(found[0]).resolve() != ROOT:
            return ""
        status = subprocess.run(
            ["git", "-C", str(ROOT), "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found[1] + ("-dirty" if status.strip() else "")


def _toml_key(key: str) -> str:
    return f'"{key}"' if "." in key else key


def _toml(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)
