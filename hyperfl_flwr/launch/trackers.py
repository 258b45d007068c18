"""Send a run's numbers to MLflow or Weights & Biases while it trains.

They are read from metrics.jsonl and summary.json. Numbers of single clients but the lowest score, and paths of this
machine, are not sent.
Where they are sent to is decided by the service's own environment variables and configuration. A resumed run continues
its entry there, of which the id is in `tracking.json` in the run's folder, with fingerprints of what was sent: it
repeats rounds, mostly with the same numbers, but with others where the last round was of all clients (`last-round`).
"""

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from hyperfl_flwr.core.errors import ConfigError, InstallationError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.sample_format import is_local_data, placeholder_of
from hyperfl_flwr.launch.follow import RunCallbacks, updated_every_round
from hyperfl_flwr.runs.metrics_tail import NewRecords
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import Record, data_name, read_manifest, trained_settings
from hyperfl_flwr.runs.scalars import results, scalars

FILE = "tracking.json"

PROJECT = "hyperfl"
"""Name of the experiment or project, unless the service's environment variables have another."""

OF_THIS_MACHINE = frozenset({"data-root", "output", "resume", "lpm.weights"})
"""Settings that are paths."""


class Tracker(Protocol):
    """An entry of a run at a tracking service.

    Attributes:
        replaces: Whether numbers that are sent again for a round take the place of the earlier ones.
    """

    replaces: bool

    def begin(self, run: Path, name: str, settings: Mapping[str, Scalar], known: str | None) -> str:
        """Open a new entry, or continue a known one, and return its id.

        Args:
            run: Folder of the run.
            name: Name of a new entry.
            settings: Settings that are sent.
            known: Id of the run's entry; None if it has none.
        """

    def log(self, numbers: Mapping[str, float], server_round: int) -> None:
        """Send numbers of a round."""

    def end(self, numbers: Mapping[str, float], *, completed: bool) -> None:
        """Send the results, and close the entry."""


class MlflowTracker:
    """A run of MLflow, at `MLFLOW_TRACKING_URI`, in the experiment `MLFLOW_EXPERIMENT_NAME`."""

    replaces = True
    MOST_PARAMETERS = 100
    """Largest number of parameters that MLflow accepts at once."""

    def __init__(self) -> None:
        from mlflow import MlflowClient

        self._client, self._id = MlflowClient(), ""

    def begin(self, run: Path, name: str, settings: Mapping[str, Scalar], known: str | None) -> str:
        """Open or continue a run."""
        from mlflow.entities import Param

        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return known
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(project)
        place = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(place, run_name=name).info.run_id
        parameters = [Param(key, str(value)) for key, value in settings.items()]
        for begin in range(0, len(parameters), self.MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[begin : begin + self.MOST_PARAMETERS])
        return self._id

    def log(self, numbers: Mapping[str, float], server_round: int) -> None:
        """Send metrics with the round as their step."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(key, value, now, server_round) for key, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, numbers: Mapping[str, float], *, completed: bool) -> None:
        """Send metrics without a round, and end the run."""
        if numbers:
            self.log(numbers, 0)
        self._client.set_terminated(self._id, "FINISHED" if completed else "FAILED")


WITHOUT_THIS_MACHINE: Mapping[str, Any] = {
    "x_disable_meta": True, "x_disable_stats": True, "disable_git": True, "save_code": False,
}  # fmt: skip
"""W&B would send the command's words, the working directory and the repository, which may name the user's files."""


class WandbTracker:
    """A run of Weights & Biases, in the project `WANDB_PROJECT`; with `WANDB_MODE=offline` in the run's folder only."""

    replaces = False  # steps cannot go back

    def __init__(self) -> None:
        self._run: Any = None

    def begin(self, run: Path, name: str, settings: Mapping[str, Scalar], known: str | None) -> str:
        """Open or continue a run."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=name, dir=str(run), id=known, resume="allow",
            config=dict(settings), settings=wandb.Settings(silent=True, console="off", **WITHOUT_THIS_MACHINE),
        )  # fmt: skip
        return str(self._run.id)

    def log(self, numbers: Mapping[str, float], server_round: int) -> None:
        """Send numbers with the round as their step."""
        self._run.log(dict(numbers), step=server_round)

    def end(self, numbers: Mapping[str, float], *, completed: bool) -> None:
        """Send numbers of the summary, and end the run."""
        self._run.summary.update(dict(numbers))
        self._run.finish(exit_code=0 if completed else 1)


TRACKERS: Mapping[str, tuple[Callable[[], Tracker], str, str]] = {
    "mlflow": (MlflowTracker, "mlflow", "mlflow-skinny>=2.16,<4"),
    "wandb": (WandbTracker, "wandb", "wandb>=0.19.11,<1"),
}
"""Class, module and requirement of each service."""


def require_tracker(name: str, find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Check that a service is known, and that its package is installed.

    Raises:
        ConfigError: If it is not known.
        InstallationError: If the package is not installed.
    """
    if name not in TRACKERS:
        raise ConfigError(f"--track must be {' or '.join(TRACKERS)}, got {name!r}")
    _, module, requirement = TRACKERS[name]
    if find(module) is None:
        raise InstallationError(
            f"--track {name} needs the package {module}, which is not installed: python -m pip install '{requirement}'"
        )


