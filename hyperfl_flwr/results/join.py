"""Join a finished run as a new client: train only the client's private parts; the shared parameters stay constant.

The shared parameters come from the run's folder, or in a deployment from a file that the operator has written
(`hyperfl export RUN --shared`). The file contains nothing private, and the settings that the training needs.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from clients.engine.base import BaseClient
from clients.engine.context import ClientContext
from clients.novel.labelled import labelled_data, labelled_dataset
from hyperfl_flwr.app.joining import has_new_clients
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.restore import Restored, restored
from hyperfl_flwr.config.joining import inherited, joining_config
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.arithmetic import set_arithmetic
from hyperfl_flwr.core.errors import HyperFLError, RunDirectoryError, StateError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.rng import numpy_generator, torch_generator
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import Task
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.data.grouped_split import AUTO
from hyperfl_flwr.data.sample_format import title_of
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.models.layers.dropout import seed_dropout
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.provenance import refuse_other_body
from hyperfl_flwr.models.standalone import write_model
from hyperfl_flwr.node.private_state import INITIAL, PrivateState
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.packing import unpack_arrays
from hyperfl_flwr.runs.run_directory import refuse_used_directory


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Shared parameters of a run, with all that a new client needs to join it.

    Attributes:
        config: The run's settings that a joining client takes over; all other settings have their defaults.
        arrays: Arrays of the shared groups, keyed `group/name`.
        recipe: Network, input and classes of the models.
        experiment: Identity of the run.
        round: Round of the checkpoint.
    """

    config: RunConfig
    arrays: SharedArrays
    recipe: TargetRecipe
    experiment: str
    round: int


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Result of joining a run.

    Attributes:
        task: What the client's model predicts.
        score_before: Main score on the client's test data with initial private parts.
        score_after: The same after training them.
        train_examples: Number of training samples.
        test_examples: Number of test samples.
        seconds: Duration of the training.
        files: Paths of the model's files.
        notes: Notes for the user about the data.
    """

    task: Task
    score_before: float
    score_after: float
    train_examples: int
    test_examples: int
    seconds: float
    files: list[Path]
    notes: tuple[str, ...]


def shared_of(source: Path, changes: Mapping[str, Scalar] | None = None) -> Shared:
    """Read the shared parameters of a run, from its folder or from a file written by `write_shared`.

    Raises:
        RunDirectoryError: If clients cannot join a run of this method.
        HyperFLError: If a file is missing or damaged.
    """
    if source.suffix == ".safetensors":
        return _read(source)
    found = restored(source, changes)
    _refuse_others(found)
    return Shared(
        config=resolved(joining_config(found.config.flat())),
        arrays=unpack_arrays(found.arrays),
        recipe=found.recipe,
        experiment=found.experiment,
        round=found.round,
    )


def _refuse_others(found: Restored) -> None:
    if not client_of(found.config.method).can_join:
        able = ", ".join(name for name in METHODS if client_of(name).can_join)
        served = " or ".join(name for name in METHODS if has_new_clients(name))
        raise RunDirectoryError(
            f"{found.run} is a run of {found.config.method}, which a client cannot join by training private parts "
            f"only; use a run of {able}, or the folder of a run of {served}, whose server takes part"
        )


def write_shared(shared: Shared, output: Path) -> None:
    """Write the shared parameters of a run to one file, with all that a new client needs to join the run.

    Raises:
        RunDirectoryError: If the file exists, does not end with .safetensors, or cannot be written.
    """
    if is_user_code(shared.config.method):
        raise RunDirectoryError(
            f"the file would lack the code of {shared.config.method}, which a client needs to join; join from the "
            f"run's folder instead of a file"
        )
    if output.suffix != ".safetensors" or output.exists():
        problem = "exists" if output.exists() else "does not end with .safetensors"
        raise RunDirectoryError(f"the output {output} {problem}; choose another file")
    settings = inherited(shared.config.flat())
    entries = {"settings": settings, "experiment": shared.experiment, "round": shared.round, **shared.recipe.values()}
    tensors = {key: torch.tensor(value) for key, value in shared.arrays.items()}
    data = save(tensors, metadata={"format": "pt", **{name: json.dumps(value) for name, value in entries.items()}})
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, data, mode=0o600)
    except OSError as error:
        raise RunDirectoryError(f"{output} cannot be written: {error}; choose another output") from None


def _read(path: Path) -> Shared:
    try:
        with safe_open(path, framework="np") as file:
            entries = {name: json.loads(text) for name, text in (file.metadata() or {}).items() if name != "format"}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        if is_user_code(str(entries["settings"].get("method"))):  # the file must not choose code to run
            raise ValueError("its method is not a built-in one")
        return Shared(
            config=resolved(joining_config(entries["settings"])),
            arrays=arrays,
            recipe=TargetRecipe.of(
                {each.name: entries[each.name] for each in fields(TargetRecipe) if each.name in entries}
            ),
            experiment=str(entries["experiment"]),
            round=int(entries["round"]),
        )
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error}; write it with `hyperfl export RUN --shared`") from None
    # The file comes from another party: any malformed content must end in this one error.
    except (
        SafetensorError, KeyError, ValueError, AttributeError, TypeError, RecursionError, HyperFLError,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())
        raise StateError(
            f"{path} is damaged or not a file of `hyperfl export RUN --shared` ({type(error).__name__}: {reason}); "
            f"write it again"
        ) from None


def join(
    shared: Shared, dataset: str, output: Path, rounds: int, device: torch.device, *, grouping: str = AUTO
) -> Joined:
    """Train a new client's private parts on its own labelled data, and write its model.

    Args:
        shared: Shared parameters of the run to join.
        dataset: `npz:FILE`, `csv:FILE` or `folder:PATH`; the client trains on all training samples, and is tested on
            the others.
        output: Folder of the result, new or empty.
        rounds: Number of local rounds.
        device: Device for training.
        grouping: What keeps samples together in one part, see `data.group-by`.

    Returns:
        The scores before and after training, and the model's files.

    Raises:
        HyperFLError: If the data do not fit, or the folder is in use.
    """
    refuse_used_directory(output)
    refuse_other_body(shared.recipe.target, shared.recipe.body)
    member = _member(shared, labelled_data(dataset, shared.recipe, grouping, shared.config.weighting), output, device)
    data = member.context.data
    try:
        member.receive(shared.arrays, INITIAL)
    except ValueError as error:
        raise StateError(f"the shared parameters do not fit a {shared.config.target} network: {error}") from None
    # What is shared must stay, running statistics among it; `join` switches what it trains.
    member.set_mode(training=False)
    seed_dropout(member.networks(), torch_generator(shared.config.seed, "joining"))
    before = evaluate(member.predictor(), data.test_images, data.test_labels)
    began = time.perf_counter()
    member.join(rounds, numpy_generator(shared.config.seed, "joining"))
    seconds = time.perf_counter() - began
    member.set_mode(training=False)
    after = evaluate(member.predictor(), data.test_images, data.test_labels)
    output.mkdir(mode=0o700, parents=True, exist_ok=True)
    about: dict[str, Any] = {
        "state": "joined", "method": shared.config.method, "experiment": shared.experiment, "round": shared.round,
        "dataset": title_of(dataset), f"{after.task.score}_before": before.score, after.task.score: after.score,
        "train_examples": len(data.train_labels), "test_examples": len(data.test_labels), "rounds": rounds,
        "seconds": seconds,
    }  # fmt: skip
    return Joined(
        task=after.task,
        score_before=before.score,
        score_after=after.score,
        train_examples=len(data.train_labels),
        test_examples=len(data.test_labels),
        seconds=seconds,
        files=write_model(output, member.target_state(), shared.recipe, about),
        notes=labelled_dataset(dataset, shared.recipe, grouping).notes,
    )


def _member(shared: Shared, data: ClientData, output: Path, device: torch.device) -> BaseClient:
    set_arithmetic(shared.config.precision, deterministic=shared.config.deterministic, device=device)
    return client_of(shared.config.method)(
        ClientContext(
            config=shared.config,
            client=0,
            data=data.to(device),
            device=device,
            state=PrivateState(output, shared.experiment, 0),  # joining stores no private state
            mean=shared.recipe.mean,
            std=shared.recipe.std,
            classes=shared.recipe.classes,
            target_mean=shared.recipe.target_mean,
            target_std=shared.recipe.target_std,
        )
    )
