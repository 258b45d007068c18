"""Connect to a Ray cluster, list its hosts, and let each of them report on a run.

The functions without an underscore are called in a subprocess (`hyperfl_flwr.launch.subprocess_call`), which ends the
connection; nothing of the cluster is stopped.
"""

import logging
import os
import platform
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hyperfl_flwr.core.errors import DeviceError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.flower.env import actor_environment
from hyperfl_flwr.launch.ray_cluster.hosts import Cluster, Host, hosts_of, parse_address

KNOCK_SECONDS = 5.0
"""Longest wait for the cluster's port to accept a connection."""

JOIN_SECONDS = 60.0
"""Longest wait for Ray to connect; it needs one to three seconds."""

FREE_SECONDS = 10.0
"""Longest wait for CPUs of a job that has just ended."""

REPORT_SECONDS = 300.0
"""Longest wait for the hosts' reports; a host loads torch and the data for its own."""

PROBLEM = "problem"
"""Key of the reason why a host has no report."""


def cluster_at(address: str) -> Cluster:
    """Return the hosts of the Ray cluster at an address; takes some seconds.

    Args:
        address: HOST:PORT of the cluster's head.

    Raises:
        ConfigError: If the address is malformed.
        DeviceError: If there is no cluster, or it cannot be joined from this process.
    """
    ray = _connected(address)
    if not (hosts := hosts_of(ray.nodes())):
        raise DeviceError(
            f"no host of the Ray cluster at {address} has a CPU; start hosts that train: "
            f"ray start --address={address} --num-cpus=8"
        )
    total, end = sum(host.cpus for host in hosts), time.monotonic() + FREE_SECONDS
    while (free := int(ray.available_resources().get("CPU", 0))) < total and time.monotonic() < end:
        time.sleep(0.5)
    driver = str(ray.util.get_node_ip_address())
    has_token = os.environ.get("RAY_AUTH_MODE") == "token"
    return Cluster(address=address, hosts=hosts, driver=driver, free_cpus=free, has_token=has_token)


def host_reports(
    address: str, folder: Path, app: Path, settings: Mapping[str, Scalar], gpu_hosts: Sequence[str] = ()
) -> dict[str, dict[str, str]]:
    """Let each host of a cluster report on a run, and whether it shares a folder with this machine.

    Args:
        address: HOST:PORT of the cluster's head.
        folder: Folder that all hosts must share; a file for this check is left in it.
        app: Folder with the app's packages, below `folder`.
        settings: As for `hyperfl_flwr.app.host_report.report`.
        gpu_hosts: Ray's ids of the hosts that must report on a GPU.

    Returns:
        By Ray's id of each host: the report of `hyperfl_flwr.app.host_report`, or `PROBLEM` and its reason. The report
        of this machine has the id "".

    Raises:
        HyperFLError: As `cluster_at`.
    """
    os.chdir(app)  # Ray puts it first on the import path of every process, as in the run
    ray = _connected(address)
    token = secrets.token_hex(16)
    (folder / "token").write_text(token)
    look = _report_task()

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    paths = os.pathsep.join(filter(None, (str(app), os.environ.get("PYTHONPATH"))))
    environment = {"env_vars": {**actor_environment(), "PYTHONPATH": paths}}

    def ask(host: str, settings: Mapping[str, Scalar]) -> Any:  # noqa: ANN401 - a Ray reference
        there = NodeAffinitySchedulingStrategy(node_id=host, soft=False)
        gpus = 0.001 if host in gpu_hosts else 0
        options = {"num_cpus": 0, "num_gpus": gpus, "max_retries": 0, "scheduling_strategy": there}
        return ray.remote(look).options(**options, runtime_env=environment).remote(str(folder), token, dict(settings))

    asked = {host.id: ask(host.id, settings) for host in hosts_of(ray.nodes())}
    # This machine need not have a GPU.
    asked[""] = ask(
        ray.get_runtime_context().get_node_id(), {**settings, **({"device": "cpu"} if "device" in settings else {})}
    )
    end = time.monotonic() + REPORT_SECONDS
    return {host: _answer(ray, reference, end - time.monotonic()) for host, reference in asked.items()}


