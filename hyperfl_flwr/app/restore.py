"""Restore the server's side of a run from its last checkpoint; nothing in the run's folder is changed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import ArrayRecord

from hyperfl_flwr.app.methods import new_strategy
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import REGRESSION, TASKS
from hyperfl_flwr.data.digests import sample_digest
from hyperfl_flwr.data.federated_data import with_settings
from hyperfl_flwr.data.registry import DATASETS, class_names, load_dataset
from hyperfl_flwr.data.sample_format import HALF
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.provenance import recorded_body, use_weights
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.run_data import RunData, refuse_other_data
from hyperfl_flwr.runs.run_directory import is_simulation, read_manifest, read_metrics, settings_of
from hyperfl_flwr.runs.run_sources import method_of
from hyperfl_flwr.runs.validation import best_record, chooses_state, is_over
from hyperfl_flwr.server.federation import Federation
from hyperfl_flwr.server.handshake import Node
from strategies.engine.base import BaseStrategy
from strategies.engine.recorded import restore


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A run in its state after the last checkpoint.

    Attributes:
        run: Folder of the run.
        experiment: Identity of the run.
        config: Settings of the run, resolved.
        strategy: Strategy in its state after the checkpoint.
        arrays: Arrays of the shared groups, keyed `group/name`.
        data: Description of the training data.
        recipe: Network, input and classes of the models.
        simulated: Whether the clients' private state is in the run's folder, and not on their owners' nodes.
        is_complete: Whether the run has ended before `num-rounds` as planned, or has this as its best state.
    """

    run: Path
    experiment: str
    config: RunConfig
    strategy: BaseStrategy
    arrays: ArrayRecord
    data: RunData
    recipe: TargetRecipe
    simulated: bool
    is_complete: bool

    @property
    def round(self) -> int:
        """Round of the checkpoint."""
        return self.strategy.progress.round

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about the run."""
        if self.is_complete or self.round == self.config.num_rounds:
            return ()
        return (f"{self.run} has only reached round {self.round} of {self.config.num_rounds}",)

    def recipe_of(self, client: int | None) -> TargetRecipe:
        """Return the recipe of a client's model; None for that of a model that is the same for all clients."""
        return self.recipe if client is None else replace(self.recipe, target=self.config.of_client(client).target)


def restored(run: Path, changes: Mapping[str, Scalar] | None = None, *, best: bool = False) -> Restored:
    """Restore a run from a checkpoint.

    Args:
        run: Folder of the run.
        changes: Settings of this machine (`data-root`, `device`).
        best: Whether a complete run with `keep = best` is restored from its best checkpoint, and not from its last one.
            The clients' private state may be missing.

    Raises:
        RunDirectoryError: If the folder is not a run's, or has no checkpoint.
        HyperFLError: If the checkpoint is damaged, or the data set is needed and cannot be read.
    """
    method_of(run)  # or says that it is unknown
    manifest = read_manifest(run)
    config = resolved(RunConfig.from_flat(settings_of(run) | dict(changes or {})))
    use_weights(config.lpm.weights)
    checkpoints = Checkpoints(run / "checkpoints")
    if not (rounds := checkpoints.rounds()):
        raise RunDirectoryError(f"{run} has no checkpoint yet; wait for one, or resume the run")
    number = rounds[-1]
    if best and manifest["status"] == "completed" and chooses_state(settings_of(run)):
        number = best_record(read_metrics(run), TASKS[config.task], "aggregate").get("round", number)
    data = RunData.read(manifest)
    recipe = _recipe_of_nodes(run, config, data) if data.source == "nodes" else _recipe(config, data)
    strategy = new_strategy(config, _no_federation(recipe), experiment=manifest["experiment"], run_directory=str(run))
    arrays = restore(strategy, checkpoints, number)
    return Restored(
        run=run,
        experiment=manifest["experiment"],
        config=config,
        strategy=strategy,
        arrays=arrays,
        data=data,
        recipe=replace(recipe, body=recorded_body(manifest)),
        simulated=is_simulation(manifest),
        is_complete=manifest["status"] == "completed"
        and (number != rounds[-1] or is_over(strategy.progress, config.early_stopping)),
    )


