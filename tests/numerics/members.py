"""Single clients with a few random samples, and what one of their rounds returns."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain import random_samples

from clients.engine.base import BaseClient
from clients.engine.context import ClientContext
from hyperfl_flwr.config.run_config import RunConfig, default_settings
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.node.private_state import PrivateState

SHAPE, CLASSES = (1, 8, 8), 10


def client(kind: type[BaseClient], folder: Path, changes: Mapping[str, Any], target: str = "cnn") -> BaseClient:
    """Return a client with thirty training samples."""
    train, test = random_samples(30, SHAPE, CLASSES), random_samples(7, SHAPE, CLASSES, seed=1)
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


def initial_model(member: BaseClient) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that FedAvg's server sends first."""
    values = initial_state(member.model, torch_generator(0, "model"))
    return {name: values[name] for name in member.model.state_dict()}


def rounds(
    member: BaseClient, sent: Mapping[str, torch.Tensor], number: int = 1
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Let a client take some rounds, in each of which it is sent its last upload.

    Args:
        member: The client.
        sent: The values in the first message, in the order of `keys`.
        number: Number of rounds.

    Returns:
        The last upload and the stored private arrays, both keyed `group/name`.
    """
    arrays = [value.numpy().copy() for value in sent.values()]
    for last in range(number):
        arrays, _, _ = member.fit(arrays, {"round": last + 1, "version": last, "kept-version": 0})
    stored = dict(member.context.state.load(number)) if member.private else {}
    return dict(zip(member.keys(), arrays, strict=True)), stored
