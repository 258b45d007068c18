"""A single client with random samples, and its rounds from one upload to the next."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from plain import random_samples

from clients.engine.base import BaseClient
from clients.engine.context import ClientContext
from hyperfl_flwr.config.run_config import RunConfig, default_settings
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


def one_client(
    kind: type[Kind], folder: Path, target: str = "mlp", *, num_classes: int = CLASSES, **changes: Any
) -> Kind:
    """Return a client with SIZE samples of the first `num_classes` classes; its private state is in a folder."""
    train, test = random_samples(SIZE, SHAPE, num_classes), random_samples(7, SHAPE, num_classes, seed=1)
    data = ClientData(
        train_images=train.train_images.float(), train_labels=train.train_labels,
        test_images=test.train_images.float(), test_labels=test.train_labels,
        augmentation=None, num_classes=CLASSES,
    )  # fmt: skip
    flat = default_settings() | {"device": "cpu", "learning-rate": 0.1, "target": target} | FULL_BATCH
    return kind(
        ClientContext(
            config=RunConfig.from_flat(flat | changes), client=0, data=data, device=torch.device("cpu"),
            state=PrivateState(folder, "experiment", 0),
        )
    )  # fmt: skip


def record_batches(member: BaseClient) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a list to which the client's training adds the images and labels of each batch."""
    data, seen = member.context.data, []

    def remember(images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        same = (images[:, None] == data.train_images[None]).flatten(2).all(dim=2)
        seen.append((images, data.train_labels[same.int().argmax(dim=1)]))
        return images

    member.context = replace(member.context, data=replace(data, augmentation=remember))
    return seen


def start(member: BaseClient) -> Arrays:
    """Return the initial model."""
    return {name: value.numpy() for name, value in initial_state(member.model, torch_generator(0, "model")).items()}


def next_round(member: BaseClient, received: Arrays, number: int, version: int) -> Arrays:
    """Run a round from some private state; return the uploaded model."""
    config = {"round": number, "version": version, "kept-version": version}
    arrays, _, _ = member.fit([value.copy() for value in received.values()], config)
    return dict(zip(received, arrays, strict=True))


def rounds(member: BaseClient, number: int = 1) -> Arrays:
    """Run the first rounds, each from the last upload; return the last upload."""
    values = start(member)
    for version in range(number):
        values = next_round(member, values, version + 1, version)
    return values
