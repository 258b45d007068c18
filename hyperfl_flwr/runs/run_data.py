"""Describe the data of a run for its page, pictures, summary and models.

In a simulation the clients share the data set of the setting `dataset`. In a deployment each node's owner may choose
other data (`data` in the node config), which the setting does not describe. From the handshake the server knows only
their number of classes and the shape of a sample, but no names or paths.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import CLASSIFICATION, Task, task_of
from hyperfl_flwr.data.sample_format import is_local_data, shape_text, title_of
from hyperfl_flwr.protocol.messages import DATA_VERSION, printable
from hyperfl_flwr.protocol.queries import COLUMNS
from hyperfl_flwr.runs.run_directory import is_simulation, read_manifest
from hyperfl_flwr.server.federation import Federation

NODES_DATA = "the nodes' own data"
"""Title of data that the nodes' owners have chosen."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Description of a run's data, the entry `data` of its manifest.

    Attributes:
        source: `dataset` if all nodes use the data set of the setting, `nodes` if an owner has chosen other data.
        title: Title of the data for people.
        num_classes: Number of classes, labels or targets; None if a manifest of an earlier version does not have it.
        input_shape: Shape of a sample, (C, H, W) or (D,); None if a manifest of an earlier version does not have it.
        classes: Names of the classes, labels or targets, as reported by the nodes; empty if they have no names.
        are_files: True if each node has a separate file or folder.
        columns: Hash of the names and the order of the columns of the nodes' CSV files; empty if they have none.
        sha256: SHA-256 of the custom data of a simulation, see `hyperfl_flwr.data.digests.sample_digest`; else empty.
    """

    source: Literal["dataset", "nodes"]
    title: str
    num_classes: int | None = None
    input_shape: tuple[int, ...] | None = None
    classes: tuple[str, ...] = ()
    are_files: bool = False
    sha256: str = ""
    columns: str = ""

    @classmethod
    def of(cls, federation: Federation, dataset: str, task: Task = CLASSIFICATION) -> Self:
        """Describe the data of the nodes that take part.

        Args:
            federation: One or more nodes.
            dataset: The setting `dataset`.
            task: What is predicted.
        """
        from_nodes = any(node.properties["owners-data"] for node in federation.nodes)
        num_classes, input_shape = federation.num_classes, federation.input_shape
        title = NODES_DATA if from_nodes else title_of(dataset)
        if from_nodes or is_local_data(dataset):
            title += f", {task.counted(num_classes)}, {shape_text(input_shape)}"
        return cls(
            source="nodes" if from_nodes else "dataset",
            title=title,
            num_classes=num_classes,
            input_shape=input_shape,
            classes=_classes(federation),
            are_files=all(node.properties["partitioned-by"] == "own" for node in federation.nodes),
            sha256=federation.nodes[0].properties.get(DATA_VERSION, ""),
            columns=next((node.properties[COLUMNS] for node in federation.nodes if COLUMNS in node.properties), ""),
        )

    @classmethod
    def read(cls, manifest: Mapping[str, Any]) -> Self:
        """Return the description in a manifest; for manifests of earlier versions, without the entry, derive it."""
        entry = manifest.get("data")
        if entry is None:
            are_files = not is_simulation(manifest) and manifest.get("partitioned_by") == "own"
            title = NODES_DATA if are_files else title_of(str(manifest["settings"]["dataset"]))
            return cls(source="nodes" if are_files else "dataset", title=title, are_files=are_files)
        values = {"input_shape": tuple(entry["input_shape"]), "classes": tuple(entry["classes"])}
        return cls(**{**entry, **values})

    def entry(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return asdict(self)

    def with_earlier(self, before: Self) -> Self:
        """Combine with the description of the nodes that took part before: owners' data, once used, stay recorded."""
        # The summary must not name the data set of the setting once an owner's data were used.
        found = before if before.source == "nodes" and self.source == "dataset" else self
        return replace(
            found,
            are_files=self.are_files and before.are_files,
            classes=found.classes or self.classes or before.classes,
            columns=self.columns or before.columns,
        )

    def terms(self) -> dict[str, str]:
        """Return what a resumed run requires of a deployment's nodes, as texts by keys of `federation.TERMS`.

        What the manifest does not say is not required: the names of classes without names, and everything with a
        manifest of an earlier version.
        """
        found: dict[str, str] = {}
        if self.num_classes is not None and self.input_shape is not None:
            found |= {"input-shape": str(list(self.input_shape)), "num-classes": str(self.num_classes)}
        found |= {COLUMNS: self.columns} if self.columns else {}
        return found | ({"classes": str(list(self.classes))} if self.classes else {})

    def named_in(self, settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return a run's settings for people, with the title instead of the name of a data set that was not used."""
        return {**settings, "dataset": self.title} if self.source == "nodes" else dict(settings)


def _classes(federation: Federation) -> tuple[str, ...]:
    """Return the names of the classes; empty if the nodes report another number of names than classes."""
    reported = (node.properties["classes"] for node in federation.nodes if "classes" in node.properties)
    names = tuple(map(printable, next(reported, ())))
    return names if len(names) == federation.num_classes else ()


def refuse_changed_data(manifest: Mapping[str, Any], federation: Federation, dataset: str) -> None:
    """Refuse to resume a run on custom data that have changed; only a simulation knows it.

    Args:
        manifest: The run's manifest.
        federation: The nodes that take part now.
        dataset: The setting `dataset`.

    Raises:
        RunDirectoryError: If the data are others than those that the run began with.
    """
    refuse_other_data(RunData.read(manifest).sha256, RunData.of(federation, dataset).sha256, dataset)


def refuse_other_data(before: str, now: str, dataset: str) -> None:
    """Refuse custom data that are not those that a run began with.

    Args:
        before: The SHA-256 in the run's manifest; empty if it is not known.
        now: That of the data now; empty if it is not known.
        dataset: The setting `dataset`.

    Raises:
        RunDirectoryError: If they are others.
    """
    if before and now and before != now:
        raise RunDirectoryError(
            f"{dataset} has changed since the run began: its SHA-256 was {before[:8]}..., now it is {now[:8]}...; "
            f"restore the data, or begin a new run"
        )


def require_classes(run: Path) -> None:
    """Check that a run was trained to predict classes.

    Raises:
        RunDirectoryError: If its task is another one.
    """
    task = task_of(read_manifest(run)["settings"])
    if task is not CLASSIFICATION:
        raise RunDirectoryError(
            f"{run} was trained with task = {task.name}; the attacks and audits are for classification, give such a run"
        )


def require_dataset(run: Path) -> None:
    """Check that a run was trained on the data set of its settings, so that its samples can be read again.

    Raises:
        RunDirectoryError: If the nodes' owners chose other data, which are not on this machine.
    """
    if RunData.read(read_manifest(run)).source == "nodes":
        raise RunDirectoryError(
            f"{run} was trained on {NODES_DATA}, which are not on this machine; give the folder of another run"
        )
