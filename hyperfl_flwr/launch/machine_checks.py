"""Check a machine's resources for a run: cores, memory, GPUs, disks, shared memory, open files and ports."""

import os
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from hyperfl_flwr.core.process_memory import free_memory
from hyperfl_flwr.launch.core_locks import usable_cores
from hyperfl_flwr.launch.findings import Finding, error, ok, warning
from hyperfl_flwr.launch.flower.env import DEFAULT_PORT
from hyperfl_flwr.launch.sizing import NODE_BYTES

GIGABYTE = 1e9

LITTLE_DISK, NO_DISK = 5 * GIGABYTE, 0.5 * GIGABYTE
"""Free bytes below which a folder gets a warning or an error; checkpoints and Ray's logs need the space."""

LITTLE_SHARED = 1 * GIGABYTE
"""Free bytes of /dev/shm below which Ray may move its object store, with all messages in flight, to the disk."""

FEW_FILES = 4_096
"""Limit of open files below which Ray warns; each of its processes holds some hundreds."""

NODE_PORT, LOCAL_PORT = 9094, 39091
"""Port of a SuperNode for its own processes, and of the SuperLink that `flwr run` leaves running."""

PORTS = {
    DEFAULT_PORT: "a deployment's SuperLink",
    NODE_PORT: "a SuperNode's own processes",
    LOCAL_PORT: "the SuperLink of Flower's own `flwr run`",
}

DRIVER = Path("/proc/driver/nvidia/version")
"""File with the version of NVIDIA's driver (Linux)."""


def temporary_folder() -> Path:
    """Return the folder of temporary files."""
    return Path(tempfile.gettempdir())


def cores(group: Path = Path("/sys/fs/cgroup")) -> Iterator[Finding]:
    """Check how many cores a run can use.

    Args:
        group: The cgroup folder with a container's limits (Linux, cgroup v2).
    """
    usable, physical = len(usable_cores()), os.cpu_count() or 1
    yield ok("cores", f"{usable} of {physical} can be used")
    quota = _words(group / "cpu.max")
    if len(quota) == 2 and quota[0].isdigit() and int(quota[0]) / int(quota[1]) < usable:
        share = int(quota[0]) / int(quota[1])
        text = f"the container is limited to {share:.2g} cores, but sees {usable}"
        yield warning("cores", text, f"set HYPERFL_CORES={max(1, int(share))}")


def memory(group: Path = Path("/sys/fs/cgroup"), table: Path = Path("/proc/meminfo")) -> Iterator[Finding]:
    """Check how many training processes fit into the free memory.

    Args:
        group: The cgroup folder with a container's limits (Linux, cgroup v2).
        table: Linux's table of total and free memory.
    """
    free = free_memory(group, table)
    processes = int(free / NODE_BYTES)
    text = f"{free / GIGABYTE:.1f} GB are free, enough for {processes} training processes of about 1 GB"
    if processes == 0:
        text = f"{free / GIGABYTE:.1f} GB are free, but one training process needs about 1 GB"
        yield error("memory", text, "end other programs")
    elif processes < len(usable_cores()):
        yield warning("memory", text, f"run simulations with --num-nodes {processes}, or end other programs")
    else:
        yield ok("memory", text)


