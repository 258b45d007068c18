"""Single clients with a few random samples, and what one of their rounds returns."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from plain import random_samples

from clients.engine.base import BaseClient
from clients.engine.context import ClientContext
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.node.private_state import PrivateState

SHAPE, CLASSES, SIZE = (1, 8, 8), 10, 30
FULL_BATCH: dict[str, Scalar] = {"batch-size": SIZE, "local-epochs": 4, "momentum": 0.5, "weight-decay": 0.02}
"""Settings of four steps on all samples, with momentum and weight decay."""

Kind = TypeVar("Kind", bound=BaseClient)
Arrays = dict[str, np.ndarray]


def client(
    kind: type[Kind], folder: Path, changes: Mapping[str, Any], target: str = "cnn", num_classes: int = CLASSES
) -> Kind:
    """Return a client with SIZE training samples of the first `num_classes` classes; a folder has its private state."""
    train, test = random_samples(SIZE, SHAPE, num_classes), random_samples(7, SHAPE, num_classes, seed=1)
    data = ClientData(
        train_images=train.train_images.to(torch.get_default_dtype()),
        train_labels=train.train_labels,
        test_images=test.train_images.to(torch.get_default_dtype()),
        test_labels=test.train_labels,
        augmentation=None,
        num_classes=CLASSES,
    )
    settings = default_settings() | {"device": "cpu", "learning-rate": 0.1, "target": target} | changes
    return kind(
        ClientContext(
            config=RunConfig.from_flat(settings),
            client=0,
            data=data,
            device=torch.device("cpu"),
            state=PrivateState(folder, "experiment", 0),
        )
    )


def full_batch_client(
    kind: type[Kind], folder: Path, target: str = "mlp", *, num_classes: int = CLASSES, **changes: Any
) -> Kind:
    """Return a client that takes the steps of `FULL_BATCH`, unless the changes say otherwise."""
    return client(kind, folder, FULL_BATCH | changes, target, num_classes)


def initial_model(member: BaseClient) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that FedAvg's server sends first."""
    values = initial_state(member.model, torch_generator(0, "model"))
    return {name: values[name] for name in member.model.state_dict()}


def initial_arrays(member: BaseClient) -> Arrays:
    """Return the initial model as arrays."""
    return {name: value.numpy().copy() for name, value in initial_model(member).items()}


def next_round(member: BaseClient, received: Arrays, number: int, version: int) -> Arrays:
    """Run a round from a version of the private state; return the upload by the names of what was received."""
    config = {"round": number, "version": version, "kept-version": version}
    arrays, _, _ = member.fit([value.copy() for value in received.values()], config)
    return dict(zip(received, arrays, strict=True))


def upload_after(member: BaseClient, number: int = 1) -> Arrays:
    """Run the first rounds from the initial model, each from the last upload; return the last upload."""
    values = initial_arrays(member)
    for version in range(number):
        values = next_round(member, values, version + 1, version)
    return values


def rounds(member: BaseClient, sent: Mapping[str, torch.Tensor], number: int = 1) -> tuple[Arrays, Arrays]:
    """Let a client take some rounds, in each of which it is sent its last upload.

    Args:
        member: The client.
        sent: The values in the first message, in the order of `keys`.
        number: Number of rounds.

    Returns:
        The last upload and the stored private arrays, both keyed `group/name`.
    """
    arrays = {key: value.numpy() for key, value in zip(member.keys(), sent.values(), strict=True)}
    for version in range(number):
        arrays = next_round(member, arrays, version + 1, version)
    return arrays, dict(member.context.state.load(number)) if member.private else {}


def record_batches(member: BaseClient) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a list to which the client's training adds the images and labels of each batch."""
    data, seen = member.context.data, []

    class Remember:
        def draw(self, sizes: Sequence[int], rng: np.random.Generator) -> torch.Tensor:
            return torch.zeros(sum(sizes))

        def __call__(self, images: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
            same = (images[:, None] == data.train_images[None]).flatten(2).all(dim=2)
            seen.append((images, data.train_labels[same.int().argmax(dim=1)]))
            return images

    member.context = replace(member.context, data=replace(data, augmentation=Remember()))
    return seen
