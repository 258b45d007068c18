"""A run's server as it was after its last checkpoint, from the run's folder; nothing in the folder is changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord

from hyperfl_flwr.agreement import Federation
from hyperfl_flwr.checkpoint import Checkpoints
from hyperfl_flwr.config import RunConfig
from hyperfl_flwr.data.class_names import class_names
from hyperfl_flwr.data.datasets import DATASETS, load_dataset
from hyperfl_flwr.data.reading import HALF
from hyperfl_flwr.errors import RunDirectoryError
from hyperfl_flwr.introduction import Node
from hyperfl_flwr.methods import METHODS, Method
from hyperfl_flwr.models.recipe import TargetRecipe
from hyperfl_flwr.own_model import find_kept
from hyperfl_flwr.recording import is_simulation, read_manifest, settings_of
from hyperfl_flwr.resolved import resolved
from hyperfl_flwr.scalars import Scalar
from strategies.base import BaseStrategy, Setting
from strategies.recorded import restore


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A run after its last checkpoint.

    Attributes:
        run: Its folder.
        experiment: Its identity.
        config: Its settings.
        method: Its method.
        strategy: As it was then.
        arrays: The shared groups, keyed `group/name`.
        recipe: What its models take.
        simulated: Whether the clients' private state lies in the folder, and not on nodes of their owners.
    """

    run: Path
    experiment: str
    config: RunConfig
    method: Method
    strategy: BaseStrategy
    arrays: ArrayRecord
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


def method_of(run: Path) -> tuple[str, Method]:
    """Return name and method of a run.

    Raises:
        RunDirectoryError: If the folder is no run folder, or this version does not know the method.
    """
    name = str(read_manifest(run)["settings"].get("method"))
    if name not in METHODS:
        raise RunDirectoryError(f"{run} is a run of {name!r}, which this version of hyperfl-flwr does not know")
    return name, METHODS[name]


def restored(run: Path, changes: Mapping[str, Scalar] | None = None) -> Restored:
    """Open a run that has a checkpoint.

    Args:
        run: Its folder.
        changes: Settings of this machine (`data-root`, `device`).

    Raises:
        RunDirectoryError: If the folder is no run folder, or has no checkpoint.
        HyperFLError: If the checkpoint is damaged, or data are missing that only the data set can tell.
    """
    _, method = method_of(run)
    manifest = read_manifest(run)
    config = resolved(RunConfig.from_flat(settings_of(run) | dict(changes or {}), methods=METHODS))
    find_kept(config.target, run)
    checkpoints = Checkpoints(run / "checkpoints")
    if not (rounds := checkpoints.rounds()):
        raise RunDirectoryError(f"{run} has no checkpoint yet; wait for one, or resume the run")
    simulated = is_simulation(manifest)
    recipe = _recipe(config, simulated=simulated)
    strategy = method.strategy(
        Setting(
            config=config,
            federation=_no_federation(recipe),
            reductions=method.client.shared,
            experiment=manifest["experiment"],
            run_directory=str(run),
        )
    )
    arrays = restore(strategy, checkpoints, rounds[-1])
    return Restored(
        run=run,
        experiment=manifest["experiment"],
        config=config,
        method=method,
        strategy=strategy,
        arrays=arrays,
        recipe=recipe,
        simulated=simulated,
    )


def _recipe(config: RunConfig, *, simulated: bool) -> TargetRecipe:
    """Return what the run's models take; the data are loaded only if nothing else tells.

    In a deployment the data are their owners', who normalise as agreed on, or images to [-1, 1].
    """
    info, reading = DATASETS.get(config.dataset), config.data_settings().reading
    shape: tuple[int, ...]
    if not simulated and reading.classes and reading.input_shape:
        shape, count = reading.input_shape, reading.input_shape[0]
        mean, std = (part * (count // len(part)) for part in reading.normalisation or HALF)
        classes = reading.classes
    elif info and info.input_shape and info.num_classes and info.normalisation and not reading.normalisation:
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
