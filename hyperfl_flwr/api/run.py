"""Access to a run's folder from Python: results, metrics and models.

The process that follows a run constructs a `Run`, too; so modules that import torch are imported where they are used.
"""

import json
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError, StateError
from hyperfl_flwr.core.run_folder import manifest_file
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.given_settings import absolute

if TYPE_CHECKING:
    from hyperfl_flwr.metrics.predictions import Predictions
    from hyperfl_flwr.results.export import Exported, State
    from hyperfl_flwr.runs.run_directory import Record


class Run:
    """A run, finished or not; each access reads its files again.

    Args:
        folder: The run's folder.

    Attributes:
        folder: The run's folder, as an absolute path.

    Raises:
        RunDirectoryError: If the folder is not a run's.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = absolute(folder)
        manifest_file(self.folder)  # which refuses other folders

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def __fspath__(self) -> str:
        """Return the run's folder: a run can be given wherever a path is expected."""
        return str(self.folder)

    @property
    def manifest(self) -> dict[str, Any]:
        """Content of manifest.json: settings, what each `auto` became, versions, hardware.

        Raises:
            StateError: If it is damaged.
        """
        from hyperfl_flwr.runs.run_directory import read_manifest

        return read_manifest(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """Content of summary.json, the run's result; accuracies are shares in [0, 1].

        `hyperfl_flwr.runs.summary.summarise` documents its keys.

        Raises:
            RunDirectoryError: If the run is not finished.
            StateError: If it is damaged.
        """
        file = self.folder / "summary.json"
        try:
            summary: dict[str, Any] = json.loads(file.read_text())
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{self.folder} holds no summary.json: the run is not finished; resume it"
            ) from None
        except ValueError as error:
            raise StateError(f"{file} is damaged ({error}); restore it from a copy") from None
        return summary

    @property
    def metrics_file(self) -> Path:
        """Path of metrics.jsonl, one JSON object per line."""
        return self.folder / "metrics.jsonl"

    @property
    def metrics(self) -> "list[Record]":
        """The lines of metrics.jsonl so far, see `hyperfl_flwr.runs.run_directory.Record`.

        Raises:
            StateError: If a line is damaged.
        """
        from hyperfl_flwr.runs.run_directory import read_metrics

        return list(read_metrics(self.folder))

    def report(self, path: Path | str | None = None) -> Path:
        """Write a self-contained HTML report of the run.

        Args:
            path: The HTML file; None is `report.html` in the run's folder.

        Returns:
            The file.

        Raises:
            RunDirectoryError: If the run has no finished round, or the file cannot be written.
        """
        from hyperfl_flwr.results.report import write_report

        return write_report(self.folder, None if path is None else absolute(path))

    def export(
        self,
        client: int | None = None,
        path: Path | str | None = None,
        *,
        state: "State | None" = None,
        data_root: Path | str | None = None,
    ) -> "Exported":
        """Return a client's model, or the global one, and write it for plain torch if a path is given.

        Args:
            client: The client's id, 0 .. N - 1; None for the global model, which only some methods have.
            path: The parameters' file, `*.safetensors`; its document and script go to the same folder.
            state: `personalized` (after the client's last local training) or `aggregate` (the last global state with
                the client's private parameters); None for `personalized` where it is stored, see
                `hyperfl_flwr.results.export`.
            data_root: Folder of the run's data set, if it has changed.

        Returns:
            The parameters by name as CPU tensors, the specification of the model, and its recorded score.

        Raises:
            ConfigError: If `state` is unknown, or `client` is no whole number.
            RunDirectoryError: If the run's folder does not have this model, or the path is in use.
            HyperFLError: If a file is missing or damaged.
        """
        from hyperfl_flwr.results.export import check_output, write_exported

        if path is not None:
            check_output(absolute(path))
        found = self._model(client, state, _changes(data_root))
        if path is not None:
            write_exported(found, absolute(path))
        return found

    def predict(
        self,
        data: Path | str,
        client: int | None = None,
        *,
        state: "State | None" = None,
        data_root: Path | str | None = None,
        convert: bool = False,
        device: str = "auto",
        weights: Path | str | None = None,
    ) -> "Predictions":
        """Predict the classes of samples with a client's model, or with the global one.

        Args:
            data: A folder of images, an `.npz` or a CSV file; the prefixes `folder:`, `npz:` and `csv:` are optional.
            client: As for `export`.
            state: As for `export`.
            data_root: As for `export`.
            convert: Whether to convert images that do not have the model's size or channels.
            device: `auto`, `cpu`, `cuda` or `cuda:NUMBER`.
            weights: File with the weights of a pre-trained body; None for the one that the run names, else a download.

        Returns:
            The class probabilities [n, K] of n samples, the labels if they are known, and which samples the run has
            trained on; its method `scores` measures the predictions.

        Raises:
            DataError: If there are no samples, or one does not fit the model.
            HyperFLError: As for `export`, or if the device is missing.
        """
        from hyperfl_flwr.core.device import resolve_device
        from hyperfl_flwr.data.sample_format import samples_path
        from hyperfl_flwr.metrics.predictions import predict
        from hyperfl_flwr.results.training_samples import training_digests

        model = self._model(client, state, _changes(data_root, weights))
        return predict(
            model.tensors,
            model.recipe,
            samples_path(str(data)),
            resolve_device(device),
            convert=convert,
            trained_on=training_digests(self.folder, _changes(data_root)),
        )

    def _model(self, client: int | None, state: "State | None", changes: dict[str, Scalar]) -> "Exported":
        from hyperfl_flwr.results.export import model_of_run

        if state not in (None, "personalized", "aggregate"):
            raise ConfigError(f"state must be personalized or aggregate, got {state!r}")
        try:
            client = None if client is None else operator.index(client)  # of numpy, too
        except TypeError:
            raise ConfigError(f"client must be a whole number, or None for the global model; got {client!r}") from None
        return model_of_run(self.folder, client, state, changes)


def _changes(data_root: Path | str | None, weights: Path | str | None = None) -> dict[str, Scalar]:
    """Return the settings of this machine that are given."""
    given = {"data-root": data_root, "lpm.weights": weights}
    return {key: str(absolute(path)) for key, path in given.items() if path is not None}