def _recipe_of_nodes(run: Path, config: RunConfig, data: RunData) -> TargetRecipe:
    """Return the recipe of a run on data of the nodes' owners, from the settings that were agreed on with them.

    Without such settings, nodes normalise images in files and folders to [-1, 1]; how they normalise other data is
    unknown to the server.

    Raises:
        RunDirectoryError: If shape or normalisation of the data is unknown.
    """
    sample_format = config.data_settings().sample_format
    shape: tuple[int, ...] | None = sample_format.input_shape or data.input_shape
    normalisation = sample_format.normalisation
    if normalisation is None and data.are_files and shape is not None and len(shape) == 3:
        normalisation = HALF
    if shape is None or normalisation is None:
        missing = "data.input-shape" if shape is None else "data.normalisation"
        raise RunDirectoryError(
            f"{run} was trained on {data.title}, and only the nodes know how to read them, since the run was not given "
            f"{missing}; each owner can export the models of the node's clients there, with hyperfl export STATE_DIR"
        )
    mean, std = (part * (shape[0] // len(part)) for part in normalisation)  # one value may stand for all channels
    classes = sample_format.classes or data.classes or class_names("", data.num_classes or 0)
    scale: tuple[tuple[float, ...], ...] = ((), ())
    if config.task == REGRESSION.name:
        if sample_format.target_scale is None:
            raise RunDirectoryError(
                f"{run} has no data.target-scale, so the units of its predictions are unknown here; train a run with "
                f"data.target-scale"
            )
        scale = tuple(part * (len(classes) // len(part)) for part in sample_format.target_scale)
    return TargetRecipe(
        target=config.target, input_shape=shape, mean=mean, std=std, classes=classes, window=sample_format.window or (),
        task=config.task, target_mean=scale[0], target_std=scale[1],
    )  # fmt: skip


def _recipe(config: RunConfig, data: RunData) -> TargetRecipe:
    """Return the recipe of a run on the data set of its settings; the data set is loaded only if necessary.

    Raises:
        RunDirectoryError: If custom data are others than those that the run was trained on.
    """
    info, sample_format = DATASETS.get(config.dataset), config.data_settings().sample_format
    shape: tuple[int, ...]
    features: tuple[str, ...] = ()
    scale: tuple[tuple[float, ...], ...] = ((), ())
    if info and info.input_shape and info.num_classes and info.normalisation and not sample_format.normalisation:
        shape = info.input_shape
        mean, std = info.normalisation
        classes = sample_format.classes or class_names(config.dataset, info.num_classes)
    else:
        dataset = load_dataset(config.dataset, Path(config.data_root) if config.data_root else None, sample_format)
        if data.sha256:
            now = sample_digest(with_settings(config.data_settings(), dataset))
            refuse_other_data(data.sha256, now, config.dataset)
        shape, mean, std = dataset.input_shape, dataset.mean, dataset.std
        classes = dataset.classes or class_names(config.dataset, dataset.num_classes)
        scale = dataset.target_mean, dataset.target_std
        features = dataset.features
    return TargetRecipe(
        target=config.target, input_shape=shape, mean=mean, std=std, classes=classes, window=sample_format.window or (),
        task=config.task, target_mean=scale[0], target_std=scale[1], features=features,
    )  # fmt: skip


def _no_federation(recipe: TargetRecipe) -> Federation:
    """Return a federation without clients, with only the properties that building a strategy needs."""
    properties = {"input-shape": list(recipe.input_shape), "num-classes": len(recipe.classes)}
    return Federation([Node(id=0, partition=0, clients=[], properties=properties)])
