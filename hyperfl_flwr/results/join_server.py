"""Join a finished run of a server's hypernetwork as a new client, with the client and the server in one process."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from clients.novel.labelled import labelled_dataset
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.joining import has_new_clients, open_joinable
from hyperfl_flwr.config.node_config import JOIN_DATA, NOVEL_OUTPUT, SIMULATED
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import TASKS, Task
from hyperfl_flwr.data.grouped_split import AUTO
from hyperfl_flwr.models.standalone import FACTS, PARAMETERS, SCRIPT
from hyperfl_flwr.runs.run_directory import refuse_used_directory
from hyperfl_flwr.runs.run_sources import method_of
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from strategies.novel.joining import JoinedClient


@dataclass(frozen=True, kw_only=True)
class JoinedByServer:
    """Result of joining a run with its server.

    Attributes:
        task: What the client's model predicts.
        score_before: Main score on the client's test data of the model that the first embedding generates.
        score_generated: The same of the trained embedding.
        score: The same after local training of that model; it is the one that is kept.
        seconds: Duration of the exchange.
        served: Data that the server saw and sent.
        notes: Notes for the user about the run.
        files: Paths of the model's files.
    """

    task: Task
    score_before: float
    score_generated: float
    score: float
    seconds: float
    served: JoinedClient
    notes: tuple[str, ...]
    files: list[Path]


def joins_with_server(source: Path) -> bool:
    """Return whether clients join a run, of this folder or file, with its server.

    Raises:
        RunDirectoryError: If the folder is not a run's.
    """
    if source.suffix == ".safetensors":
        return False
    name = method_of(source)
    return not is_user_code(name) and has_new_clients(name)


def join_with_server(
    run: Path,
    dataset: str,
    output: Path,
    rounds: int,
    device: torch.device,
    *,
    target: str = "",
    rate: float | None = None,
    changes: Mapping[str, Scalar] | None = None,
    grouping: str = AUTO,
) -> JoinedByServer:
    """Train an embedding for a new client with labelled data, and write the client's model.

    The run, the samples and the output folder are checked before a message is sent.

    Args:
        run: Folder of the trained run; nothing in it is changed.
        dataset: `npz:FILE`, `csv:FILE` or `folder:PATH`; the client trains on all training samples, and is tested on
            the others.
        output: Folder of the result, new or empty.
        rounds: Number of steps of the embedding.
        device: Device for training.
        target: Target network of the client; empty if the run has only one.
        rate: Learning rate of the embedding; None for that of the run's embeddings.
        changes: Settings of this machine (`data-root`, `device`).
        grouping: What keeps samples together in one part, see `data.group-by`.

    Raises:
        HyperFLError: If clients cannot join the run, the data do not fit, or the folder is in use.
    """
    refuse_used_directory(output)
    source = open_joinable(run, target, rate, changes)
    found = labelled_dataset(dataset, source.recipe, grouping)
    node: dict[str, Scalar] = {
        SIMULATED: True,
        JOIN_DATA: dataset,
        NOVEL_OUTPUT: str(output),
        "device": str(device),
        "group-by": grouping,
    }
    began = time.perf_counter()
    (served,) = source.join(InProcessGrid(app, 1, {}, node), rounds)
    facts, task = json.loads((output / FACTS).read_text()), TASKS[source.recipe.task]
    return JoinedByServer(
        task=task,
        score_before=facts[f"{task.score}_before"],
        score_generated=facts[f"{task.score}_generated"],
        score=facts[task.score],
        seconds=time.perf_counter() - began,
        served=served,
        notes=(*source.notes, *found.notes),
        files=[output / name for name in (PARAMETERS, FACTS, SCRIPT) if (output / name).exists()],
    )
