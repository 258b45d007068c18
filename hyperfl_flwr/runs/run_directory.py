"""Create, write and read the folder of a run.

::

    manifest.json    every setting and the value of each `auto`, versions, commit, hardware, start and end; in a
                     simulation the label counts
    metrics.jsonl    one line per round and kind, and one per client
    checkpoints/     see `hyperfl_flwr.runs.checkpoint`
    clients/         private client state of a simulation, with access for its owner only
    server.log       log of the server and of Flower
    failures/        reasons why clients were left out, by round and client
    plots/           pictures of metrics.jsonl
    novel.json       results of novel clients, if there are any
    cross_site.json  with `cross-site`, the accuracy of each client's model on each client's data
    observations/    with `audit.clients`, what the server has exchanged with single clients
    privacy.jsonl    with `privacy.unit=client`, see `hyperfl_flwr.runs.releases`
    openings/        with secure sums and `audit.rounds`, what the server has opened
    model/           source of a network of the user's own, if the app bundle includes it
    method/          source of a method of the user's own, if the app bundle includes it
    summary.json     the run's result
"""

import json
import os
import re
import secrets
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperfl_flwr.config.table import default_settings, training_autos
from hyperfl_flwr.core.errors import RunDirectoryError, StateError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.files.folder_lock import lock_folder
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.run_folder import manifest_file
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import DATASETS
from hyperfl_flwr.data.sample_format import is_local_data, local_data_path, placeholder_of
from hyperfl_flwr.protocol.messages import Failure
from hyperfl_flwr.runs.begun_folder import SUBFOLDERS, holds_nothing

Record = dict[str, Any]
"""One line of metrics.jsonl. `kind` is one of

- `train`: means over the clients of a round's training, including the personalized accuracy;
- `aggregate`: means of the global state AFTER a round, measured at the start of the next one;
- `client`: one client's numbers in a round's training;
- `client-aggregate`: one client's accuracy with the global state after a round;
- `kept`, `client-kept`: the same of the clients' best models, after the last round, with `keep = best`.

With secure sums there are no lines of single clients.
"""

DEPLOYMENT = "deployment"
"""Placeholder for the data set in the name of a deployment's folder; the data are not known at that time."""


class RunDirectory:
    """Run folder that is locked for writing by this process.

    Args:
        path: Absolute path of an existing run folder; use `create` for a new one.

    Raises:
        RunDirectoryError: If another process is writing to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = lock_folder(path)

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """Create a run folder, or use an existing empty folder.

        Raises:
            RunDirectoryError: If the folder exists and is not empty, or cannot be created.
        """
        refuse_used_directory(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            for name in SUBFOLDERS:
                (path / name).mkdir(exist_ok=True)
            (path / "clients").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"cannot create the output folder {path}: {error}") from None
        directory = cls(path)
        refuse_used_directory(path)  # another process may have used it before the lock
        return directory

    def close(self) -> None:
        """Release the lock, so that other processes can write."""
        self._lock.close()

    def write_json(self, name: str, document: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Replace one of the folder's JSON files, atomically."""
        write_atomically(self.path / name, (json.dumps(document, indent=2) + "\n").encode())

    def append(self, records: Sequence[Record]) -> None:
        """Add lines to metrics.jsonl; they are on disk when this returns."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, last_round: int) -> None:
        """Remove the records of all rounds after `last_round`, of that round all but those of training, and the result.

        The aggregate records of a round are measured at the start of the next round, which runs again.
        """
        kept = [
            record
            for record in read_metrics(self.path)
            if record["round"] < last_round or (record["round"] == last_round and record["kind"] in ("train", "client"))
        ]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.path / "metrics.jsonl", text.encode())
        for path in (self.path / "failures").glob("round-*.txt"):
            if int(path.name.split("-")[1]) > last_round or re.search("-evaluation-|-novel-|-cross-site-", path.name):
                path.unlink()
        for name in ("novel.json", "cross_site.json", "summary.json", "plots/run.png"):
            (self.path / name).unlink(missing_ok=True)

    def write_failures(self, prefix: str, failures: Sequence[Failure]) -> None:
        """Write one file per failed client of a phase; the file names begin with the phase's `prefix`."""
        for failure in failures:
            path = self.path / "failures" / f"{prefix}-client-{failure.client:05d}.txt"
            write_atomically(path, f"{failure.reason}\n\n{failure.details}".encode())


