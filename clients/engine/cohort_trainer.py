"""Train the clients of a node in cohorts, where the method allows it."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from clients.engine.base import BaseClient, BegunRound
from clients.engine.cohort_training import CohortTraining
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.process_memory import free_memory
from hyperfl_flwr.node.cohort import Job, Received, SequentialTrainer, Trainer, in_order, train_alone
from hyperfl_flwr.node.trained import Failed, Trained, TrainedOne

FIT = BaseClient.fit
"""What `begin`, `train` and `end` do; a client with another `fit` is trained alone."""

Result = TrainedOne | Trained | Failed


def trainer_of(
    kind: type[BaseClient], config: RunConfig, device: torch.device, make_client: Callable[[int], BaseClient]
) -> Trainer:
    """Return the trainer of a node's clients, as the setting `cohort` says.

    Args:
        kind: The method's class of clients.
        config: The run's settings.
        device: Device that trains.
        make_client: Function that builds a client.
    """
    if config.cohort == "one-by-one":
        return SequentialTrainer(make_client)
    return CohortTrainer(make_client, kind, config, device)


class CohortTrainer:
    """Train clients together if `BaseClient.together` allows it, otherwise one after another.

    Args:
        make_client: Function that builds a client.
        kind: The method's class of clients.
        config: The run's settings.
        device: Device that trains.
    """

    def __init__(
        self,
        make_client: Callable[[int], BaseClient],
        kind: type[BaseClient],
        config: RunConfig,
        device: torch.device,
    ) -> None:
        self._make_client, self._kind, self._config, self._device = make_client, kind, config, device

    def train(self, jobs: Sequence[Job], received: Received) -> Iterator[Result]:
        """Train the clients; see `Trainer`."""
        training = self._kind.together(self._config, received.alike, self._device)
        if training is None:
            yield from SequentialTrainer(self._make_client).train(jobs, received)
            return
        waiting = list(jobs)
        while waiting:
            yield from self._next_cohort(waiting, received, training)

    def _next_cohort(self, waiting: list[Job], received: Received, training: CohortTraining) -> Iterator[Result]:
        """Take jobs for which there is memory from those that wait, and train them together."""
        most, free = self._limits(training)
        begun: dict[int, tuple[BaseClient, BegunRound]] = {}
        alone: dict[int, BaseClient] = {}
        results: dict[int, dict[str, float] | Exception] = {}
        order: list[Job] = []
        member: BaseClient | None = None
        while waiting and len(order) < most and (free > 0 or not order):
            job = waiting.pop(0)
            order.append(job)
            try:
                member = self._make_client(job.client)
                if type(member).fit is not FIT or not training.admit(member):
                    alone[job.client] = member  # which keeps its data until its turn comes
                    free -= member.context.data.num_bytes
                    continue
                begun[job.client] = member, member.begin(in_order(member, received.of(job.client)), job.config)
                free -= training.memory_of(member)
            except Exception as error:  # noqa: BLE001 - a failing client must not stop the others
                results[job.client] = error
        began = time.perf_counter()
        try:
            trained = training.train([(member, round_.rng) for member, round_ in begun.values()])
            results |= zip(begun, trained, strict=True)
        except Exception as error:  # noqa: BLE001 - it is the reason why these clients, by name, are left out
            results |= dict.fromkeys(begun, error)
        seconds = (time.perf_counter() - began) / max(1, len(begun))
        member = None  # its memory is that of the upload
        for job in order:  # by ascending id, as the reply reports them
            try:
                if job.client in alone:
                    yield train_alone(alone.pop(job.client), job, received)
                else:
                    yield _ended(begun.pop(job.client, None), results.pop(job.client), seconds, received)
            except Exception as error:  # noqa: BLE001 - a failing client must not stop the others
                yield Failed(client=job.client, error=error)

    def _limits(self, training: CohortTraining) -> tuple[int, int]:
        """Return the most clients of a cohort and the bytes that they may need: with `auto` half of those free.

        With `deterministic` the memory does not count: the size of a cohort may change the last bits.
        """
        cohort, most = self._config.cohort, 1 << 62
        if isinstance(cohort, int):
            return cohort, most
        return training.most, most if self._config.deterministic else _free_memory(self._device) // 2


def _free_memory(device: torch.device) -> int:
    """Return the memory in bytes that programs can still take where the clients are trained."""
    if device.type != "cuda":
        return free_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch can use it again
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _ended(
    begun: tuple[BaseClient, BegunRound] | None,
    trained: dict[str, float] | Exception,
    seconds: float,
    received: Received,
) -> TrainedOne:
    """End the round of a client and return its results; raises the error of one that has failed."""
    if isinstance(trained, Exception):
        raise trained
    if begun is None:
        raise RuntimeError("a client was trained that has not begun its round")
    member, round_ = begun
    arrays, num_examples, metrics = member.end(round_, trained, seconds)
    keys = [key for key in member.keys() if key not in received.down]  # noqa: SIM118 - a client is no dict
    named: dict[str, Any] = dict(zip(keys, arrays, strict=True))
    return TrainedOne(client=member.context.client, arrays=named, num_examples=num_examples, metrics=metrics)
