"""Contract: private parameters appear nowhere outside the clients' folders."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from clients.engine.base import BaseClient
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.contract.base import Federate, replaced, require
from hyperfl_flwr.contract.folders import files_below, last_checkpoint, private_arrays
from hyperfl_flwr.contract.grids import RecordingGrid, Settings
from hyperfl_flwr.contract.leaks import WINDOW, common_window, leaks, occurs
from hyperfl_flwr.protocol.messages import group_of
from hyperfl_flwr.runs.checkpoint import SERVER
from hyperfl_flwr.runs.run_directory import read_metrics

STAYS = (
    "name the group in `shared` if it is meant to leave the client, or in `copies_of_uploads` if it holds a copy of "
    "what was sent; otherwise send something else"
)
"""What to do about private numbers that were found elsewhere."""


def check_privacy(
    method: str,
    federate: Federate,
    *,
    sent_at_first: bool = False,
    sent_as: Mapping[str, str] | None = None,
    plots: bool = False,
) -> None:
    """No 16 bytes of a private array occur in a message, a reply or a file outside clients/; shared arrays do.

    Copies of uploads are left out: the reply of a node with one sampled client holds the same numbers. One client fails
    in every round, so that error texts and failure files are searched as well.

    Args:
        method: Name of the method.
        federate: Runs the federations.
        sent_at_first: Whether the private numbers of the first round are also in its uploads.
        sent_as: Shared array -> array of the server that was sent in its place, in float32, after the last round.
        plots: Whether figures are drawn, and searched.
    """
    grids: list[RecordingGrid] = []

    def make(num_nodes: int, settings: Settings) -> RecordingGrid:
        grids.append(RecordingGrid(num_nodes, settings))
        return grids[-1]

    client_class = client_of(method)
    train = client_class.train

    def flaky(self: BaseClient, rng: np.random.Generator) -> dict[str, float]:
        numbers = train(self, rng)
        if self.context.client == 1:
            raise RuntimeError("broken after training")
        return numbers

    with replaced(client_class, "train", flaky):
        run = federate(method, grid=make, plots=plots)
    private = _private(run, "round-000001.npz" if sent_at_first else "", client_class)
    copies = client_class.copies_of_uploads
    unsent = {key: value for key, value in private.items() if group_of(key.split(":")[1]) not in copies}
    messages = {f"message {number}": data for number, data in enumerate(grids[0].sent)}
    files = {name: data for name, data in files_below(run).items() if not name.startswith("clients/client-")}
    found = [*leaks(unsent, messages), *leaks(private, files)]
    require(not found, f"private arrays left the client: {', '.join(found)}", STAYS)
    _check_metrics(run)
    _check_shared(run, sent_as or {}, messages, files)


def _private(run: Path, without: str, client: type[BaseClient]) -> dict[str, bytes]:
    """Return the private arrays of all clients of 16 bytes and more, by file and name."""
    private: dict[str, bytes] = {}
    for file, arrays in private_arrays(run).items():
        if without and file.endswith(without):
            continue
        stored = (run / "clients" / file).read_bytes()
        for key, value in arrays.items():
            if value.nbytes >= WINDOW:  # not a single number
                seen = common_window(value.tobytes(), stored)
                require(bool(seen) or len(set(value.tobytes())) < 2, f"{key} is not in its own file", "report this")
                private[f"{file}:{key}"] = value.tobytes()
    require(
        bool(private) or not client.private,
        f"`private` names {', '.join(client.private)}, but no client has stored an array",
        "let `build_groups` make these groups",
    )
    return private


def _check_metrics(run: Path) -> None:
    kept = [value for arrays in private_arrays(run).values() for value in arrays.values() if value.nbytes >= WINDOW]
    secrets = {number for value in kept for number in value.flat} - {0.0, 1.0}  # bounds of weights and of accuracies
    reported = {number for record in read_metrics(run) for number in record.values() if isinstance(number, float)}
    require(bool(reported), "metrics.jsonl has no numbers", "let `train` return the mean loss")
    require(not reported & secrets, "a private number was reported as a metric", "return means of losses from `train`")


def _check_shared(
    run: Path, sent_as: Mapping[str, str], messages: Mapping[str, bytes], files: Mapping[str, bytes]
) -> None:
    """Check that the search finds what is sent, and that the server's own state is not sent."""
    large = {key: value for key, value in last_checkpoint(run)[0].items() if value.nbytes >= WINDOW and value.any()}
    for key, value in large.items():
        sent = large[sent_as[key]].astype(np.float32) if key in sent_as else value
        was_sent, is_state = occurs(sent.tobytes(), messages), key.startswith(SERVER)
        require(not (was_sent and is_state), f"the server's state {key} was sent to clients", STAYS)
        require(was_sent or is_state, f"the shared array {key} was in no message", "leave it out of the shared groups")
        require(occurs(value.tobytes(), files), f"{key} is in no file of the run", "report this")
