"""The context of a client: settings, data, device and private state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clients.engine.node_checks import NodeChecks
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.data.digests import Digests
from hyperfl_flwr.data.federated_data import ClientData, FederatedData
from hyperfl_flwr.data.poisoning import Trigger
from hyperfl_flwr.data.registry import class_names
from hyperfl_flwr.data.sample_format import parse_window, title_of
from hyperfl_flwr.metrics.scores import Scores
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.provenance import body_hash
from hyperfl_flwr.node.evaluations import Evaluation, Evaluations, other_scores
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.node.saved_models import KeptModel
from hyperfl_flwr.privacy.budget import PrivacyBudget


@dataclass(frozen=True, kw_only=True)
class ClientContext:
    """The context of a client: everything that its training and evaluation depend on.

    Attributes:
        config: The run's settings.
        client: The client's id.
        data: The client's samples, on `device`.
        device: Device that trains and evaluates.
        state: The client's private arrays on the node's disk.
        global_test: All test images of the data set and their labels, if clients are evaluated on them after the last
            round; otherwise None.
        mixing_key: Secret key of the run, for methods that mix their shared arrays; empty for other methods.
        mean: Mean of each channel, which the images are normalised with.
        std: Standard deviation of each channel, which the images are normalised with.
        round: The round of the message; 0 outside a round.
        classes: Names of the classes, labels or targets.
        features: Names of the features of a vector; empty if they have none.
        target_mean: Mean of each target of a regression, of which the labels are the standardised values; else empty.
        target_std: Standard deviation of each of these targets; else empty.
        keeps_model: Whether the client's model is kept on the node's disk after each local training.
        trained_on: Function that returns the digests of the client's training samples, which are kept with the model.
        keeps_evaluations: Whether the results of evaluations are kept on the node's disk, with those of single classes.
        own_statistics: Whether `mean` and `std` are those of this client's own samples.
        budget: The record of what the client's uploads spend of its privacy budget; None to record nothing.
        trigger: The trigger of a backdoor, of which the success is measured; None without a backdoor.
        checks: What the node's owner checks before the client answers; None for nothing.
    """

    config: RunConfig
    client: int
    data: ClientData
    device: torch.device
    state: PrivateState
    global_test: tuple[Tensor, Tensor] | None = None
    mixing_key: bytes = b""
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    round: int = 0
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()
    keeps_model: bool = False
    trained_on: Callable[[], Digests] = lambda: np.zeros(0, np.uint64)
    keeps_evaluations: bool = False
    own_statistics: bool = False
    budget: PrivacyBudget | None = None
    trigger: Trigger | None = None
    checks: NodeChecks | None = None


def client_setting(
    config: RunConfig,
    data: FederatedData,
    client: int,
    device: torch.device,
    state: PrivateState,
    mixing_key: bytes = b"",
) -> ClientContext:
    """Build the context of one client; `auto` values of the method's settings must have been replaced."""
    return ClientContext(
        config=config,
        client=client,
        data=data.client(client, device),
        device=device,
        state=state,
        global_test=data.global_test if config.data.global_test else None,
        mixing_key=mixing_key,
        mean=data.dataset.mean,
        std=data.dataset.std,
        own_statistics=data.dataset.own_statistics,
        classes=data.dataset.classes or class_names(config.dataset, data.dataset.num_classes),
        features=data.dataset.features,
        target_mean=data.dataset.target_mean,
        target_std=data.dataset.target_std,
    )


def spend_unbounded(context: ClientContext) -> None:
    """Record that an answer has no noise: the server chooses what is computed, and can learn single samples.

    Raises:
        RefusalError: If the owner's privacy budget does not allow it.
    """
    if context.budget:
        context.budget.spend(context.round, None)


def keep_evaluation(context: ClientContext, kind: str, after_round: int, scores: Scores) -> None:
    """Save the results of an evaluation next to the private state, for the node's owner.

    Args:
        context: The client's context.
        kind: Kind of model, `aggregate` or `personalized`.
        after_round: Round after which the model had these values.
        scores: Its predictions for the client's test data.

    Raises:
        StateError: If they cannot be written.
    """
    folder = context.state.directory
    try:
        earlier = Evaluations.read(folder)
    except StateError:
        Evaluations.set_aside(folder)
        earlier = None
    kept = earlier or Evaluations(
        client=context.client,
        experiment=context.state.experiment,
        method=context.config.method,
        dataset=title_of(context.config.dataset),
        classes=context.classes,
        task=context.config.task,
    )
    entry = Evaluation(
        round=after_round,
        kind=kind,
        samples=scores.total,
        loss=scores.mean_loss,
        score=scores.score,
        interval=scores.interval,
        scores={name: scores.value(name) for name in other_scores(scores.task)},
    )
    kept.added(entry, scores.details(context.target_std)).write(folder)


def keep_model(context: ClientContext, tensors: Mapping[str, Tensor], server_round: int, score: float) -> None:
    """Save a client's model next to its private state, for the node's owner.

    Args:
        context: The client's context.
        tensors: Values of the target network by name.
        server_round: The round of the local training.
        score: Main score of the task on the client's test data; NaN without test data.
    """
    kept = KeptModel(
        client=context.client,
        experiment=context.state.experiment,
        round=server_round,
        method=context.config.method,
        dataset=title_of(context.config.dataset),
        score=score,
        test_examples=len(context.data.test_labels),
        recipe=TargetRecipe(
            target=context.config.target,
            input_shape=tuple(context.data.train_images.shape[1:]),
            mean=tuple(context.mean),
            std=tuple(context.std),
            classes=context.classes,
            body=body_hash(context.config.target, context.config.lpm.weights),
            window=parse_window(context.config.data.window) or (),
            task=context.config.task,
            target_mean=context.target_mean,
            target_std=context.target_std,
            features=context.features,
        ),
        tensors={name: value.detach().cpu().numpy() for name, value in tensors.items()},
        trained_on=context.trained_on(),
    )
    kept.write(context.state.directory)