def _report_task() -> Callable[[str, str, Mapping[str, Scalar]], dict[str, str]]:
    """Return what each host runs: check that it shares the folder with the token, and report on the run."""

    # A nested function is sent as code: a host without this project must be able to run it, too.
    def look(folder: str, token: str, settings: Mapping[str, Scalar]) -> dict[str, str]:
        import importlib
        import pathlib
        import tempfile

        try:
            seen = (pathlib.Path(folder) / "token").read_text()
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            return {"problem": f"it does not share the folder {folder} ({error.strerror})"}
        if seen != token:
            return {"problem": f"it has another folder {folder}"}
        try:
            found: dict[str, str] = importlib.import_module("hyperfl_flwr.app.host_report").report(settings)
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must see it
            return {"problem": f"{type(error).__name__}: {error}"}
        return found

    return look


def differences(hosts: Iterable[Host], reports: Mapping[str, Mapping[str, str]], device: str = "") -> list[str]:
    """Return what keeps hosts from training like this machine, one line each; none if all reports are equal.

    Args:
        hosts: The hosts that train.
        reports: See `host_reports`.
        device: Type of the device on which they must train; empty for reports without a device.
    """
    own, found = dict(reports[""]), []
    if PROBLEM in own:
        return [f"this machine: {own[PROBLEM]}"]
    if device:
        own["device"] = device
    for host in hosts:
        there = reports.get(host.id, {PROBLEM: "it has joined the cluster just now; repeat the command"})
        found += [f"{host}: {reason}" for reason in _reasons(there, own)]
    return found


def _reasons(there: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    if PROBLEM in there:
        return [there[PROBLEM]]
    versions = [
        f"{key.partition('/')[2]} {there.get(key, 'missing')} (here {own.get(key, 'missing')})"
        for key in sorted({*own, *there})
        if key.startswith("versions/") and there.get(key) != own.get(key)
    ]
    texts = {
        "code": "it has other code of hyperfl-flwr",
        "network": "it has another source of the network (target)",
        "data": "it has other data in the data set's files",
        "device": f"it trains on {there.get('device')}, this run on {own.get('device')}",
    }
    found = [f"it has other versions: {', '.join(versions)}"] if versions else []
    return found + [text for key, text in texts.items() if there.get(key) != own.get(key)]


def _answer(ray: ModuleType, reference: Any, seconds: float) -> dict[str, str]:  # noqa: ANN401 - a Ray reference
    try:
        answer: dict[str, str] = ray.get(reference, timeout=max(seconds, 0.0))
    except ray.exceptions.GetTimeoutError:
        return {PROBLEM: f"it made no report within {REPORT_SECONDS:g} s"}
    except ray.exceptions.RayError as error:
        return {PROBLEM: f"it cannot run a task: {_first_line(error)}"}
    return answer


def _connected(address: str) -> ModuleType:
    """Connect this process to a cluster, and return Ray."""
    host, port = parse_address(address)
    try:
        socket.create_connection((host, port), KNOCK_SECONDS).close()
    except OSError as error:
        raise DeviceError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start one with `ray start --head`, and "
            f"give the address that it prints"
        ) from None
    # Read by Ray when it is imported. Its own wait for a host is a minute.
    os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", "20")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    problems: list[Exception] = []

    def connect() -> None:
        try:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # noqa: BLE001 - explained below
            problems.append(error)

    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(JOIN_SECONDS)
    if problems:
        raise DeviceError(_explained(address, problems[0])) from problems[0]
    if connecting.is_alive():
        raise DeviceError(f"what listens at {address} did not answer as a Ray cluster within {JOIN_SECONDS:g} s")
    return ray


def _explained(address: str, error: Exception) -> str:
    """Return the message for an error of `ray.init`: what is wrong and what to do."""
    text = str(error)
    if versions := re.findall(r"Ray: (\S+)\s+Python: (\S+)", text):
        there = "Ray {} and Python {}".format(*versions[0])
        return (
            f"the Ray cluster at {address} runs {there}, but this is Ray {_ray_version()} and Python "
            f"{platform.python_version()}; install the same versions on all hosts"
        )
    if "token" in text.lower() or "authenticat" in text.lower():
        return (
            f"the Ray cluster at {address} refuses this process's token ({_first_line(error)}); set "
            f"RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as for `ray start`"
        )
    return (
        f"the Ray cluster at {address} cannot be joined from this machine ({_first_line(error)}); start the command on "
        f"one of its hosts, or make this machine one: ray start --address={address}"
    )


def _ray_version() -> str:
    import ray

    return str(ray.__version__)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