class Tracked:
    """The numbers of a run that have not been sent to a service.

    Args:
        run: Folder of the run, which need not exist yet.
        name: Name of the service.
        on_note: Receives a note if the service fails; training goes on, and nothing more is sent.
    """

    def __init__(self, run: Path, name: str, on_note: Callable[[str], None]) -> None:
        self._run, self._name, self._on_note = run, name, on_note
        self._records = NewRecords(run)
        self._tracker: Tracker | None = None
        self._id, self._sent = "", -1  # of the entry, and the last round of which the training was sent
        self._sent_before = -1  # likewise, by a version that kept no fingerprints
        self._fingerprints: dict[str, str] = {}  # of the numbers sent, by kind and round
        self._kept: dict[int, None] = {}  # rounds of which the service keeps other numbers than the run's
        self._failed = False

    def update(self) -> None:
        """Send new numbers."""
        with self._noted():
            for record in () if self._failed else self._records.read()[0]:
                if record["kind"] in ("train", "aggregate"):
                    self._send(record)

    def _send(self, record: Record) -> None:
        """Send a record unless the same numbers were sent; note a round whose numbers cannot be replaced."""
        tracker = self._tracker or self._begun()
        numbers, place = _finite(scalars(record)), f"{record['kind']} {record['round']}"
        known, found = self._fingerprints.get(place), _fingerprint(numbers)
        # An earlier version kept no fingerprints. A global state is evaluated in the next round.
        was_sent = known is None and record["round"] <= self._sent_before - (record["kind"] == "aggregate")
        if known == found or was_sent:
            self._fingerprints[place] = found
        elif known is not None and not tracker.replaces:
            self._kept[record["round"]] = None
        else:
            tracker.log(numbers, record["round"])
            self._fingerprints[place] = found
            self._sent = max(self._sent, record["round"]) if record["kind"] == "train" else self._sent
            self._save()

    def finish(self) -> None:
        """Send the remaining numbers and, of a completed run, the results."""
        self.update()
        if self._kept:
            rounds = ", ".join(map(str, self._kept))
            self._on_note(
                f"{self._name} keeps the earlier numbers of these rounds, as its steps cannot go back: {rounds}. The "
                f"resumed run has repeated them with other numbers, which are in metrics.jsonl"
            )
        with self._noted():
            if self._tracker is not None and not self._failed:
                completed = (self._run / "summary.json").is_file()
                found = json.loads((self._run / "summary.json").read_text()) if completed else {}
                self._tracker.end(_finite(results(found)), completed=completed)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Turn an error of the service into a note, and send nothing more."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of whatever the service's package does
            self._failed = True
            self._on_note(f"nothing more is sent to {self._name}: {type(error).__name__}: {error}")

    def _begun(self) -> Tracker:
        file = self._run / FILE
        known = json.loads(file.read_text()).get(self._name) if file.is_file() else None
        manifest = read_manifest(self._run)
        settings = RunData.read(manifest).named_in(trained_settings(manifest))
        sent = {key: _without_path(value) for key, value in settings.items()
                if key not in OF_THIS_MACHINE and value != ""}  # fmt: skip
        self._tracker = TRACKERS[self._name][0]()
        self._id = self._tracker.begin(
            self._run, _name_of(self._run.name, settings), sent, known["id"] if known else None
        )
        self._sent = known["round"] if known else -1
        self._fingerprints = dict(known.get("sent", {})) if known else {}
        self._sent_before = -1 if self._fingerprints else self._sent
        self._save()
        return self._tracker

    def _save(self) -> None:
        file = self._run / FILE
        entries = json.loads(file.read_text()) if file.is_file() else {}
        entries[self._name] = {"id": self._id, "round": self._sent, "sent": self._fingerprints}
        write_atomically(file, json.dumps(entries).encode())


def _name_of(folder: str, settings: Mapping[str, Scalar]) -> str:
    """Return the name of a run's entry: that of its folder, without the name of a file or folder of the user's data."""
    dataset = str(settings.get("dataset", ""))
    if not is_local_data(dataset):
        return folder
    return folder.replace(f"-{data_name(dataset)}-", f"-{dataset.partition(':')[0]}-")


def _without_path(value: Scalar) -> Scalar:
    """Return a setting; of a data set in files of this machine its kind only, such as `npz:FILE`."""
    return placeholder_of(value) if isinstance(value, str) and is_local_data(value) else value


def _fingerprint(numbers: Mapping[str, float]) -> str:
    """Return the start of the SHA-256 of a record's numbers, but for times and memory, which no repetition repeats."""
    repeated = {
        name: value for name, value in numbers.items() if not name.startswith("seconds/") and "memory" not in name
    }
    return hashlib.sha256(json.dumps(repeated, sort_keys=True).encode()).hexdigest()[:8]


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def track_during_run(run: Path, name: str, observer: RunCallbacks) -> AbstractContextManager[RunCallbacks]:
    """Send a run's numbers to a service during the run; returns a context of the observer to follow the run with.

    Args:
        run: Folder of the run, which need not exist yet.
        name: Name of the service.
        observer: Observer that still receives everything.

    Raises:
        ConfigError: If the service is not known.
        InstallationError: If its package is not installed.
    """
    require_tracker(name)
    tracked = Tracked(run, name, observer.on_note)
    return updated_every_round(observer, tracked.update, tracked.finish)