def refuse_used_directory(path: Path) -> None:
    """Check that a path can become the folder of a run or of another result.

    Raises:
        RunDirectoryError: If the path exists and is not an empty folder, or cannot be created or written to.
    """
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise RunDirectoryError(f"cannot create the output folder {path}: {there} is a file; choose another one")
    if path.is_dir() and not holds_nothing(path):
        is_run = (path / "manifest.json").is_file()
        hint = f"; to continue the run that is in it: hyperfl run --resume {shlex.quote(str(path))}" if is_run else ""
        raise RunDirectoryError(
            f"the output folder {path} exists and is not empty; choose one that does not exist yet{hint}"
        )
    try:
        # Try it: on some file systems the permission bits do not show that they are read-only.
        tempfile.TemporaryDirectory(prefix=".hyperfl-", dir=there).cleanup()
    except OSError as error:
        raise RunDirectoryError(
            f"cannot create or write to the output folder {path} ({error.strerror}); choose another one"
        ) from None


RENAMED = {"ppsgd.head-learning-rate": "ppsgd.classifier-learning-rate"}
"""Settings that manifests of earlier versions have by another name."""


def with_present_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an earlier version by their present names."""
    return {RENAMED.get(key, key): value for key, value in settings.items()}


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a run folder.

    Raises:
        RunDirectoryError: If the folder is not a run folder.
        StateError: If the manifest is damaged.
    """
    file = manifest_file(path)
    try:
        manifest: dict[str, Any] = json.loads(file.read_text())
        manifest["settings"], manifest["experiment"]
        for part in ("settings", "resolved"):
            if part in manifest:
                manifest[part] = with_present_names(manifest[part])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise StateError(f"{file} is damaged ({problem}); restore it from a copy or start a new run") from None
    return manifest


def is_simulation(manifest: Mapping[str, Any]) -> bool:
    """Return True if a run was a simulation; the nodes of a deployment do not report label counts to the server."""
    return "label_counts" in manifest


def has_secure_sums(manifest: Mapping[str, Any]) -> bool:
    """Return True if the sums of a run were secure, so that no number of a single client was recorded."""
    return bool(manifest["settings"].get("secagg.enabled", False))  # earlier versions lack the setting


def settings_of(run: Path) -> dict[str, Scalar]:
    """Return the settings of a run, also of an earlier version, with the numbers that replaced `auto`.

    The code of a method of the user's own is not needed: all of its settings are in the manifest.

    Raises:
        RunDirectoryError: If the folder is not a run folder.
    """
    known, found = default_settings(), trained_settings(read_manifest(run))
    sections = {key.partition(".")[0] for key in known}
    is_own = is_user_code(str(found.get("method")))
    return known | {
        key: value
        for key, value in found.items()
        if key in known or (is_own and "." in key and key.partition(".")[0] not in sections)
    }


def trained_settings(manifest: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the settings of a manifest, with numbers instead of `auto` for settings that affect training.

    Versions before the key `resolved` used the learning rate of HyperFL's paper for the data set.
    """
    settings: dict[str, Scalar] = dict(manifest["settings"])
    chosen: Mapping[str, Scalar] = manifest.get("resolved", {})
    info = DATASETS.get(placeholder_of(str(settings.get("dataset", ""))))
    if "resolved" not in manifest and info:
        chosen = {"learning-rate": info.learning_rate}
    # What was chosen for a setting of a method of the user's own is a number of the method, too.
    autos, known = training_autos(), default_settings()
    numbers = {key: value for key, value in chosen.items() if key in autos or (key in settings and key not in known)}
    return settings | {key: value for key, value in numbers.items() if settings.get(key, "auto") == "auto"}


def with_num_nodes(settings: Mapping[str, Scalar], manifest: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return a run's settings with its number of nodes in place of `auto`, if its manifest has the number."""
    found = manifest.get("resolved", {})
    return {**settings, **({"num-nodes": found["num-nodes"]} if "num-nodes" in found else {})}


def read_metrics(path: Path) -> Iterator[Record]:
    """Yield the records of a run folder's metrics.jsonl; skips an incomplete last line, which is being written.

    Raises:
        StateError: If another line is damaged.
    """
    file = path / "metrics.jsonl"
    if not file.is_file():
        return
    for number, line in enumerate(file.read_text().splitlines(keepends=True), start=1):
        if line.endswith("\n"):
            try:
                yield json.loads(line)
            except ValueError:
                raise StateError(f"line {number} of {file} is damaged; delete it, or start a new run") from None


def new_run_name(method: str, dataset: str, seed: int) -> str:
    """Return a new name for a run folder: time, method, data set, seed and four random digits.

    Args:
        method: The method, or the name of another kind of run.
        dataset: The setting `dataset`; `DEPLOYMENT` if the nodes' owners may choose other data.
        seed: The setting `seed`.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{method}-{data_name(dataset)}-seed{seed}-{secrets.token_hex(2)}"


def data_name(dataset: str) -> str:
    """Return the name of a data set in that of a run's folder; of data of one's own that of the file or folder."""
    if not is_local_data(dataset):
        return dataset
    return local_data_path(dataset).name.removesuffix(".npz").removesuffix(".csv")
