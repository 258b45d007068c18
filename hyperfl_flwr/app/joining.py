"""Let clients join a finished run of a server's hypernetwork: the server's side, from the run's folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.serverapp import Grid

from hyperfl_flwr.app.methods import strategy_of
from hyperfl_flwr.app.restore import restored
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.runs.run_sources import method_of
from strategies.novel.joining import JoinedClient, join_clients
from strategies.pfedhn import PFedHN


@dataclass(frozen=True, kw_only=True)
class JoinableRun:
    """A trained run that clients can join by an embedding on its server.

    Attributes:
        strategy: Strategy in its state after the run's last checkpoint.
        recipe: Network, input and classes of the new clients' models.
        timeout: Longest wait for nodes, in seconds.
        notes: Notes for the user about the run.
    """

    strategy: PFedHN
    recipe: TargetRecipe
    timeout: float
    notes: tuple[str, ...]

    def join(self, grid: Grid, rounds: int) -> list[JoinedClient]:
        """Let all joining nodes of a grid join; see `strategies.novel.joining.join_clients`."""
        return join_clients(grid, self.strategy, self.recipe, rounds, self.timeout)


def has_new_clients(method: str) -> bool:
    """Return whether clients can join a finished run of a method by an embedding on its server."""
    strategy = strategy_of(method)
    return issubclass(strategy, PFedHN) and strategy.has_new_clients


def open_joinable(
    run: Path, target: str = "", rate: float | None = None, changes: Mapping[str, Scalar] | None = None
) -> JoinableRun:
    """Open a run that clients can join; nothing in its folder is changed.

    Args:
        run: Folder of the run.
        target: Target network of the new clients; empty if the run has only one.
        rate: Learning rate of the new embeddings; None for that of the run's embeddings.
        changes: Settings of this machine (`data-root`, `device`).

    Raises:
        RunDirectoryError: If the folder is not a run's, or clients cannot join a run of its method in this way.
        ConfigError: If the run does not have the target network, or has several and none is named.
        HyperFLError: If the checkpoint is damaged, or the data set is needed and cannot be read.
    """
    name = method_of(run)
    if is_user_code(name):
        raise RunDirectoryError(
            f"{run} is a run of {name}; with the server's help, clients can join only runs of built-in methods"
        )
    if not has_new_clients(name):
        able = ", ".join(each for each in METHODS if has_new_clients(each))
        raise RunDirectoryError(
            f"{run} is a run of {name}, whose server has no embeddings of the clients; use a run of {able}"
        )
    found = restored(run, changes)
    if not isinstance(found.strategy, PFedHN):
        raise ValueError(f"the strategy of {name} must be a PFedHN; correct the method's row")
    if rate is not None:
        found.strategy.server.rates = replace(found.strategy.server.rates, embedding_learning_rate=rate)
    known = list(dict.fromkeys(found.config.targets))
    if target not in known and (target or len(known) > 1):
        problem = f"has no network {target}" if target else "has several networks"
        raise ConfigError(f"{run} {problem}; choose one with --model, of {', '.join(known)}")
    return JoinableRun(
        strategy=found.strategy,
        recipe=replace(found.recipe, target=target or known[0]),
        timeout=found.config.node_timeout,
        notes=found.notes,
    )
