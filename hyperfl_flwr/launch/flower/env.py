"""Locate Flower's commands and build their environment.

Flower cannot create its tables in a database file if it is installed below a folder with a space, a comma or a percent
sign in its name. Then the database is in memory, and the status of a run is read with Flower's commands instead, see
`hyperfl_flwr.launch.flower.client`.
"""

import importlib.util
import json
import os
import platform
import re
import secrets
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hyperfl_flwr.core.errors import InstallationError
from hyperfl_flwr.flower.ray_start import WITHOUT_HELPERS

DEFAULT_PORT = 8000
"""Port of a deployment's SuperLink; Flower's default."""

CONNECTION = "hyperfl"
"""Name of the connection to the SuperLink in the configuration of its FLWR_HOME."""

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable from which Ray takes the environment of a job's processes on all hosts, in addition to what Flower sets."""

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Despite its name, 0 also restricts Ray to loopback on Linux."""

_SETTINGS = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # seconds; a poll takes 0.02 s of processor time
    "FLWR_TELEMETRY_ENABLED": "0",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAY_agent_manager_retry_interval_ms": "100",  # how soon Ray starts processes once it can; by default 1 s
    "RAY_preload_python_modules": "torch",  # while the server imports it, too
    "RAY_prestart_worker_first_driver": "0",  # Flower's actors cannot use the processes that Ray starts beforehand
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    _LOOPBACK: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Without these, glibc returns freed blocks of tens of megabytes to the system, which zeroes their pages at each reuse.
_MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    "MALLOC_TOP_PAD_": "300000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
}

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def federation_config(num_nodes: int, num_actors: int, num_gpus: int = 0) -> str:
    """Return Flower's `--federation-config` for a simulation.

    Args:
        num_nodes: Number of simulated nodes.
        num_actors: Number of processes that run them, one core each.
        num_gpus: Number of the machine's GPUs to use, which the processes share evenly; 0 leaves out all GPU settings.

    Raises:
        ValueError: If a number is out of range.
    """
    if num_nodes < 1 or num_actors < 1 or num_gpus < 0:
        raise ValueError(f"out of range: {num_nodes=} {num_actors=} {num_gpus=}")
    settings = [
        f"num-supernodes={num_nodes}",
        "client-resources-num-cpus=1",
        f"init-args-num-cpus={num_actors}",
        "init-args-log-to-driver=false",
        "init-args-logging-level='ERROR'",
    ]
    if num_gpus:
        share = gpu_share(-(-num_actors // num_gpus))  # Ray places each process on one GPU
        settings += [f"init-args-num-gpus={num_gpus}", f"client-resources-num-gpus={share}"]
    return " ".join(settings)


def gpu_share(processes: int) -> float:
    """Return the share of a GPU for each of some processes on it, with which Flower starts all of them.

    Flower keeps the share as float32 and starts `int(GPUs / share)` processes; Ray counts in units of 1e-4 of a GPU.
    1/3 as float32 is above a third, so that only two processes would start; .3333 is below it in both.

    Args:
        processes: Number of processes on one GPU, 1 to 9999.
    """
    return (9999 // processes) / 1e4


def flower_environment(
    home: Path, temporary: Path, base: Mapping[str, str] = os.environ, *, ray_address: str = ""
) -> dict[str, str]:
    """Return the environment of a private SuperLink and of the commands that connect to it.

    Args:
        home: The SuperLink's FLWR_HOME.
        temporary: Folder of Ray's sockets and logs; a short path, because the system limits a socket's to 107 bytes.
        base: Environment to start from.
        ray_address: HOST:PORT of the Ray cluster to join, with the token of `base`; empty to start Ray.
    """
    environment = {**base, **_SETTINGS, "FLWR_HOME": str(home)}
    if ray_address:
        environment |= {"RAY_ADDRESS": ray_address, _LOOPBACK: "1", JOB_CONFIG: _job_config(base.get(JOB_CONFIG, ""))}
    else:
        # Without a token, Ray executes what any user sends to its ports.
        environment |= {"RAY_TMPDIR": str(temporary), "RAY_AUTH_MODE": "token", WITHOUT_HELPERS: "1"}
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH", JOB_CONFIG):  # would connect to another cluster
            environment.pop(name, None)
    # SuperExec finds its helper programs by PATH: this installation's must come first.
    environment["PATH"] = os.pathsep.join([str(flower_command("flwr-simulation").parent), base.get("PATH", os.defpath)])
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [base.get(name, ""), "127.0.0.1", "localhost"]))
    if platform.libc_ver()[0] == "glibc":
        environment = {**_MALLOC_SETTINGS, **environment}
    return environment


def actor_environment() -> dict[str, str]:
    """Return the variables of a training process on another host of a cluster, where `ray start` has set others."""
    return {**_MALLOC_SETTINGS, **{name: value for name, value in _SETTINGS.items() if name.endswith("_NUM_THREADS")}}


def _job_config(given: str) -> str:
    """Return Ray's configuration of a job, as JSON, with the variables of `actor_environment` added to a given one."""
    document = json.loads(given) if given else {}
    environment = document.get("runtime_env") or {}
    # Flower sets this one, and Ray refuses two values.
    variables = {key: value for key, value in environment.get("env_vars", {}).items() if key != "PYTHONPATH"}
    environment |= {"env_vars": {**actor_environment(), **variables}}
    return json.dumps({**document, "runtime_env": environment})


def training_environment(*, keeps_memory: bool = True, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process that trains on one thread, without Flower's own settings.

    Args:
        keeps_memory: Whether to make glibc keep freed memory, as in a simulation; if not, no malloc setting is passed.
        base: Environment to start from.
    """
    environment = {name: value for name, value in base.items() if keeps_memory or not name.startswith("MALLOC_")}
    environment |= {name: value for name, value in _SETTINGS.items() if name.endswith("_NUM_THREADS")}
    if keeps_memory and platform.libc_ver()[0] == "glibc":
        environment = {**_MALLOC_SETTINGS, **environment}
    return environment


def flower_command(name: str) -> Path:
    """Return the path of a command in this Python's installation, independent of PATH.

    Raises:
        InstallationError: If the command is not installed there.
    """
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (folder / name).is_file():
            return folder / name
    raise InstallationError(
        f"Flower's command {name} is not installed next to {sys.executable}. "
        'Install the project again, or: python -m pip install "flwr[simulation]>=1.41.0,<1.42"'
    )


def can_use_database_file() -> bool:
    """Return whether Flower can create its tables in a database file, given the path of its installation."""
    found = importlib.util.find_spec("flwr")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return not any(re.search("[ ,%]", str(Path(folder).resolve())) for folder in folders)


def plain_text(text: str) -> str:
    """Return `text` without ANSI colour sequences."""
    return _COLOURS.sub("", text)
