"""A novel client and the server that makes its model, in one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clients.novel.on_demand import RELEASE, NovelOwner, notes_on, samples_of
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.personalize import open_run
from hyperfl_flwr.config.node_config import NOVEL_DATA, NOVEL_DELTA, NOVEL_EPSILON, NOVEL_OUTPUT, SIMULATED
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.models.standalone import FACTS, PARAMETERS, SCRIPT
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from strategies.novel.on_demand import Served


@dataclass(frozen=True, kw_only=True)
class Personalized:
    """What came of it.

    Attributes:
        served: What the server saw and sent.
        notes: What the novel client's owner should know.
    """

    served: Served
    notes: tuple[str, ...]


def personalize(run: Path, owner: NovelOwner, changes: Mapping[str, Scalar]) -> Personalized:
    """Play the novel client and the server; the owner's output folder gets what the client keeps.

    All that can be wrong with the owner's wishes is found before a message is sent.

    Args:
        run: The folder of a run.
        owner: The novel client's.
        changes: Settings of this machine (`data-root`, `device`).

    Raises:
        HyperFLError: If the run makes no models on demand, the samples do not fit it, or the output folder is in use.
    """
    source = open_run(run, changes)
    notes = (*source.notes, *notes_on(owner, samples_of(owner, source.recipe)))
    refuse_finished(owner.output)
    node: dict[str, Scalar] = {
        SIMULATED: True,
        NOVEL_DATA: str(owner.data),
        NOVEL_OUTPUT: str(owner.output),
        "device": str(owner.device),
    }
    if owner.epsilon is not None and owner.delta is not None:
        node |= {NOVEL_EPSILON: owner.epsilon, NOVEL_DELTA: owner.delta}
    (served,) = source.serve(InProcessGrid(app, 1, {}, node))
    return Personalized(served=served, notes=notes)


def refuse_finished(output: Path) -> None:
    """Check that a folder is new, empty, or holds a descriptor whose model has not been used yet.

    Raises:
        RunDirectoryError: If it is in use.
    """
    if output.exists() and not output.is_dir():
        raise RunDirectoryError(f"the output directory {output} exists and is no directory; choose another one")
    unfinished = {RELEASE, PARAMETERS, FACTS, SCRIPT}  # predictions are written last
    if output.is_dir() and any(path.name not in unfinished for path in output.iterdir()):
        raise RunDirectoryError(f"the output directory {output} exists and is not empty; choose another one")
