"""Record what a curious server observes of single clients in a round's messages."""

from pathlib import Path

import numpy as np

from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import Reduction, group_of
from hyperfl_flwr.runs.observation import Observation, observation_path, save_observation, save_opening
from strategies.engine.context import ServerContext
from strategies.engine.replies import TrainingReply
from strategies.engine.round_outcome import Outcome


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


def record_opening(
    received: SharedArrays, means: SharedArrays, outcome: Outcome, server_round: int, context: ServerContext
) -> None:
    """Write what the server has opened in a round to a file that only the server's owner can read.

    Args:
        received: The arrays that all clients received.
        means: The reduced groups; of summed groups the sums.
        outcome: The round's outcome, with the opened counts and metrics.
        server_round: The federated round.
        context: The strategy's context.
    """
    if outcome.tally is None:
        return
    summed = {key for key in means if context.reductions[group_of(key)] is Reduction.SUM}
    number = len(outcome.finished)
    opening = Observation(
        received=received,
        reply={key: value / np.float32(number) if key in summed else value for key, value in means.items()},
        num_examples=outcome.tally.examples,
        round=server_round,
        metrics=outcome.tally.means,
    )
    save_opening(Path(context.run_directory), opening, outcome.finished)


def forget_observations(run_directory: Path, server_round: int) -> None:
    """Delete the observations and openings of all rounds after one, as a run that is resumed there repeats them."""
    for pattern in ("observations/round-*-client-*.npz", "openings/round-*.npz"):
        for path in run_directory.glob(pattern):
            if int(path.stem.split("-")[1]) > server_round:
                path.unlink()
