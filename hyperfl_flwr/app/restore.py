"""A run's server as it was after its last checkpoint, from the run's folder; nothing in the folder is changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord

from hyperfl_flwr.app.methods import new_strategy
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import DATASETS, class_names, load_dataset
from hyperfl_flwr.data.sample_format import HALF
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.custom.provenance import find_kept
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import is_simulation, read_manifest, settings_of
from hyperfl_flwr.server.federation import Federation
from hyperfl_flwr.server.handshake import Node
from strategies.engine.base import BaseStrategy
from strategies.engine.recorded import restore


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A run after its last checkpoint.

    Attributes:
        run: Its folder.
        experiment: Its identity.
        config: Its settings.
        strategy: As it was then.
        arrays: The shared groups, keyed `group/name`.
        data: What it was trained on.
        recipe: What its models take.
        simulated: Whether the clients' private state lies in the folder, and not on nodes of their owners.
    """

    run: Path
    experiment: str
    config: RunConfig
    strategy: BaseStrategy
    arrays: ArrayRecord
    data: RunData
    recipe: TargetRecipe
    simulated: bool

    @property
    def round(self) -> int:
        """The checkpoint's round."""
        return self.strategy.progress.round

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of the run."""
        if self.round == self.config.num_rounds:
            return ()
        return (f"{self.run} has come to round {self.round} of {self.config.num_rounds} only",)


def method_of(run: Path) -> str:
    """Return the name of a run's method.

    Raises:
        RunDirectoryError: If the folder is no run folder, or this version does not know the method.
    """
    name = str(read_manifest(run)["settings"].get("method"))
    if name not in METHODS:
        raise RunDirectoryError(f"{run} is a run of {name!r}, which this version of hyperfl-flwr does not know")
    return name


def restored(run: Path, changes: Mapping[str, Scalar] | None = None) -> Restored:
    """Open a run that has a checkpoint.

    Args:
        run: Its folder.
        changes: Settings of this machine (`data-root`, `device`).

    Raises:
        RunDirectoryError: If the folder is no run folder, or has no checkpoint.
        HyperFLError: If the checkpoint is damaged, or data are missing that only the data set can tell.
    """
    method_of(run)  # or says that it is unknown
    manifest = read_manifest(run)
    config = resolved(RunConfig.from_flat(settings_of(run) | dict(changes or {})))
    find_kept(config.target, run)
    checkpoints = Checkpoints(run / "checkpoints")
    if not (rounds := checkpoints.rounds()):
        raise RunDirectoryError(f"{run} has no checkpoint yet; wait for one, or resume the run")
    data = RunData.read(manifest)
    recipe = _recipe_of_nodes(run, config, data) if data.source == "nodes" else _recipe(config)
    strategy = new_strategy(config, _no_federation(recipe), experiment=manifest["experiment"], run_directory=str(run))
    arrays = restore(strategy, checkpoints, rounds[-1])
    return Restored(
        run=run,
        experiment=manifest["experiment"],
        config=config,
        strategy=strategy,
        arrays=arrays,
        data=data,
        recipe=recipe,
        simulated=is_simulation(manifest),
    )


def _recipe_of_nodes(run: Path, config: RunConfig, data: RunData) -> TargetRecipe:
    """Return what the models take of a run on data that the nodes' owners have named: what was agreed on with them.

    Without an agreement the images in files and folders are normalised to [-1, 1], and other data in a way that the
    server does not learn.

    Raises:
        RunDirectoryError: If the run's folder does not tell it.
    """
    reading = config.data_settings().reading
    shape: tuple[int, ...] | None = reading.input_shape or data.input_shape
    normalisation = reading.normalisation
    if normalisation is None and data.are_files and shape is not None and len(shape) == 3:
        normalisation = HALF
    if shape is None or normalisation is None:
        missing = "data.input-shape" if shape is None else "data.normalisation"
        raise RunDirectoryError(
            f"{run} was trained on {data.title}; how they are read only the nodes know, since the run was not given "
            f"{missing}: each owner can export the models of the node's clients there, with hyperfl export STATE_DIR"
        )
    mean, std = (part * (shape[0] // len(part)) for part in normalisation)
    classes = reading.classes or data.classes or class_names("", data.num_classes or 0)
    return TargetRecipe(target=config.target, input_shape=shape, mean=mean, std=std, classes=classes)


def _recipe(config: RunConfig) -> TargetRecipe:
    """Return what the models take of a run on the data set of its settings, which is loaded only if it has to be."""
    info, reading = DATASETS.get(config.dataset), config.data_settings().reading
    shape: tuple[int, ...]
    if info and info.input_shape and info.num_classes and info.normalisation and not reading.normalisation:
        shape = info.input_shape
        mean, std = info.normalisation
        classes = reading.classes or class_names(config.dataset, info.num_classes)
    else:
        dataset = load_dataset(config.dataset, Path(config.data_root) if config.data_root else None, reading)
        shape, mean, std = dataset.input_shape, dataset.mean, dataset.std
        classes = dataset.classes or class_names(config.dataset, dataset.num_classes)
    return TargetRecipe(target=config.target, input_shape=shape, mean=mean, std=std, classes=classes)


def _no_federation(recipe: TargetRecipe) -> Federation:
    """Return what a strategy wants to know of nodes, without any clients."""
    properties = {"input-shape": list(recipe.input_shape), "num-classes": len(recipe.classes)}
    return Federation([Node(id=0, partition=0, clients=[], properties=properties)])
