"""How many simulated nodes and torch threads suit a machine.

The choice depends on the machine and the settings alone and not on a measurement, so that two runs of one command on
one machine are bit-equal: the number of nodes is the number of partial sums.
"""

import math
import os
from dataclasses import dataclass
from typing import Self

import torch

from hyperfl_flwr.launch.core_locks import usable_cores

WIRE_BYTES_PER_SECOND = 1e9
"""What passes between server and nodes of a simulation, both ways; see docs/results/performance.md."""

NODE_SECONDS, CLIENT_SECONDS = 0.01, 0.5
"""What an empty node costs a round, and a client's training of the usual size on one thread."""

NODE_BYTES, NODE_COPIES = 1e9, 8
"""Memory of a process that trains: torch and data, and copies of what is shared; see docs/results/performance.md."""

PROCESSES_PER_GPU = 4
"""Steps of small networks wait for Python more than for the GPU; several processes fill it."""

MAX_THREADS = 4
"""Small networks gain little from more."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a simulation may use.

    Attributes:
        cores: Usable cores.
        memory: Physical memory in bytes.
        gpus: GPUs; 0 for training on the CPU.
    """

    cores: int
    memory: float
    gpus: int = 0

    @classmethod
    def here(cls, device: torch.device) -> Self:
        """Return this machine, its GPUs only if `device` is one."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        return cls(cores=len(usable_cores()), memory=memory, gpus=gpus)

    def __str__(self) -> str:
        return f"{self.cores} cores" + (f" and {self.gpus} GPUs" if self.gpus else "")


def suitable_nodes(machine: Machine, clients: int, shared_bytes: int, threads: int = 1) -> int:
    """Return a good number of simulated nodes.

    As many as can train at the same time, but

    - not so many that what they send costs more than they save: n clients of s seconds on P nodes take n s / P + w P,
      least at P = sqrt(n s / w), where w is the time of one node's two messages;
    - not more than fit into half of the memory;
    - not more than what the longest-working node needs: 20 clients on 11 nodes take as long as on 10.

    Args:
        machine: See `Machine`.
        clients: Clients that are trained in a round.
        shared_bytes: What each node receives; it sends twice as much, a sum in float64.
        threads: Of each process.
    """
    parallel = min(machine.cores // threads, machine.gpus * PROCESSES_PER_GPU or machine.cores)
    by_wire = math.sqrt(clients * CLIENT_SECONDS / (NODE_SECONDS + 3 * shared_bytes / WIRE_BYTES_PER_SECOND))
    by_memory = machine.memory / 2 / (NODE_BYTES + NODE_COPIES * shared_bytes)
    most = max(1, min(parallel, clients, int(by_wire), int(by_memory)))
    return math.ceil(clients / math.ceil(clients / most))


def suitable_jobs(machine: Machine, runs: int, threads: int = 1) -> int:
    """Return how many independent runs should train side by side, each in one process of some threads."""
    parallel = min(machine.cores // threads, machine.gpus * PROCESSES_PER_GPU or machine.cores)
    return max(1, min(parallel, runs, int(machine.memory / 2 / NODE_BYTES)))


def suitable_threads(machine: Machine, num_nodes: int) -> int:
    """Return a good number of torch threads of each process: cores that would otherwise be idle are used."""
    return 1 if machine.gpus else max(1, min(machine.cores // num_nodes, MAX_THREADS))
