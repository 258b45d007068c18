"""Create a model for a novel client, with the client and the server in one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clients.novel.on_demand import RECORD, RELEASE, NovelOwner, notes_on, refuse_other_model, samples_of
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.personalize import open_run
from hyperfl_flwr.config.node_config import NOVEL_DATA, NOVEL_DELTA, NOVEL_EPSILON, NOVEL_OUTPUT, SIMULATED
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.models.standalone import FACTS, PARAMETERS, SCRIPT
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from strategies.novel.on_demand import PersonalizedModel


@dataclass(frozen=True, kw_only=True)
class Personalized:
    """Result of creating a model for a novel client.

    Attributes:
        served: Data that the server saw and sent.
        notes: Notes for the novel client's owner.
    """

    served: PersonalizedModel
    notes: tuple[str, ...]


def personalize(run: Path, owner: NovelOwner, changes: Mapping[str, Scalar]) -> Personalized:
    """Run the novel client and the server in this process; the client's files are written to the owner's output folder.

    The run, the samples and the output folder are checked before a message is sent.

    Args:
        run: Folder of the trained run.
        owner: Data, privacy, output and device of the novel client.
        changes: Settings of this machine (`data-root`, `device`).

    Raises:
        HyperFLError: If the run cannot create models on demand, the samples do not fit it, or the output folder is in
            use.
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
    """Check that a folder is new, empty, or holds only the files of an unfinished request, which can be repeated.

    Raises:
        RunDirectoryError: If the folder is in use.
    """
    if output.exists() and not output.is_dir():
        raise RunDirectoryError(f"the output folder {output} exists and is not a folder; choose another one")
    unfinished = {RELEASE, RECORD, PARAMETERS, FACTS, SCRIPT}  # predictions are written last
    if output.is_dir() and any(path.name not in unfinished for path in output.iterdir()):
        raise RunDirectoryError(f"the output folder {output} exists and is not empty; choose another one")
    refuse_other_model(output)  # other commands give their models the same names
