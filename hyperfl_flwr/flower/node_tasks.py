"""Take the tasks of a SuperNode that leaves the start of processes to another program, and run them.

A SuperNode with `--isolation process` starts no process for a message: a program takes the message's task from the
SuperNode's runtime API and starts one. Flower's own program, `flower-superexec`, starts an interpreter for each.

Wraps `AcquireTask` of `flwr.supercore.runtime`, with the headers that Flower's programs send, the entry point of
`flwr-clientapp`, and the folder into which it installs apps. Flower has no public interface for such programs.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import httpx
from flwr.common.constant import APP_DIR, FAB_HASH_TRUNCATION
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.utils import get_flwr_home
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
"""Name of the request that needs the secret that a SuperNode shares with the program that starts processes."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of one message.

    Attributes:
        token: With it, a process gets and answers the message.
        fab_hash: SHA-256 of the bundle of the app that handles the message, in hexadecimal digits.
    """

    token: str
    fab_hash: str


class NodeTasks:
    """The tasks of a SuperNode; a context manager that closes the connection.

    Args:
        address: Address of the SuperNode's runtime API, HOST:PORT, on the loopback interface.
        secret: The secret in the file that the SuperNode was given as `--superexec-auth-secret-file`.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self.address = address
        self._client = RuntimeHttpClient.from_server_address(
            server_address=address,
            insecure=True,
            root_certificates=None,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE}),
            ],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection of this process; in a forked process, the parent's stays open."""
        self._client.close()

    def take(self) -> Task | None:
        """Take the task of the next message; None if there is no message, or if the SuperNode does not answer.

        Raises:
            PermissionError: If the SuperNode refuses the secret.
        """
        try:
            response = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        except httpx.TransportError:
            return None
        except httpx.HTTPStatusError as error:
            if error.response.is_server_error:
                return None
            raise PermissionError(
                f"the SuperNode at {self.address} refuses the request for its messages (HTTP status "
                f"{error.response.status_code})"
            ) from error
        if not response.HasField("task") or not response.token:
            return None
        return Task(token=response.token, fab_hash=response.task.fab_hash)


def installed_app(fab_hash: str) -> Path | None:
    """Return the folder of an app's bundle in FLWR_HOME if an earlier message has installed it, from where it runs.

    Args:
        fab_hash: SHA-256 of the bundle, in hexadecimal digits.
    """
    found = list((get_flwr_home() / APP_DIR).glob(f"*.{fab_hash[:FAB_HASH_TRUNCATION]}")) if fab_hash.isalnum() else []
    return found[0] if len(found) == 1 and found[0].is_dir() else None


_PROGRAM = """
import os
import sys

from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

sys.argv = ["flwr-clientapp", "--insecure", *os.environ.pop("HYPERFL_TASK").split()]
flwr_clientapp()
"""
"""The program `flwr-clientapp` with its arguments in the environment, which other users cannot read."""


def run_client_app_anew(address: str, token: str, at_start: Callable[[], None]) -> NoReturn:
    """Handle the message of a task by the program `flwr-clientapp` in a new interpreter, and end this process after it.

    The new interpreter imports the packages that are installed now.

    Args:
        address: Address of the SuperNode's runtime API, HOST:PORT.
        token: The task's token.
        at_start: Called in the new process before the interpreter starts; this process must not have other threads.

    Raises:
        SystemExit: With the exit code of the program.
    """
    task = f"--runtime-api-address {address} --token {token}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM],
        env={**os.environ, "HYPERFL_TASK": task},
        preexec_fn=at_start,
        check=False,
    )
    raise SystemExit(done.returncode)


def run_client_app(address: str, token: str) -> NoReturn:
    """Handle the message of a task as the program `flwr-clientapp` does, and end this process.

    Args:
        address: Address of the SuperNode's runtime API, HOST:PORT.
        token: The task's token.

    Raises:
        SystemExit: With the exit code of `flwr-clientapp`.
    """
    sys.argv[:] = ["flwr-clientapp", "--insecure", "--runtime-api-address", address, "--token", token]
    flwr_clientapp()
    raise SystemExit(0)
