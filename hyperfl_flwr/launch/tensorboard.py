"""Write a run's metrics as TensorBoard event files, in the folder `tensorboard` of the run's folder.

The event files are written from metrics.jsonl only. A resumed run rewrites metrics.jsonl without the rounds after its
checkpoint; then the event files are rewritten, too, so that no step occurs twice.
"""

import importlib.util
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from hyperfl_flwr.core.errors import InstallationError, RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.follow import RunCallbacks, updated_every_round
from hyperfl_flwr.runs.metrics_tail import NewRecords
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import Record, has_secure_sums, read_manifest, trained_settings
from hyperfl_flwr.runs.scalars import numbers_of, results, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

FOLDER = "tensorboard"
FILES = "events.out.tfevents.*"


def require_tensorboard(find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Check that TensorBoard is installed.

    Raises:
        InstallationError: If it is not installed.
    """
    if find("tensorboard") is None:
        raise InstallationError(
            "event files need the package tensorboard, which is not installed: python -m pip install "
            "'tensorboard>=2.16,<3'"
        )


class EventFiles:
    """Writer of one run's event files.

    Args:
        run: Folder of the run, which need not exist yet.
        per_client: Whether to write curves of each client.

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
        """Write the new lines of metrics.jsonl."""
        records, is_new_file = self._records.read()
        if is_new_file:
            self._open_writer()
        if self._writer is None:
            return
        for record in records:
            self._write(record, self._writer)
        self._writer.flush()

    def finish(self) -> None:
        """Write the remaining metrics, and for a completed run its settings and result for TensorBoard's HPARAMS."""
        self.update()
        if self._writer is None:
            return
        if (self._run / "summary.json").is_file():
            settings, result = self._settings(), self._result()
            rounds = int(settings["num-rounds"])
            self._writer.add_hparams(settings, result, run_name=".", global_step=rounds)
        self._writer.close()
        self._writer = None

    def _open_writer(self) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # needs the optional package tensorboard

        if self._writer is not None:
            self._writer.close()
        for old in self.folder.glob(FILES):
            old.unlink()
        # purge_step makes a running TensorBoard discard the steps that it has read from the old files.
        self._writer = SummaryWriter(str(self.folder), purge_step=0)

    def _write(self, record: Record, writer: "SummaryWriter") -> None:
        is_client = record["kind"].startswith("client")
        if is_client and not self._per_client:
            return
        found = scalars(record)
        if is_client:
            found = {f"client {record['client']:05d}/{name}": value for name, value in numbers_of(record).items()}
        for place, value in found.items():
            writer.add_scalar(place, value, record["round"])

    def _settings(self) -> dict[str, Scalar]:
        manifest = read_manifest(self._run)
        settings = RunData.read(manifest).named_in(trained_settings(manifest))
        return {key: value for key, value in settings.items() if value != ""}

    def _result(self) -> dict[str, float]:
        return results(json.loads((self._run / "summary.json").read_text()))


def write_during_run(run: Path, observer: RunCallbacks) -> AbstractContextManager[RunCallbacks]:
    """Write a run's event files during the run; returns a context of the observer to follow the run with.

    Args:
        run: Folder of the run, which need not exist yet.
        observer: Observer that still receives everything.

    Raises:
        InstallationError: If TensorBoard is not installed.
    """
    files = EventFiles(run)
    return updated_every_round(observer, files.update, files.finish)


def write_event_files(run: Path, *, per_client: bool = False) -> Path:
    """Write the event files of a run, replacing old ones.

    Returns:
        The folder of the event files.

    Raises:
        InstallationError: If TensorBoard is not installed.
        RunDirectoryError: If the folder is not a run's, the run has not recorded anything, or its sums were secure,
            so that there are no curves of clients.
    """
    files = EventFiles(run, per_client=per_client)
    if has_secure_sums(read_manifest(run)) and per_client:
        raise RunDirectoryError(
            f"{run} has no numbers of single clients, because its sums were secure; leave out --clients"
        )
    files.finish()
    if not files.folder.is_dir():
        raise RunDirectoryError(f"{run} holds no metrics.jsonl yet; wait for its first round")
    return files.folder
