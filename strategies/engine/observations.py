"""Writes down what an honest-but-curious server sees of one client, from the messages of a round."""

from pathlib import Path

from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.runs.observation import Observation, observation_path, save_observation
from strategies.engine.replies import TrainingReply


def observe(reply: TrainingReply, received: SharedArrays, server_round: int, run_directory: Path) -> None:
    """Store the observation of the one client that a reply is about, readable by the server's owner alone.

    Args:
        reply: Of a message to one client, with its arrays as they are.
        received: What the client was sent.
        server_round: The federated round.
        run_directory: The run's folder.
    """
    (result,) = reply.report.results
    path = observation_path(run_directory, server_round, result.client)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    save_observation(
        path,
        Observation(
            received=received,
            reply=reply.arrays | dict(reply.own.get(result.client, {})),
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
