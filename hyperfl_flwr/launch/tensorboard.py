"""A run's metrics as TensorBoard's event files, in the run's folder `tensorboard`.

They are made of metrics.jsonl and of nothing else. When that begins anew, because a resumed run drops the rounds after
its checkpoint, so do the event files: no step is there twice.
"""

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hyperfl_flwr.core.errors import InstallationError, RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.follow import Observer
from hyperfl_flwr.runs.metrics_tail import NewRecords
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import Record, read_manifest, trained_settings

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

FOLDER = "tensorboard"
FILES = "events.out.tfevents.*"

NO_SCALARS = ("kind", "round", "client", "clients", "failed")

SECTIONS = ("accuracy", "loss", "bytes", "seconds")
"""TensorBoard's sections, by a word of the metric's name; the rest is in `other`."""


def require_tensorboard(find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Check that TensorBoard is installed.

    Raises:
        InstallationError: If it is not.
    """
    if find("tensorboard") is None:
        raise InstallationError(
            "event files need the package tensorboard, which is not installed: python -m pip install "
            "'tensorboard>=2.16,<3' (or install hyperfl-flwr with its extra: 'hyperfl-flwr[tensorboard]')"
        )


def tag(name: str) -> str:
    """Return where a metric is shown: `own_accuracy` in `accuracy/own`, `bytes_on_wire` in `bytes/on_wire`."""
    words = name.split("_")
    section = next((word for word in SECTIONS if word in words), "other")
    rest = "_".join(word for word in words if word != section) or "all"
    return f"{section}/{rest}"


class EventFiles:
    """The event files of one run.

    Args:
        run: Its folder, which need not exist yet.
        per_client: Whether each client gets curves of its own.

    Raises:
        InstallationError: If TensorBoard is not installed.
    """

    def __init__(self, run: Path, *, per_client: bool = False) -> None:
        require_tensorboard()
        self.folder = run / FOLDER
        self._run, self._per_client = run, per_client
        self._records = NewRecords(run)
        self._writer: SummaryWriter | None = None

    def update(self) -> None:
        """Write what metrics.jsonl tells more than before."""
        records, is_anew = self._records.read()
        if is_anew:
            self._begin()
        if self._writer is None:
            return
        for record in records:
            self._write(record, self._writer)
        self._writer.flush()

    def finish(self) -> None:
        """Write the rest, and of a run that has ended its settings with its result, for TensorBoard's HPARAMS."""
        self.update()
        if self._writer is None:
            return
        if (self._run / "summary.json").is_file():
            settings, result = self._settings(), self._result()
            rounds = int(settings["num-rounds"])
            self._writer.add_hparams(settings, result, run_name=".", global_step=rounds)
        self._writer.close()
        self._writer = None

    def _begin(self) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # an extra

        if self._writer is not None:
            self._writer.close()
        for old in self.folder.glob(FILES):
            old.unlink()
        # A TensorBoard that looks on forgets what it has read of the files before.
        self._writer = SummaryWriter(str(self.folder), purge_step=0)

    def _write(self, record: Record, writer: "SummaryWriter") -> None:
        is_client = record["kind"].startswith("client")
        if is_client and not self._per_client:
            return
        for name, value in record.items():
            if name not in NO_SCALARS and isinstance(value, (int, float)):
                place = f"client {record['client']:05d}/{name}" if is_client else tag(name)
                writer.add_scalar(place, value, record["round"])
        if record["kind"] == "train":
            writer.add_scalar("clients/trained", record["clients"], record["round"])
            writer.add_scalar("clients/failed", len(record["failed"]), record["round"])

    def _settings(self) -> dict[str, Scalar]:
        manifest = read_manifest(self._run)
        settings = RunData.read(manifest).named_in(trained_settings(manifest))
        return {key: value for key, value in settings.items() if value != ""}

    def _result(self) -> dict[str, float]:
        summary = json.loads((self._run / "summary.json").read_text())
        numbers = {name: value for name, value in summary.items() if type(value) in (int, float)}
        return {f"result/{name}": float(value) for name, value in numbers.items()}


@contextlib.contextmanager
def written_along(run: Path, observer: Observer) -> Iterator[Observer]:
    """Write a run's event files while it goes on; yields the observer that its rounds must be told to.

    Args:
        run: The run's folder, which need not exist yet.
        observer: Hears of the run as before.

    Raises:
        InstallationError: If TensorBoard is not installed.
    """
    files = EventFiles(run)

    def on_round(finished: int, total: int, accuracy: float | None) -> None:
        files.update()
        observer.on_round(finished, total, accuracy)

    try:
        yield replace(observer, on_round=on_round)
    finally:
        files.finish()


def write_event_files(run: Path, *, per_client: bool = False) -> Path:
    """Write the event files of a run, in place of those that are there.

    Returns:
        Their folder.

    Raises:
        InstallationError: If TensorBoard is not installed.
        RunDirectoryError: If the folder is no run's, or the run has not recorded anything.
    """
    files = EventFiles(run, per_client=per_client)
    read_manifest(run)
    files.finish()
    if not files.folder.is_dir():
        raise RunDirectoryError(f"{run} holds no metrics.jsonl yet; wait for its first round")
    return files.folder
