"""The batches of several clients' local steps, step by step, as stacked tensors.

Each client has the batches that it has alone, from its own random numbers. Clients are ordered by their numbers of
steps, so that those that have more to do are a prefix; a batch that is shorter than the others' is filled up with
samples that do not count.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.core.device import send
from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.training.local_sgd import Epochs, TrainingData, drawn_pass


@dataclass(frozen=True)
class ClientSteps:
    """The local steps of one client.

    Attributes:
        data: The client's training samples.
        epochs: Length of the training.
        rng: Order of the samples and augmentation.
    """

    data: TrainingData
    epochs: Epochs
    rng: np.random.Generator

    @property
    def number(self) -> int:
        """The number of steps."""
        return self.epochs.num_steps(len(self.data.train_labels))

    @property
    def reported(self) -> int:
        """The number of last steps that the reported loss is the mean of, see `train_epochs`."""
        per_pass = math.ceil(len(self.data.train_labels) / self.epochs.batch_size)
        return self.epochs.steps or per_pass


@dataclass(frozen=True)
class StackedBatch:
    """The batches of the first k clients, for one step.

    Attributes:
        samples: Images [k, B, C, H, W] or feature vectors [k, B, D].
        labels: Labels [k, B] or [k, B, L].
        shares: Weight of each sample in its client's mean loss [k, B]; 0 of one that only fills up the batch.
    """

    samples: Tensor
    labels: Tensor
    shares: Tensor

    def mean_losses(self, outputs: Tensor) -> Tensor:
        """Return each client's mean loss [k] of outputs [k, B, ...]."""
        losses = loss_of(outputs.flatten(0, 1), self.labels.flatten(0, 1), "none")
        return (losses.view(self.shares.shape) * self.shares).sum(dim=1)


class StackedBatches:
    """The batches of K clients with one batch size, one augmentation and samples of one form.

    Args:
        clients: The clients' steps, at least one each.

    Attributes:
        order: Positions of the clients, by falling number of steps [K]; the stacked tensors have this order.
        active: Number of clients that take each step [T].
    """

    def __init__(self, clients: Sequence[ClientSteps]) -> None:
        self.order = sorted(range(len(clients)), key=lambda position: -clients[position].number)
        ordered = [clients[position] for position in self.order]
        numbers = [client.number for client in ordered]
        self.active = [sum(number > step for number in numbers) for step in range(numbers[0])]
        self._reported = [range(max(0, client.number - client.reported), client.number) for client in ordered]
        datas = [client.data for client in ordered]
        self._samples = torch.cat([data.train_images for data in datas])
        self._labels = torch.cat([data.train_labels for data in datas])
        self._change = datas[0].augmentation
        starts = itertools.accumulate((len(data.train_labels) for data in datas[:-1]), initial=0)
        plans = [_Plan.of(client, start) for client, start in zip(ordered, starts, strict=True)]
        self._sizes = np.stack([_padded(plan.sizes, numbers[0]) for plan in plans], axis=1)  # [T, K]
        device, width = self._labels.device, int(self._sizes.max())
        rows = [plan.rows(numbers[0], width, start=plan.start) for plan in plans]
        self._positions = send(torch.from_numpy(np.stack(rows, axis=1)), device)  # [T, K, B]
        counts = np.arange(width) < self._sizes[:, :, None]
        shares = torch.from_numpy(counts / np.maximum(self._sizes, 1)[:, :, None])
        self._shares = send(shares.to(self._samples.dtype), device)
        self._drawn = self._drawn_table(plans, numbers[0], width)

    def __iter__(self) -> Iterator[StackedBatch]:
        for step, number in enumerate(self.active):
            positions = self._positions[step, :number]
            samples = self._samples[positions]
            if self._change is not None and self._drawn is not None:
                drawn = self._drawn[step, :number].flatten(0, 1)
                samples = self._change(samples.flatten(0, 1), drawn).view(samples.shape)
            yield StackedBatch(samples, self._labels[positions], self._shares[step, :number])

    def reported_losses(self, losses: Sequence[Tensor]) -> list[float]:
        """Return the loss that each client reports, in the order of the clients that were given.

        Args:
            losses: Mean losses of each step [active[step]], before it.
        """
        table = np.zeros(self._sizes.shape)
        found = np.split(torch.cat(list(losses)).double().cpu().numpy(), np.cumsum(self.active)[:-1])
        for step, some in enumerate(found):
            table[step, : len(some)] = some
        values = [float("nan")] * len(self.order)
        for column, (position, steps) in enumerate(zip(self.order, self._reported, strict=True)):
            sizes = self._sizes[steps.start : steps.stop, column]
            values[position] = float(table[steps.start : steps.stop, column] @ sizes / sizes.sum())
        return values

    def _drawn_table(self, plans: "Sequence[_Plan]", steps: int, width: int) -> Tensor | None:
        """Return the random numbers of the augmentation [T, K, B, ...]; None without augmentation."""
        if plans[0].drawn is None:
            return None
        table = plans[0].drawn.new_zeros(steps, len(plans), width, *plans[0].drawn.shape[1:])
        for number, plan in enumerate(plans):
            if plan.drawn is None:
                raise ValueError("clients that are trained together must have one augmentation")
            for step, part in enumerate(torch.split(plan.drawn, plan.sizes.tolist())):
                table[step, number, : len(part)] = part
        return send(table, self._labels.device)


@dataclass(frozen=True)
class _Plan:
    """The samples of one client's steps.

    Attributes:
        start: Position of its first sample among those of all clients.
        positions: Positions of the samples of all steps, one after another, counted from 0.
        sizes: Size of each step's batch.
        drawn: Random numbers of the augmentation of these samples; None without augmentation.
    """

    start: int
    positions: NDArray[np.int64]
    sizes: NDArray[np.int64]
    drawn: Tensor | None

    @classmethod
    def of(cls, client: ClientSteps, start: int) -> "_Plan":
        size, number = client.epochs.batch_size, len(client.data.train_labels)
        in_pass = [min(size, number - first) for first in range(0, number, size)]
        passes = [drawn_pass(client.data, size, client.rng) for _ in range(math.ceil(client.number / len(in_pass)))]
        sizes = np.array((in_pass * len(passes))[: client.number])
        total = int(sizes.sum())
        orders, drawn = zip(*passes, strict=True)
        changes = [change for change in drawn if change is not None]
        return cls(start, np.concatenate(orders)[:total], sizes, torch.cat(changes)[:total] if changes else None)

    def rows(self, steps: int, width: int, *, start: int) -> NDArray[np.int64]:
        """Return the positions of each step's samples [T, B], filled up with the first sample that the step draws.

        Not with any other one: what fills up is computed, with the share 0, and a sample that is never drawn may have
        values for which that is no number. After the client's last step it is its first one's.
        """
        firsts = np.zeros(steps, np.int64)
        firsts[: len(self.sizes)] = np.cumsum(self.sizes) - self.sizes
        table = np.repeat(self.positions[firsts][:, None], width, axis=1)
        table[: len(self.sizes)][np.arange(width) < self.sizes[:, None]] = self.positions
        return table + start


def _padded(sizes: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    return np.concatenate((sizes, np.zeros(number - len(sizes), np.int64)))
