"""Choose the number of simulated nodes and torch threads for a machine.

The choice depends on the machine and the settings only, and not on measurements. The number of nodes is the number of
partial sums of an average, so a stable choice keeps two runs of one command on one machine bit-equal.
"""

import math
import os
from dataclasses import dataclass
from typing import Self

import torch

from hyperfl_flwr.launch.core_locks import usable_cores

WIRE_BYTES_PER_SECOND = 1e9
"""Throughput between the server and the nodes of a simulation, both directions; see docs/results/performance.md."""

NODE_SECONDS, CLIENT_SECONDS = 0.01, 0.5
"""Seconds of a round for a node without clients, and for a usual client's training on one thread."""

NODE_BYTES, NODE_COPIES = 1e9, 8
"""Memory of a training process: bytes of torch and data, and number of copies of the shared parameters; see
docs/results/performance.md."""

PROCESSES_PER_GPU = 4
"""Training processes on one GPU; small networks wait for Python more than for the GPU, so several processes fill it."""

GPU_BYTES, GPU_COPIES = 1e9, 8
"""GPU memory of a training process, an estimate: bytes of CUDA's context and cuDNN, and number of copies of the shared
parameters. `make gpu` measures what torch holds."""

MAX_THREADS = 4
"""Most torch threads of a process; small networks gain little from more."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Resources of a machine that a simulation may use.

    Attributes:
        cores: Number of usable cores.
        memory: Physical memory in bytes.
        gpus: Number of GPUs; 0 for training on the CPU.
        gpu_memory: Memory of the smallest GPU in bytes.
    """

    cores: int
    memory: float
    gpus: int = 0
    gpu_memory: float = math.inf

    @classmethod
    def detect(cls, device: torch.device) -> Self:
        """Return the resources of this machine, with its GPUs only if `device` is a GPU."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(gpus)]
        return cls(cores=len(usable_cores()), memory=memory, gpus=gpus, gpu_memory=min(sizes, default=math.inf))

    def __str__(self) -> str:
        return f"{self.cores} cores" + (f" and {self.gpus} GPUs" if self.gpus else "")

    def parallel(self, threads: int, shared_bytes: int = 0) -> int:
        """Return the number of processes that can train at the same time, at least 1.

        Args:
            threads: torch threads of each process.
            shared_bytes: Bytes of the shared parameters.
        """
        by_cores = max(1, self.cores // threads)
        if not self.gpus:
            return by_cores
        fitting = min(PROCESSES_PER_GPU, self.gpu_memory / (GPU_BYTES + GPU_COPIES * shared_bytes))
        return min(by_cores, self.gpus * max(1, int(fitting)))


def suitable_nodes(machine: Machine, clients: int, shared_bytes: int, threads: int = 1) -> int:
    """Return a good number of simulated nodes.

    It is the number of nodes that can train at the same time, limited

    - by communication: n clients of s seconds on P nodes take n s / P + w P, which is least at P = sqrt(n s / w),
      where w is the time of one node's two messages;
    - by memory: all processes must fit into half of it, and those of a GPU into the GPU's;
    - by the node with the most clients: 20 clients on 11 nodes take as long as on 10.

    Args:
        machine: Resources of the machine.
        clients: Number of clients that are trained in a round.
        shared_bytes: Bytes that each node receives; it sends twice as many, a sum in float64.
        threads: torch threads of each process.
    """
    parallel = machine.parallel(threads, shared_bytes)
    by_wire = math.sqrt(clients * CLIENT_SECONDS / (NODE_SECONDS + 3 * shared_bytes / WIRE_BYTES_PER_SECOND))
    by_memory = machine.memory / 2 / (NODE_BYTES + NODE_COPIES * shared_bytes)
    most = max(1, min(parallel, clients, int(by_wire), int(by_memory)))
    return math.ceil(clients / math.ceil(clients / most))  # the fewest nodes with the same largest share of clients


def suitable_jobs(machine: Machine, runs: int, threads: int = 1) -> int:
    """Return the number of independent runs to train in parallel, each in one process with `threads` threads."""
    return max(1, min(machine.parallel(threads), runs, int(machine.memory / 2 / NODE_BYTES)))


def suitable_threads(machine: Machine, num_nodes: int) -> int:
    """Return the number of torch threads of each process that uses otherwise idle cores."""
    return 1 if machine.gpus else max(1, min(machine.cores // num_nodes, MAX_THREADS))
