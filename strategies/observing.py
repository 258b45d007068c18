"""Writes down what an honest-but-curious server sees of one client, from the messages of a round."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hyperfl_flwr.arrays import SharedArrays
from hyperfl_flwr.attacks.observation import Observation, observation_path, save_observation
from hyperfl_flwr.messages import Reduction, group_of
from strategies.replies import TrainingReply


def observe(
    reply: TrainingReply,
    received: SharedArrays,
    reductions: Mapping[str, Reduction],
    server_round: int,
    run_directory: Path,
) -> None:
    """Store the observation of the one client that a reply is about, readable by the server's owner alone.

    Args:
        reply: Of a message to one client; the sums in it are weight times parameters.
        received: What the client was sent.
        reductions: How each shared group is reduced.
        server_round: The federated round.
        run_directory: The run's folder.
    """
    (result,) = reply.report.results
    arrays = {}
    for key, total in reply.sums.items():
        divisor = reductions[group_of(key)].divisor(result.num_examples, 1)
        arrays[key] = total / np.asarray(divisor, total.dtype)
    path = observation_path(run_directory, server_round, result.client)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    save_observation(
        path,
        Observation(
            received=received,
            reply=arrays | dict(reply.own.get(result.client, {})),
            num_examples=result.num_examples,
            client=result.client,
            round=server_round,
            metrics=result.metrics,
        ),
    )


def forget_observations(run_directory: Path, server_round: int) -> None:
    """Delete what was recorded of the rounds after one: nothing of them counts where a run goes on from there."""
    for path in (run_directory / "observations").glob("round-*-client-*.npz"):
        if int(path.name.split("-")[1]) > server_round:
            path.unlink()
