"""The hosts of a Ray cluster, and how a simulation's nodes are placed on them.

The process that starts a run knows a cluster by these records alone, and does not import Ray. It is
`hyperfl_flwr.launch.ray_cluster.client` that connects.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyperfl_flwr.core.errors import ConfigError, DeviceError
from hyperfl_flwr.launch.flower.env import gpu_share

MOST_ON_GPU = 64
"""Largest number of processes on one GPU."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine of a Ray cluster, or a container or pod.

    Attributes:
        id: Ray's id of it.
        name: Its host name.
        address: Its IP address.
        cpus: Number of CPUs that Ray may use there.
        gpus: Number of GPUs that Ray may use there.
        memory: Bytes of memory that Ray may use there.
    """

    id: str
    name: str
    address: str
    cpus: int
    gpus: int
    memory: float

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    def processes(self, cpus: int, on_gpu: int = 0) -> int:
        """Return the number of training processes that Flower starts there.

        Args:
            cpus: CPUs of each process.
            on_gpu: Processes on each GPU; 0 if they need none.
        """
        by_cpu = self.cpus // cpus
        return min(by_cpu, self.gpus * on_gpu) if on_gpu else by_cpu


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running Ray cluster.

    Attributes:
        address: Its address, HOST:PORT.
        hosts: Its hosts, ordered by address.
        driver: Address of the host on which this process runs.
        free_cpus: Number of CPUs that no other job has reserved.
        has_token: Whether the cluster asks for a token (`RAY_AUTH_MODE=token`).
    """

    address: str
    hosts: Sequence[Host]
    driver: str = ""
    free_cpus: int = 0
    has_token: bool = False

    @property
    def cpus(self) -> int:
        """Number of CPUs of all hosts."""
        return sum(host.cpus for host in self.hosts)

    @property
    def gpus(self) -> int:
        """Number of GPUs of all hosts."""
        return sum(host.gpus for host in self.hosts)

    @property
    def memory(self) -> float:
        """Bytes of memory of all hosts."""
        return sum(host.memory for host in self.hosts)

    def __str__(self) -> str:
        gpus = f" and {self.gpus} GPUs" if self.gpus else ""
        return f"{len(self.hosts)} host(s) with {self.cpus} CPUs{gpus}"

    def processes(self, cpus: int, on_gpu: int = 0) -> int:
        """Return the number of training processes on all hosts, see `Host.processes`."""
        return sum(host.processes(cpus, on_gpu) for host in self.hosts)

    def placement(self, num_nodes: int, threads: int, *, on_gpus: bool) -> "Placement":
        """Choose the CPUs and the share of a GPU of each process.

        Flower starts as many processes as fit into the cluster. Each gets as many CPUs as leave enough processes for
        all nodes to train at once, so that no process is without a node and the nodes are spread over the hosts.

        Args:
            num_nodes: Number of simulated nodes P.
            threads: torch threads of each process.
            on_gpus: Whether the processes train on GPUs.

        Raises:
            DeviceError: If no host has room for a process.
        """
        on_gpu = 0
        if on_gpus:
            fitting = (number for number in range(1, MOST_ON_GPU) if self.processes(threads, number) >= num_nodes)
            on_gpu = next(fitting, MOST_ON_GPU)
        wanted = min(num_nodes, self.processes(threads, on_gpu))
        if not wanted:
            raise DeviceError(
                f"the Ray cluster at {self.address} has no host with {threads} CPU(s){' and a GPU' * on_gpus} for a "
                f"training process ({self}); start a host with more, or set threads and device"
            )
        largest = max(host.cpus for host in self.hosts)
        cpus = max(number for number in range(threads, largest + 1) if self.processes(number, on_gpu) >= wanted)
        used = [host for host in self.hosts if host.processes(cpus, on_gpu)]
        return Placement(processes=self.processes(cpus, on_gpu), cpus=cpus, on_gpu=on_gpu, hosts=used)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a simulation's processes are placed on a cluster.

    Attributes:
        processes: Number of processes on all hosts.
        cpus: CPUs that Ray reserves for each.
        on_gpu: Number of processes on each GPU; 0 if they need none.
        hosts: The hosts that have processes.
    """

    processes: int
    cpus: int
    on_gpu: int
    hosts: Sequence[Host]

    def federation_config(self, num_nodes: int) -> str:
        """Return Flower's `--federation-config`; without `init-args-num-*`, which Ray refuses for an existing cluster.

        Args:
            num_nodes: Number of simulated nodes P.
        """
        settings = [
            f"num-supernodes={num_nodes}",
            f"client-resources-num-cpus={self.cpus}",
            "init-args-log-to-driver=false",
            "init-args-logging-level='ERROR'",
        ]
        if self.on_gpu:
            settings.append(f"client-resources-num-gpus={gpu_share(self.on_gpu)}")
        return " ".join(settings)


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of a cluster's address.

    Raises:
        ConfigError: If it is not HOST:PORT.
    """
    found = re.fullmatch(r"\[?([^\[\]/]+?)\]?:(\d{1,5})", address)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ConfigError(
            f"the address of a Ray cluster must be HOST:PORT, as `ray start --head` prints it, got {address!r}"
        )
    return found[1], int(found[2])


def hosts_of(rows: Iterable[Mapping[str, Any]]) -> list[Host]:
    """Return the living hosts with CPUs in the answer of `ray.nodes()`, ordered by address.

    A host that only coordinates (`ray start --head --num-cpus=0`) trains nothing and is left out.
    """
    found = [
        Host(
            id=str(row["NodeID"]),
            name=str(row["NodeManagerHostname"]),
            address=str(row["NodeManagerAddress"]),
            cpus=int(row["Resources"].get("CPU", 0)),
            gpus=int(row["Resources"].get("GPU", 0)),
            memory=float(row["Resources"].get("memory", 0)),
        )
        for row in rows
        if row["Alive"]
    ]
    return sorted((host for host in found if host.cpus), key=lambda host: (host.address, host.id))
