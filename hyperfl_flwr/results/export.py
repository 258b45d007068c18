"""Export a client's model from a run's folder, or from a node's folder of private state, as plain tensors.

A run measures two states of a client's model (docs/concepts.md). Either can be exported where it is stored:

- `personalized`: the model after the client's last local training; with `keep = best` after that of its best round by
  validation data. Its accuracy in `metrics.jsonl` is the client's `personalized_accuracy` of that round. The private
  state of some methods, such as `hyperfl` and `local`, and of all with `keep = best`, contains this model; a node
  stores it for every method (`hyperfl_flwr.node.saved_models`).
- `aggregate`: the model that the client receives: the shared parameters of the last checkpoint, with private parts
  where they are not a whole model. Its accuracy is the `aggregate_accuracy` after the last round. A simulation's folder
  contains it. The global model, without a client, is with `keep = best` that of the best round.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from clients.engine.base import BaseClient
from clients.engine.best_model import BestModel
from clients.engine.context import ClientContext
from hyperfl_flwr.app.methods import client_of, strategy_of
from hyperfl_flwr.app.restore import Restored, restored
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.rng import seed_for
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.data.digests import Digests
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.data.sample_format import title_of
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.standalone import file_names, source_folder, write_model
from hyperfl_flwr.node.private_state import INITIAL, PrivateState
from hyperfl_flwr.node.saved_models import KeptModel
from hyperfl_flwr.results.stored_models import stored_model_folder
from hyperfl_flwr.runs.run_directory import read_metrics

State = Literal["personalized", "aggregate"]

_LINES = {"personalized": "client", "aggregate": "client-aggregate"}
"""Kind of line in metrics.jsonl about a client's model, by state."""

_ROUNDED = (
    "the run computed in bfloat16 (precision = bf16), the exported model computes in float32: its accuracy can differ "
    "slightly from the recorded one"
)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A model with its description.

    Attributes:
        tensors: Parameters and buffers of the target network by name.
        recipe: Network, input and classes, as needed to use the model.
        client: Id of the client; None for a model that is the same for all clients.
        state: `personalized` or `aggregate`, see the module's docstring.
        round: Federated round after which the model had these values.
        method: Method of the run.
        dataset: Data set of the run.
        experiment: Identity of the run.
        score: Main score on the client's test data as recorded by the run; None if it was not recorded.
        notes: Notes for the user.
        trained_on: Digests of the training samples as stored by a node; None if they are not stored with the model.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    recipe: TargetRecipe
    client: int | None
    state: State
    round: int
    method: str
    dataset: str
    experiment: str
    score: float | None
    notes: tuple[str, ...] = ()
    trained_on: Digests | None = field(default=None, repr=False)

    def about(self) -> dict[str, Any]:
        """Return the entries of a model's JSON description, without the recipe."""
        names = ("client", "state", "round", "method", "dataset", "experiment")
        return {**{name: getattr(self, name) for name in names}, TASKS[self.recipe.task].score: self.score}

    def __str__(self) -> str:
        model = "the global model" if self.client is None else f"client {self.client}'s model"
        moment = "after its local training in" if self.state == "personalized" else "as aggregated after"
        task = TASKS[self.recipe.task]
        known = "" if self.score is None else f"; its test {task.score_title} was {task.text(self.score)}"
        return f"{model} of {self.method}, {moment} round {self.round}{known}"


def model_of_run(
    run: Path, client: int | None, state: State | None = None, changes: Mapping[str, Scalar] | None = None
) -> Exported:
    """Return a client's model, or the global one, from a run's folder.

    Args:
        run: The folder.
        client: The client's id; None for the global model, which only some methods have.
        state: State of the model; None for `personalized` if the private state contains it, else `aggregate`.
        changes: Settings of this machine (`data-root`).

    Raises:
        RunDirectoryError: If the run has no such model, or does not store it in its folder.
        HyperFLError: If a file is missing or damaged.
    """
    found = restored(run, changes, best=client is None)
    if client is None:
        return _global_model(found, state)
    if not 0 <= client < found.config.num_clients:
        raise RunDirectoryError(f"--client must be 0 to {found.config.num_clients - 1} for {run}, got {client}")
    _refuse_absent(found, client)
    _refuse_more_than_a_network(found, client)
    member = restored_client(found, client)
    version = found.strategy.progress.versions[client]
    if found.config.keep == "best" and state != "aggregate":
        best = BestModel.of(_private(member, version))
        return _exported(found, client, "personalized", best.round, best.tensors)
    # Only private state can contain the model after local training; the server never receives it.
    keeps = state != "aggregate" and member.kept_groups(found.config)
    own = member.personalized_model(_private(member, version)) if keeps else None
    if own is None:
        if state == "personalized":
            raise RunDirectoryError(
                f"{run} does not hold the model of client {client} after local training: "
                f"{member.why_no_model(found.config)}; leave out --state personalized for the received model, or run "
                f"it again with keep=best, which keeps each client's best model, too"
            )
        member.receive(found.strategy.evaluated(found.arrays, client), version)
        return _exported(found, client, "aggregate", found.round, member.received_state())
    return _exported(found, client, "personalized", version, own)


def _global_model(found: Restored, state: State | None) -> Exported:
    """Return the model that is the same for all clients."""
    if "global" not in strategy_of(found.config.method).novel_modes:
        raise RunDirectoryError(
            f"{found.config.method} has no model that is the same for all clients; name one with --client, "
            f"0 to {found.config.num_clients - 1}"
        )
    if state == "personalized":
        raise RunDirectoryError("--state personalized requires a client; give --client, or leave out --state")
    member = restored_client(found, 0)
    member.receive(found.strategy.evaluated(found.arrays, 0), INITIAL)
    return _exported(found, None, "aggregate", found.round, member.received_state())


