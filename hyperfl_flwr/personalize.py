"""A run of IT-PFL-HN makes models for clients that it has never trained: the server's side, from the run's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from hyperfl_flwr.agreement import Federation, Node
from hyperfl_flwr.checkpoint import Checkpoints
from hyperfl_flwr.config import RunConfig, Scalar
from hyperfl_flwr.data.class_names import class_names
from hyperfl_flwr.data.datasets import DATASETS, load_dataset
from hyperfl_flwr.errors import RunDirectoryError
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.recipe import Recipe
from hyperfl_flwr.recording import read_manifest, settings_of
from strategies.base import Setting
from strategies.it_pfl import FINE_TUNING, ITPFL
from strategies.on_demand import Served, serve
from strategies.recorded import restore


@dataclass(frozen=True, kw_only=True)
class Source:
    """What models are made of.

    Attributes:
        config: The run's settings.
        strategy: As it was after the run's last checkpoint.
        encoder: Its parameters.
        recipe: What the models take.
        notes: What people should know of the run.
    """

    config: RunConfig
    strategy: ITPFL
    encoder: ArrayRecord
    recipe: Recipe
    notes: tuple[str, ...]

    def serve(self, grid: Grid) -> list[Served]:
        """Make a model for each novel node of a grid; see `strategies.on_demand.serve`."""
        return serve(grid, self.strategy, self.encoder, self.recipe, self.config.node_timeout)


def open_run(run: Path, changes: Mapping[str, Scalar] | None = None) -> Source:
    """Open a run that makes models on demand; nothing in its folder is changed.

    Args:
        run: Its folder.
        changes: Settings of this machine (`data-root`, `device`).

    Raises:
        RunDirectoryError: If the folder is no run folder, the method is another one, or no round of the second phase is
            in a checkpoint.
        HyperFLError: If the checkpoint is damaged, or data are missing that only the data set can tell.
    """
    method = METHODS.get(name := str(read_manifest(run)["settings"].get("method")))
    if method is None or not issubclass(method.strategy, ITPFL):
        raise RunDirectoryError(f"{run} is a run of {name}; only it-pfl makes models on demand")
    config = RunConfig.from_flat(settings_of(run) | dict(changes or {}), methods=METHODS)
    checkpoints = Checkpoints(run / "checkpoints")
    if not (rounds := checkpoints.rounds()):
        raise RunDirectoryError(f"{run} has no checkpoint yet; wait for one, or resume the run")
    input_shape, classes, mean, std = _samples(config)
    strategy = method.strategy(
        Setting(
            config=config,
            federation=_no_federation(input_shape, len(classes)),
            reductions=method.client.shared,
            experiment=read_manifest(run)["experiment"],
            run_directory=str(run),
        )
    )
    encoder = restore(strategy, checkpoints, rounds[-1])
    _refuse_first_phase(run, strategy)
    recipe = Recipe(
        target=config.target,
        input_shape=input_shape,
        mean=mean,
        std=std,
        classes=classes,
        pooling=config.it_pfl.pooling,
        descriptor_length=strategy.descriptor_dimension,
    )
    return Source(config=config, strategy=strategy, encoder=encoder, recipe=recipe, notes=_notes(run, strategy))


def _samples(config: RunConfig) -> tuple[tuple[int, ...], tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
    """Return shape, names of the classes, mean and std; the data are loaded only if nothing else tells."""
    info, reading = DATASETS.get(config.dataset), config.data_settings().reading
    if info and info.input_shape and info.num_classes and info.normalisation and not reading.normalisation:
        names = reading.classes or class_names(config.dataset, info.num_classes)
        return info.input_shape, names, *info.normalisation
    dataset = load_dataset(config.dataset, Path(config.data_root) if config.data_root else None, reading)
    names = dataset.classes or class_names(config.dataset, dataset.num_classes)
    return dataset.input_shape, names, dataset.mean, dataset.std


def _no_federation(input_shape: tuple[int, ...], num_classes: int) -> Federation:
    """Return what a strategy wants to know of nodes, without any clients."""
    properties = {"input-shape": list(input_shape), "num-classes": num_classes}
    return Federation([Node(id=0, partition=0, clients=[], properties=properties)])


def _refuse_first_phase(run: Path, strategy: ITPFL) -> None:
    if strategy.kept:
        return
    reached, wanted = strategy.progress.round, strategy.setting.config.it_pfl.fine_tune_rounds
    remedy = "resume the run to its end" if wanted else "run it with it-pfl.fine-tune-rounds above 0"
    raise RunDirectoryError(
        f"{run} has not tuned its hypernetwork to descriptors: its last checkpoint, after round {reached}, is of the "
        f"first phase; {remedy}"
    )


def _notes(run: Path, strategy: ITPFL) -> tuple[str, ...]:
    progress, config = strategy.progress, strategy.setting.config
    if progress.round == config.num_rounds:
        return ()
    done = progress.round - (progress.last_phase_after or 0)
    return (
        f"{run} has come to round {progress.round} of {config.num_rounds} only: {done} of "
        f"{config.it_pfl.fine_tune_rounds} rounds of {FINE_TUNING}",
    )
