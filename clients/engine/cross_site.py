"""A client's part in a cross-site matrix: it sends its personalized model, and evaluates those of other clients.

This is the only way in which a whole model leaves a client of a method that keeps parts of it private; the node's owner
must allow it (`cross-site` in the node config).
"""

import numpy as np
import torch

from clients.engine.base import BaseClient
from clients.engine.context import spend_unbounded
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.metrics.classification import ClassScores
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.node.saved_models import FILE, KeptModel
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import group_of
from hyperfl_flwr.protocol.queries import CORRECT, PERSONALIZED, QuerySpec


def send_model(member: BaseClient, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
    """Return the client's personalized model, and the number of its training samples.

    Args:
        member: The client.
        received: Nothing.
        question: The default: a model is not of chosen samples.

    Returns:
        The values of the whole target network, keyed `personalized/name`.

    Raises:
        StateError: If the node has no model of the client, or one of another run or client.
        RefusalError: If the owner's privacy budget does not allow it.
    """
    context = member.context
    _refuse_choice(question)
    if not (context.state.directory / FILE).is_file():
        text = "the client has no model of this run, since no round has trained it on this node"
        raise StateError(text, public=text)
    kept = KeptModel.read(context.state.directory)
    if (kept.experiment, kept.client) != (context.state.experiment, context.client):
        text = f"the kept model is of client {kept.client} in the run {kept.experiment}"
        raise StateError(text, public="the client's kept model is of another run or client")
    spend_unbounded(context)
    return {f"{PERSONALIZED}/{name}": value for name, value in kept.tensors.items()}, len(context.data.train_labels)


def score_models(member: BaseClient, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
    """Count the correct predictions of models on the client's test samples.

    Args:
        member: The client.
        received: M models, stacked [M, *shape], keyed `personalized/name`.
        question: The default: all test samples, unchanged.

    Returns:
        The counts `CORRECT` int64 [M], and the number of test samples.

    Raises:
        ValueError: If the arrays are not models of the client's target network.
        StateError: If the client has no test samples.
        RefusalError: If the owner's privacy budget does not allow it.
    """
    _refuse_choice(question)
    data, target = member.context.data, member.new_target()
    if not len(data.test_labels):
        text = "the client has no test samples"
        raise StateError(text, public=text)
    layout = target.state_dict()
    named = {key.partition("/")[2]: value for key, value in received.items() if group_of(key) == PERSONALIZED}
    numbers = {len(value) if value.ndim else 0 for value in named.values()}
    if named.keys() != layout.keys() or len(received) != len(named) or len(numbers) != 1 or 0 in numbers:
        raise ValueError(
            "the models to evaluate must be stacked, with the arrays of the client's network and no others"
        )
    if wrong := [name for name, value in named.items() if value.shape[1:] != layout[name].shape]:
        raise ValueError(f"{wrong[0]} of the models to evaluate has another shape than in the client's network")
    spend_unbounded(member.context)
    correct = []
    for number in range(numbers.pop()):
        values = {
            name: torch.tensor(value[number], device=member.context.device).to(layout[name].dtype)
            for name, value in named.items()
        }
        target.load_state_dict(values, assign=True)
        scores = evaluate(target.eval(), data.test_images, data.test_labels)
        assert isinstance(scores, ClassScores)  # the setting is refused for other tasks
        correct.append(scores.correct)
    return {CORRECT: np.array(correct, np.int64)}, len(data.test_labels)


def _refuse_choice(question: QuerySpec) -> None:
    """Refuse a query by which the server would choose samples."""
    if question != QuerySpec():
        raise ValueError("a cross-site matrix is of all samples, unchanged")