def _refuse_absent(found: Restored, client: int) -> None:
    """Refuse a client whose private parts are not in the run's folder."""
    private = (*client_of(found.config.method).private, *(("best model",) if found.config.keep == "best" else ()))
    if private and not found.simulated:
        raise RunDirectoryError(
            f"the private parts of client {client} ({', '.join(private)}) are on its node; the node's owner can export "
            f"the model there: hyperfl export STATE_DIR --client {client} --run {found.experiment}"
        )
    if private and found.strategy.progress.versions.get(client, INITIAL) == INITIAL:
        raise RunDirectoryError(
            f"client {client} has not been trained up to round {found.round}; resume the run, with more rounds if it "
            f"is complete"
        )


def _refuse_more_than_a_network(found: Restored, client: int) -> None:
    """Refuse a client whose predictions are not those of the target network alone."""
    if not client_of(found.config.method).is_network:
        raise RunDirectoryError(
            f"the model of client {client} of {found.config.method} cannot be exported: its predictions also need the "
            f"client's training samples; export the global network, without --client"
        )


def restored_client(found: Restored, client: int) -> BaseClient:
    """Build a client of a run on the CPU, without data, to restore its model."""
    shape, no_labels = found.recipe.input_shape, torch.zeros(0, dtype=torch.int64)
    no_images = torch.zeros(0, *shape)
    data = ClientData(
        train_images=no_images, train_labels=no_labels, test_images=no_images, test_labels=no_labels, augmentation=None,
        num_classes=len(found.recipe.classes),
    )  # fmt: skip
    return client_of(found.config.method)(
        ClientContext(
            config=found.config.of_client(client), client=client, data=data, device=torch.device("cpu"),
            state=PrivateState(found.run / "clients", found.experiment, client),
            mixing_key=seed_for(found.config.seed, "mixing").to_bytes(8, "big"),  # the key of a simulation
            mean=found.recipe.mean, std=found.recipe.std, round=found.round, classes=found.recipe.classes,
            target_mean=found.recipe.target_mean, target_std=found.recipe.target_std,
        )
    )  # fmt: skip


def _private(member: BaseClient, version: int) -> Mapping[str, Tensor]:
    return {key: torch.tensor(value) for key, value in member.context.state.load(version).items()}


def _exported(
    found: Restored, client: int | None, state: State, server_round: int, tensors: Mapping[str, Tensor]
) -> Exported:
    return Exported(
        tensors=tensors,
        recipe=found.recipe_of(client),
        client=client,
        state=state,
        round=server_round,
        method=found.config.method,
        dataset=found.data.title,
        experiment=found.experiment,
        score=None if client is None else _recorded(found, client, state, server_round),
        notes=(*found.notes, *([_ROUNDED] if found.config.precision == "bf16" else [])),
    )


def _recorded(found: Restored, client: int, state: State, server_round: int) -> float | None:
    """Return the recorded score of a client's model; None if it was not recorded."""
    kind, name = _LINES[state], f"{state}_{TASKS[found.config.task].score}"
    for line in read_metrics(found.run):
        if (line["kind"], line["round"], line.get("client")) == (kind, server_round, client):
            value = float(line.get(name, math.nan))  # a node with max-epsilon sends no scores
            return None if math.isnan(value) else value  # NaN: the client has no test data
    return None


def model_of_node(states: Path, client: int, experiment: str | None = None) -> Exported:
    """Return the model that a node has stored for one of its clients.

    Args:
        states: The node's folder of private state (`state-dir`), or its folder of one run.
        client: The client's id.
        experiment: Identity of the run, or its first digits; None if there is only one run.

    Raises:
        RunDirectoryError: If there is no such model, or several runs have one.
        StateError: If the model's file is damaged.
    """
    folder = stored_model_folder(states, client, experiment)
    kept = KeptModel.read(folder)
    return Exported(
        tensors={name: torch.tensor(value) for name, value in kept.tensors.items()},
        recipe=kept.recipe,
        client=kept.client,
        state="personalized",
        round=kept.round,
        method=kept.method,
        dataset=title_of(kept.dataset),  # earlier versions stored a path here, which must not leave the node
        experiment=kept.experiment,
        score=None if math.isnan(kept.score) else kept.score,
        trained_on=kept.trained_on if len(kept.trained_on) else None,
    )


def check_output(output: Path) -> None:
    """Refuse an output of `write_exported` with a name that is not allowed, or files that exist."""
    if output.suffix != ".safetensors":
        raise RunDirectoryError(f"the output's name must end with .safetensors, got {output.name}")
    if unfit := sorted(set(re.findall(r"[^\w .+-]", output.stem))):  # the name is written into the script's code
        raise RunDirectoryError(f"the output's name must not contain {' '.join(unfit)}, got {output.name}")
    names = (*file_names(output.stem), source_folder(output.stem))
    if used := [name for name in names if (output.parent / name).exists()]:
        raise RunDirectoryError(f"{output.parent} already holds {', '.join(used)}; choose another output")


def write_exported(found: Exported, output: Path) -> list[Path]:
    """Write a model for plain torch, readable by its owner only; returns the files' paths.

    Args:
        found: The model.
        output: File of the parameters, `*.safetensors`; JSON description and script are written to the same folder.

    Raises:
        RunDirectoryError: If the file's name is not allowed, or one of the files exists or cannot be written.
    """
    check_output(output)
    try:
        output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return write_model(output.parent, found.tensors, found.recipe, found.about(), output.stem)
    except OSError as error:
        raise RunDirectoryError(f"{output} cannot be written: {error}; choose another output") from None
