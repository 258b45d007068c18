"""Contract: what a run leaves, that it can be repeated, and that it depends on nothing but its settings."""

import json
import math
from pathlib import Path
from typing import get_args

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate, require
from hyperfl_flwr.contract.folders import last_checkpoint, outcome, private_arrays
from hyperfl_flwr.contract.grids import PermutedGrid, RecordingGrid, RepeatingGrid, Settings
from hyperfl_flwr.core.method import Part
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.protocol.messages import Reduction, group_of
from hyperfl_flwr.runs.run_directory import read_metrics, settings_of

DRAWS = (
    "draw all random numbers from the generator that `train` receives, or from `hyperfl_flwr.core.rng` with the run's "
    "seed, and keep nothing in the class or module"
)
"""What to do about a run that cannot be repeated."""


def check_results(method: str, federate: Federate) -> None:
    """Two rounds end with finite numbers, with accuracies in [0, 1], and with the groups that the client declares."""
    run = federate(method)
    for record in read_metrics(run):
        for name, value in record.items():
            require(
                not isinstance(value, (int, float)) or math.isfinite(value),
                f"{name} in round {record['round']} is {value}",
                "check the client's training for a division by zero or a diverging rate",
            )
    names = client_of(method).training_metrics(RunConfig.from_flat(settings_of(run)))
    for record in read_metrics(run):
        missing = [name for name in names if record["kind"] == "client" and name.replace("-", "_") not in record]
        require(
            not missing,
            f"client {record.get('client')} reported no finite {', '.join(missing)} in round {record['round']}",
            "return these metrics from `train`, as finite numbers, or name others in `training_metrics`",
        )
    summary = json.loads((run / "summary.json").read_text())
    for client, accuracy in enumerate(summary["test_accuracy_per_client"]):
        require(
            accuracy is not None and 0 <= accuracy <= 1,
            f"the accuracy of client {client} is {accuracy}",
            "return the share of correct predictions, in [0, 1]",
        )
    _check_groups(method, run)


def _check_groups(method: str, run: Path) -> None:
    client = client_of(method)
    for file, arrays in private_arrays(run).items():
        found = {group_of(key) for key in arrays}
        require(
            found == set(client.private),
            f"{file} holds the groups {sorted(found)}, but `private` names {sorted(client.private)}",
            "let `private` name what `build_groups` makes and the client keeps",
        )
    held = {group_of(key) for key in last_checkpoint(run)[0]} - {"server"}
    shared = client.active_groups(RunConfig.from_flat(settings_of(run)))
    reduced = {group for group, reduction in shared.items() if reduction is not Reduction.PER_CLIENT}
    require(
        held == reduced,
        f"the server holds the groups {sorted(held)}, but `shared` names {sorted(reduced)}",
        "let the strategy's `initial_parameters` make the groups that `shared` names",
    )


GROUPS_OF = {"kept-model": {"changes", "force"}}
"""Part of an upload -> shared groups that contain it, where these have other names; one of them may be empty."""

BESIDES = {"embedding", "classifier"}
"""Shared groups that need no upload: no parameters of the model, or parameters that another group holds, too."""


def check_uploads(method: str, federate: Federate) -> None:
    """The declaration names the shared groups that are parts of the model, and no others."""
    named = {group for upload in METHODS[method].uploads for group in GROUPS_OF.get(upload.part, {upload.part})}
    shared = client_of(method).shared
    sent = {group for group, reduction in shared.items() if reduction is not Reduction.DOWN}
    missing = (sent & set(get_args(Part))) - named - BESIDES
    remedy = "let `uploads` name each part of the model that the client sends, and no other"
    require(not missing, f"the client shares {', '.join(sorted(missing))}, which `uploads` does not name", remedy)
    unsent = named - sent
    require(not unsent, f"`uploads` names {', '.join(sorted(unsent))}, which the client does not share", remedy)


def check_repeatable(method: str, federate: Federate) -> None:
    """A second run with other node ids and another order of nodes and replies gives the same bits."""
    one, other = outcome(federate(method)), outcome(federate(method, grid=PermutedGrid))
    for part, value in one.items():
        require(value == other[part], f"two runs with one seed differ in {part}", DRAWS)


def check_seed(method: str, federate: Federate) -> None:
    """Another seed changes the shared and the private arrays of a method that has such arrays."""
    one, other = outcome(federate(method)), outcome(federate(method, seed=1))
    for part in ("arrays", "private"):
        require(
            (one[part] != other[part]) == bool(one[part]),
            f"another seed gives the same {part}",
            "draw initial values with the run's seed, see `hyperfl_flwr.models.initialisation`",
        )


def check_repeated_messages(method: str, federate: Federate) -> None:
    """Both replies to a message that arrives twice are equal, and the run equals one without repetitions."""
    grids: list[RepeatingGrid] = []

    def make(num_nodes: int, settings: Settings) -> RepeatingGrid:
        grids.append(RepeatingGrid(num_nodes, settings))
        return grids[-1]

    remedy = "let `train` start from the client's stored state alone, without numbers that it counts in memory"
    disturbed = outcome(federate(method, grid=make, num_rounds=3))
    require(len(grids[0].pairs) == 6, f"{len(grids[0].pairs)} messages were sent in three rounds to two nodes", remedy)
    for first, second in grids[0].pairs:
        require(first == second, "a message that arrives twice is answered with two different replies", remedy)
    straight = outcome(federate(method, num_rounds=3))
    for part, value in disturbed.items():
        require(value == straight[part], f"messages that arrive twice change {part}", remedy)


def check_sampling(method: str, federate: Federate) -> None:
    """Clients that are not sampled keep their files byte for byte; the last round trains all clients."""
    grids: list[RecordingGrid] = []

    def make(num_nodes: int, settings: Settings) -> RecordingGrid:
        grids.append(RecordingGrid(num_nodes, settings))
        return grids[-1]

    federate(method, grid=make, num_rounds=4, fraction_train=0.5, checkpoint_every=1)
    rounds = grids[0].rounds
    remedy = "leave `sampled` of the strategy as it is, and write the client's files by `private` groups only"
    counts = [len(trained) for trained, _, _ in rounds.values()]
    require(counts == [2, 2, 2, NUM_CLIENTS], f"four rounds trained {counts} clients of {NUM_CLIENTS}", remedy)
    for number, (trained, before, after) in rounds.items():
        for client in range(NUM_CLIENTS):
            folder = f"client-{client:05d}/"
            old, new = (
                {name: data for name, data in files.items() if name.startswith(folder)} for files in (before, after)
            )
            if client not in trained:
                require(old == new, f"files of client {client}, which round {number} did not train, changed", remedy)
            elif client_of(method).private:
                stored = f"{folder}round-{number:06d}.npz" in new
                require(stored, f"client {client} has stored nothing in round {number}", remedy)
