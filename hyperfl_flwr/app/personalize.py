"""Create models for novel clients with a trained run of IT-PFL-HN: the server's side, from the run's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from hyperfl_flwr.app.methods import strategy_of
from hyperfl_flwr.app.restore import restored
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.methods.it_pfl import ITPFLConfig
from hyperfl_flwr.models.model_spec import Recipe
from hyperfl_flwr.runs.run_sources import method_of
from strategies.it_pfl import FINE_TUNING, ITPFL
from strategies.novel.on_demand import PersonalizedModel, serve


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trained run that creates models on demand.

    Attributes:
        config: The run's settings.
        strategy: Strategy in its state after the run's last checkpoint.
        encoder: Parameters of the encoder.
        recipe: Network, input and classes of the models, and the descriptor's pooling and length.
        notes: Notes for the user about the run.
    """

    config: RunConfig
    strategy: ITPFL
    encoder: ArrayRecord
    recipe: Recipe
    notes: tuple[str, ...]

    def serve(self, grid: Grid) -> list[PersonalizedModel]:
        """Create a model for each novel client of a grid; see `strategies.novel.on_demand.serve`."""
        return serve(grid, self.strategy, self.encoder, self.recipe, self.config.node_timeout)


def open_run(run: Path, changes: Mapping[str, Scalar] | None = None) -> Source:
    """Open a run that creates models on demand; nothing in its folder is changed.

    Args:
        run: Folder of the run.
        changes: Settings of this machine (`data-root`, `device`).

    Raises:
        RunDirectoryError: If the folder is not a run's, the method is not it-pfl, or no round of the second phase is in
            a checkpoint.
        HyperFLError: If the checkpoint is damaged, or the data set is needed and cannot be read.
    """
    name = method_of(run)
    if is_user_code(name) or not issubclass(strategy_of(name), ITPFL):
        raise RunDirectoryError(f"{run} is a run of {name}; only it-pfl makes models on demand")
    found = restored(run, changes)
    strategy, config = found.strategy, found.config
    if not isinstance(strategy, ITPFL):
        raise ValueError("the strategy of it-pfl must be strategies.it_pfl.ITPFL; correct the method's row")
    _refuse_first_phase(run, strategy)
    recipe = Recipe(
        **vars(found.recipe),
        pooling=config.section(ITPFLConfig).pooling,
        descriptor_length=strategy.descriptor_dimension,
    )
    return Source(config=config, strategy=strategy, encoder=found.arrays, recipe=recipe, notes=_notes(run, strategy))


def _refuse_first_phase(run: Path, strategy: ITPFL) -> None:
    if strategy.kept:
        return
    fine_tune_rounds = strategy.context.config.section(ITPFLConfig).fine_tune_rounds
    remedy = "resume the run to its end" if fine_tune_rounds else "run it with it-pfl.fine-tune-rounds above 0"
    raise RunDirectoryError(
        f"{run} has not tuned its hypernetwork on descriptors: its last checkpoint, after round "
        f"{strategy.progress.round}, is of the first phase; {remedy}"
    )


def _notes(run: Path, strategy: ITPFL) -> tuple[str, ...]:
    progress, config = strategy.progress, strategy.context.config
    if progress.round == config.num_rounds:
        return ()
    done = progress.round - (progress.last_phase_after or 0)
    return (
        f"{run} has only reached round {progress.round} of {config.num_rounds}: {done} of "
        f"{config.section(ITPFLConfig).fine_tune_rounds} rounds of {FINE_TUNING}",
    )
