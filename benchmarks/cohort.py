"""A round of several clients of one node, with the sum of their uploads."""

from pathlib import Path

import torch

from benchmarks.workload import Round, Workload, client_data, initial_arrays
from clients.engine.base import BaseClient
from clients.engine.cohort_trainer import trainer_of
from clients.engine.context import ClientContext
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.node.array_sums import PlainSum
from hyperfl_flwr.node.cohort import Received, train_cohort
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.protocol.messages import Request

TOGETHER, ONE_BY_ONE = "cohort-", "one-by-one-"
"""Beginnings of the names of these programs; the number of clients follows."""


def size_of(program: str) -> int:
    """Return the number of clients in a call of a program's round."""
    beginning, _, number = program.rpartition("-")
    return int(number) if f"{beginning}-" in (TOGETHER, ONE_BY_ONE) else 1


def cohort_round(work: Workload, program: str, folder: Path) -> Round:
    """Return a function that runs the rounds of a node's clients as it does, and returns their mean loss.

    Args:
        work: The workload.
        program: Name of the program: with `TOGETHER`, the clients are trained in one cohort.
        folder: Folder of the private state.
    """
    size = size_of(program)
    received, kind, device = initial_arrays(work), client_of(work.method), torch.device(work.device)
    cohort = size if program.startswith(TOGETHER) else "one-by-one"
    config = work.config().model_copy(update={"cohort": cohort})
    data = [client_data(work, client).to(device) for client in range(size)]

    def make(client: int) -> BaseClient:
        state = PrivateState(folder, "benchmark", client)
        return kind(ClientContext(config=config, client=client, data=data[client], device=device, state=state))

    def one_round() -> float:
        zeros = [0] * size
        request = Request(
            round=1, experiment="0" * 16, run_directory="", clients=range(size), versions=zeros, kept_versions=zeros,
            num_clients=size, max_num_examples=work.train,
        )  # fmt: skip
        total = PlainSum(received, kind.reductions(config), request)
        trainer = trainer_of(kind, config, device, make)
        result = train_cohort(trainer, request, Received(shared=received), total, send_details=True)
        if result.failures:
            raise RuntimeError(result.failures[0].details)
        return sum(client.metrics["train-loss"] for client in result.results) / size

    return one_round