def threads(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check the environment variables that set the number of threads."""
    names = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name in environment]
    usable = len(usable_cores())
    for name in names:
        value = environment[name]
        if not value.isdigit() or int(value) < 1:
            yield warning("threads", f"{name}={value!r} is not a positive integer", f"unset {name}")
        elif int(value) > usable:
            yield warning("threads", f"{name}={value}, but {usable} cores can be used", f"unset {name}")
        else:
            yield ok("threads", f"{name}={value}; simulations set their own")
    if not names:
        yield ok("threads", f"not set in the environment; a deployed node uses {torch.get_num_threads()}")


def driver_version(driver: Path = DRIVER) -> str:
    """Return the version of NVIDIA's driver from its file; empty without a driver."""
    found = re.search(r"Module[^\n]*?(\d+\.\d+(?:\.\d+)?)", driver.read_text()) if driver.is_file() else None
    return found[1] if found else ""


def gpus(driver: Path = DRIVER) -> Iterator[Finding]:
    """Check which GPUs torch can use, by a computation on each, and explain why it cannot use the others.

    Args:
        driver: File with the version of NVIDIA's driver.
    """
    found = driver_version(driver)
    build = f"torch {torch.__version__}" + (f" for CUDA {torch.version.cuda}" if torch.version.cuda else " for CPUs")
    if torch.cuda.is_available():
        yield from (_gpu(number, build) for number in range(torch.cuda.device_count()))
    elif not found:
        yield ok("GPU", f"none; {build}")
    elif not torch.version.cuda:
        text = f"the machine has NVIDIA's driver {found}, but {build} cannot use it"
        yield warning("GPU", text, "install a build of torch for CUDA")
    elif os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        yield warning("GPU", "CUDA_VISIBLE_DEVICES is empty, which hides all GPUs", "unset it")
    else:
        text = f"{build} finds no GPU with NVIDIA's driver {found}"
        yield warning("GPU", text, "install the build of torch for the driver's CUDA version (nvidia-smi shows it)")


def _gpu(number: int, build: str) -> Finding:
    try:
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        right = bool((torch.ones(8, 8, device=f"cuda:{number}") @ torch.ones(8, 8, device=f"cuda:{number}") == 8).all())
    except RuntimeError as problem:  # no kernel for this GPU, no memory, a driver that is too old
        text = f"cuda:{number} cannot compute with {build}: {str(problem).splitlines()[0]}"
        return error("GPU", text, "install a build of torch for this GPU, or set device=cpu")
    if not right:
        return error("GPU", f"cuda:{number} returns wrong results with {build}", "set device=cpu")
    sizes = f"{free / GIGABYTE:.1f} of {total / GIGABYTE:.1f} GB free"
    return ok("GPU", f"cuda:{number} {properties.name}, {sizes}, {build}")


def disks(folders: Mapping[str, Path]) -> Iterator[Finding]:
    """Check that folders are writable and have free space; a folder that does not exist is checked by its parent.

    Args:
        folders: The folders by purpose.
    """
    for purpose, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        text = f"{folder} has {free / GIGABYTE:.1f} GB free"
        if not os.access(there, os.W_OK | os.X_OK):
            yield error(purpose, f"{there} is not writable", "choose another folder, or change its mode")
        elif free < NO_DISK:
            yield error(purpose, text, "free disk space")
        elif free < LITTLE_DISK:
            yield warning(purpose, text, "free disk space for checkpoints and logs")
        else:
            yield ok(purpose, text)


def shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:  # noqa: S108 - Linux's own folder
    """Check that Ray finds shared memory for the messages of a simulation."""
    if not folder.is_dir():
        yield ok("shared memory", f"no {folder}; Ray uses files")
        return
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {free / GIGABYTE:.2f} GB free for the messages of a simulation"
    if free < LITTLE_SHARED:
        yield warning("shared memory", text, "start the container with --shm-size=2g; otherwise Ray uses slow files")
    else:
        yield ok("shared memory", text)


def open_files() -> Iterator[Finding]:
    """Check that a process may open as many files as Ray needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    text = f"a process may open {'any number of' if unlimited else soft} files"
    if unlimited or soft >= FEW_FILES:
        yield ok("open files", text)
    elif hard == resource.RLIM_INFINITY or hard >= FEW_FILES:
        yield warning("open files", text, f"run: ulimit -n {FEW_FILES}")
    else:
        yield warning("open files", f"{text}, {hard} at most", "raise the limit in /etc/security/limits.conf")


def ports(purposes: Mapping[int, str] = PORTS) -> Iterator[Finding]:
    """Check that loopback ports are free: any port for a simulation, those of `purposes` for a deployment.

    Args:
        purposes: Port -> its purpose.
    """
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as problem:
            text = f"no port of 127.0.0.1 can be opened: {problem.strerror}"
            yield error("ports", text, "allow programs to listen on loopback, as a simulation's SuperLink does")
            return
    free = []
    for port, purpose in purposes.items():
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as servers do: ports of connections that have just ended count as free
            try:
                probe.bind(("127.0.0.1", port))
                free.append(str(port))
            except OSError:
                text = f"{port}, for {purpose}, is in use"
                yield warning("ports", text, "end the program that listens there, or choose another port")
    if free:
        yield ok("ports", f"{', '.join(free)} are free, and others for simulations")


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
