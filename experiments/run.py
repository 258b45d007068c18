"""Runs the app on a SuperLink of its own and follows it to the end."""

import contextlib
import json
import math
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from clients.base import client_setting
from experiments.cores import WAITING, CoreSlots
from experiments.flower import federation_config
from experiments.layout import Machine, suitable_nodes, suitable_threads
from experiments.leaks import leak_warnings
from experiments.superlink import LocalSuperLink
from hyperfl_flwr import ROOT
from hyperfl_flwr.config import RunConfig, Scalar, app_file, default_settings
from hyperfl_flwr.data.client_data import FederatedData, load_federated_data
from hyperfl_flwr.device import resolve_device
from hyperfl_flwr.errors import ConfigError, DeviceError, RunFailedError
from hyperfl_flwr.manifest import COMMIT_VARIABLE
from hyperfl_flwr.methods import METHODS, check_novel, check_target
from hyperfl_flwr.recording import RunDirectory, new_run_name, read_manifest, refuse_used_directory
from hyperfl_flwr.resume import refuse_other_nodes, resume_round
from hyperfl_flwr.state import PrivateState

POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that can start.

    Attributes:
        config: Its settings, with an absolute output directory.
        num_nodes: Number of simulated nodes P.
        threads: torch threads of each process, as in the settings.
        chosen_for: The machine for which nodes or threads were chosen; empty if the caller gave both.
        warnings: What its owner should know before it starts.
    """

    config: RunConfig
    num_nodes: int
    threads: int
    chosen_for: str
    warnings: Sequence[str] = ()


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


def plan(changes: Mapping[str, Scalar], num_nodes: int | None = None) -> Plan:
    """Check everything that can be checked before a run starts.

    Args:
        changes: Settings that differ from the defaults, or, where `resume` is one of them, from the resumed run's.
        num_nodes: Number of simulated nodes P; None is what suits the machine (`experiments.layout`), or that of the
            resumed run.

    Returns:
        The run's settings and number of nodes.

    Raises:
        HyperFLError: With all problems of the settings, or the first of data, device and directories.
    """
    settings, resume = default_settings(), str(changes.get("resume", ""))
    if resume and changes.get("output"):
        raise ConfigError("a resumed run goes on in its own folder; give resume or output, not both")
    if resume:
        settings |= {key: value for key, value in read_manifest(Path(resume))["settings"].items() if key in settings}
    settings |= changes
    if not settings["output"] and not resume:
        name = new_run_name(str(settings["method"]), str(settings["dataset"]), int(settings["seed"] or 0))
        settings["output"] = str(Path.cwd() / "runs" / name)
    config = RunConfig.from_flat(settings, methods=METHODS)
    if config.personalize.run:
        raise ConfigError("personalize.run makes models with a run that was trained; use `hyperfl personalize`")
    if resume:
        num_nodes = _check_resume(config, num_nodes)
    else:
        refuse_used_directory(Path(config.output))
    if ":" in config.device:
        index = config.device.partition(":")[2]
        raise DeviceError(f"a simulation takes its GPUs from Ray: set CUDA_VISIBLE_DEVICES={index} and device=cuda")
    resolve_device(config.device)
    data = load_federated_data(config.data_settings())
    check_target(config, data.dataset.input_shape, data.dataset.num_classes)
    check_novel(config, data.dataset.input_shape)
    return _laid_out(config, data, num_nodes)


def _laid_out(config: RunConfig, data: FederatedData, num_nodes: int | None) -> Plan:
    """Choose the nodes and threads that the caller has not."""
    device = resolve_device(config.device)
    machine = Machine.here(device)
    chosen_for = str(machine) if num_nodes is None or config.threads == "auto" else ""
    if num_nodes is None:
        # The handshake needs every node, and the last round trains all clients; a usual round trains a sample.
        clients = max(1, round(config.fraction_train * config.num_clients))
        state = PrivateState(Path(), "", 0)
        client = METHODS[config.method].client(client_setting(config, data, 0, device, state))
        threads = 1 if config.threads == "auto" else config.threads
        num_nodes = suitable_nodes(machine, clients, client.shared_bytes(), threads)
    threads = suitable_threads(machine, num_nodes) if config.threads == "auto" else config.threads
    config = config.model_copy(update={"threads": threads})
    samples = [len(data.train_indices(client)) for client in range(config.num_clients)]
    leaks = leak_warnings(config, samples) if len(data.dataset.input_shape) == 3 else []  # of images
    warnings = [*METHODS[config.method].strategy.warnings(config), *leaks]
    return Plan(config=config, num_nodes=num_nodes, threads=threads, chosen_for=chosen_for, warnings=warnings)


def _check_resume(config: RunConfig, num_nodes: int | None) -> int:
    """Return the number of nodes of a run that can be resumed."""
    path = Path(config.resume)
    manifest = read_manifest(path)
    RunDirectory(path).close()  # refused while another process is writing
    resume_round(config, keeps_state=bool(METHODS[config.method].client.private))
    if num_nodes is not None:
        refuse_other_nodes(manifest, num_nodes)
    return len(manifest["nodes"])


def launch(planned: Plan, observer: Observer) -> Path:
    """Run the app in Flower's simulation engine and wait for its end.

    Args:
        planned: What `plan` has checked.
        observer: Hears of the run.

    Returns:
        The run's folder.

    Raises:
        RunFailedError: If the run failed, whatever Flower's commands said.
    """
    config = planned.config
    directory = Path(config.resume or config.output)
    for warning in planned.warnings:
        observer.on_note(f"warning: {warning}")
    with CoreSlots() as slots:
        wanted = planned.num_nodes * planned.threads
        held = slots.acquire(wanted, lambda: observer.on_note(f"{WAITING} for one"))
        with LocalSuperLink(environment={COMMIT_VARIABLE: commit()}) as superlink:
            app = build_app(superlink.home / "app")
            settings = superlink.home / "settings.toml"
            settings.write_text("".join(f"{_toml_key(key)} = {_toml(value)}\n" for key, value in config.flat().items()))
            actors = max(1, held // planned.threads)
            observer.on_note(_where(planned, actors))
            run_id = superlink.submit(app, settings, _federation(config, planned.num_nodes, actors))
            with _explained(directory, observer):
                _follow(superlink, run_id, config, directory, observer)
    return directory


def _where(planned: Plan, actors: int) -> str:
    """Say where a run trains, and how to have it otherwise."""
    device = resolve_device(planned.config.device).type
    text = (
        f"{planned.config.num_clients} clients on {planned.num_nodes} nodes in {actors} processes, "
        f"{planned.threads} thread(s) each, on {device}"
    )
    if planned.chosen_for:
        text += f"; chosen for {planned.chosen_for}, set --num-nodes and --set threads= to change it"
    return text


def _federation(config: RunConfig, num_nodes: int, actors: int) -> str:
    if resolve_device(config.device).type != "cuda":
        return federation_config(num_nodes, actors)
    gpus = torch.cuda.device_count()
    sharing = math.ceil(actors / gpus)  # Ray places each process on one GPU
    return federation_config(num_nodes, actors, gpus, 1 / sharing)


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
    hint = f"resume with: hyperfl run --resume {shlex.quote(str(directory))}"
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
        self._identity, self._position = 0, 0
        self.last = 0
        self.accuracy: float | None = None

    def read_on(self) -> None:
        """Read the lines that were added; `last` and `accuracy` are those of the newest round then."""
        if not self._file.is_file():
            return
        with self._file.open("rb") as file:
            identity = os.fstat(file.fileno()).st_ino
            if identity != self._identity:  # a resumed run begins by replacing the file
                self._identity, self._position = identity, 0
            file.seek(self._position)
            added, newline, _ = file.read().rpartition(b"\n")
        self._position += len(added) + len(newline)
        for line in added.splitlines():
            record = json.loads(line)
            if record["kind"] == "train":
                self.last, self.accuracy = record["round"], record.get("own_accuracy")


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
