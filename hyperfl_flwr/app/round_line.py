"""One line about each round for the log of a node, which its owner reads."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.node.evaluations import Evaluations
from hyperfl_flwr.node.private_state import client_folder


def round_line(states: Path, clients: Sequence[int], server_round: int, costs: str, *, trains: bool) -> str:
    """Describe what a node has done in a round.

    Args:
        states: Folder with the private state of the run's clients, where the node has stored their evaluations.
        clients: The clients that were asked for.
        server_round: The round.
        costs: Seconds and bytes as text.
        trains: Whether the clients were trained, and not only evaluated.

    Returns:
        Such as `round 3: client 0: personalized accuracy 93.10 %, aggregate 91.20 %; 6.3 s, ...`; a client that has
        failed has no numbers.
    """
    # In a training, clients first evaluate the received model, which is the global state after the round before.
    known = {"personalized": server_round, "aggregate": server_round - 1} if trains else {"aggregate": server_round}
    found = (f"client {client}: {_scores(client_folder(states, client), known)}" for client in clients)
    return f"round {server_round}: {'; '.join(found)}; {costs}"


def _scores(folder: Path, rounds: Mapping[str, int]) -> str:
    """Return the scores of each kind of model after a round."""
    try:
        kept = Evaluations.read(folder)
    except StateError:  # the training has reported it
        kept = None
    if kept is None:
        return "not evaluated"
    task = TASKS[kept.task]
    scores = [
        f"{kind} {task.score_title} {task.text(entry.score)}"
        for kind, number in rounds.items()
        if (entry := kept.newest(kind)) is not None and entry.round == number
    ]
    return ", ".join(scores) or "not evaluated"
