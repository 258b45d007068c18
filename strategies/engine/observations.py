"""Record what an honest-but-curious server observes of single clients in a round's messages."""

from pathlib import Path

from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.runs.observation import Observation, observation_path, save_observation
from strategies.engine.replies import TrainingReply


def record_observation(reply: TrainingReply, received: SharedArrays, server_round: int, run_directory: Path) -> None:
    """Write the observation of a reply's only client to a file that only the server's owner can read.

    Args:
        reply: Reply to a message for one client, with its arrays as they are.
        received: The arrays that the client received.
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
            reply=reply.arrays | dict(reply.per_client.get(result.client, {})),
            num_examples=result.num_examples,
            client=result.client,
            round=server_round,
            metrics=result.metrics,
        ),
    )


def forget_observations(run_directory: Path, server_round: int) -> None:
    """Delete the observations and openings of all rounds after one, as a run that is resumed there repeats them."""
    for pattern in ("observations/round-*-client-*.npz", "openings/round-*.npz"):
        for path in run_directory.glob(pattern):
            if int(path.stem.split("-")[1]) > server_round:
                path.unlink()
