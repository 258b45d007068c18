"""Take the tasks of a SuperNode that leaves the start of processes to another program, and run them.

A SuperNode with `--isolation process` starts no process for a message: a program takes the message's task from the
SuperNode's runtime API and starts one. Flower's own program, `flower-superexec`, starts an interpreter for each.

Wraps `AcquireTask` of `flwr.supercore.runtime`, with the headers that Flower's programs send, and the entry point of
`flwr-clientapp`. Flower has no public interface for such programs.
"""

import sys
from typing import NoReturn, Self

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
"""Name of the request that needs the secret that a SuperNode shares with the program that starts processes."""


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

    def take(self) -> str | None:
        """Take the task of the next message.

        Returns:
            The token with which a process gets and answers the message; None if there is no message, or if the
            SuperNode does not answer.

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
        return response.token if response.HasField("task") and response.token else None


def run_client_app(address: str, token: str) -> NoReturn:
    """Handle the message of a task as the program `flwr-clientapp` does, and end this process.

    Args:
        address: Address of the SuperNode's runtime API, HOST:PORT.
        token: What `NodeTasks.take` returned.

    Raises:
        SystemExit: With the exit code of `flwr-clientapp`.
    """
    sys.argv[:] = ["flwr-clientapp", "--insecure", "--runtime-api-address", address, "--token", token]
    flwr_clientapp()
    raise SystemExit(0)
