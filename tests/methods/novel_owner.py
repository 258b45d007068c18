"""Helpers for tests with a novel client that has an owner: its data, its node and its predictions."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor

from clients.novel.on_demand import NovelOwner
from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.leaks import sent_bytes
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.server.in_process_grid import InProcessGrid

N, SIDE, CLASSES = 7, 16, 3
"""Number of images, side of an image in pixels, and number of classes."""

CPU = torch.device("cpu")


def owner(data: Path, output: Path, epsilon: float | None = None) -> NovelOwner:
    return NovelOwner(data=data, output=output, device=CPU, epsilon=epsilon, delta=None if epsilon is None else 0.01)


def in_order(pixels: np.ndarray) -> np.ndarray:
    """Return the images in the order of their files: ward-0 before ward-1."""
    return np.concatenate([pixels[::2], pixels[1::2]])


def normalised(run: Path, pixels: np.ndarray) -> Tensor:
    """Return the images [n, 3, H, W], normalised with the mean and standard deviation of the run's training images."""
    dataset = load_dataset(json.loads((run / "manifest.json").read_text())["settings"]["dataset"])
    train = dataset.train.images.astype(np.float64) / 255
    mean, std = train.mean(axis=(0, 2, 3)), train.std(axis=(0, 2, 3))
    return torch.tensor((pixels.transpose(0, 3, 1, 2) / 255 - mean[:, None, None]) / std[:, None, None]).float()


def predictions(output: Path) -> list[dict[str, str]]:
    with (output / "predictions.csv").open() as file:
        return list(csv.DictReader(file))


class HearingGrid(InProcessGrid):
    """An in-process grid that keeps the bytes of every message and reply."""

    def __init__(
        self, node: dict[str, Scalar], run_config: dict[str, Scalar] | None = None, num_nodes: int = 1
    ) -> None:
        super().__init__(app, num_nodes, run_config or {}, node)
        self.down: list[bytes] = []
        self.up: list[bytes] = []

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        kept = list(messages)
        self.down += [sent_bytes(message.content) for message in kept]
        return super().push_messages(kept)

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        text = str(reply.error.reason).encode() if reply.has_error() else b""
        self.up.append(text or sent_bytes(reply.content))
        return reply


class OwnedGrid(InProcessGrid):
    """An in-process grid of nodes with a node config each."""

    def __init__(self, nodes: list[dict[str, Scalar]], run_config: dict[str, Scalar] | None = None) -> None:
        super().__init__(app, len(nodes), run_config or {})
        for number, (context, node) in enumerate(zip(self._contexts.values(), nodes, strict=True)):
            context.node_config = {"partition-id": number, "num-partitions": len(nodes), **node}


def node_of(data: Path, output: Path, **more: Scalar) -> dict[str, Scalar]:
    """Return the node config of a novel client with an owner."""
    return {"novel-data": str(data), "novel-output": str(output), "device": "cpu", **more}
