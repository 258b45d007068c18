"""Distinguish Flower's two grids, and replace a grid's client of the SuperLink's runtime API.

Wraps `flwr.superlink.grid`, `flwr.supercore.runtime`, `flwr.supercore.run` and messages of `flwr.proto`. The public
`flwr.serverapp.Grid` does not say whether the nodes are simulated, offers no access to the requests that it makes, and
its abstract methods have types that are not public.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeGuard, TypeVar, cast

from flwr.proto.node_pb2 import NodeInfo as NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run as Run

if TYPE_CHECKING:  # types only: their modules are slow to import
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest as ConfirmMessageReceivedRequest
    from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse as ConfirmMessageReceivedResponse
    from flwr.proto.message_pb2 import ObjectTree as ObjectTree
    from flwr.proto.message_pb2 import PullObjectRequest as PullObjectRequest
    from flwr.proto.message_pb2 import PullObjectResponse as PullObjectResponse
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest as PullAppMessagesRequest
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse as PullAppMessagesResponse
    from flwr.supercore.runtime import RuntimeHttpClient as RuntimeHttpClient
    from flwr.superlink.grid import HttpGrid as HttpGrid

Client = TypeVar("Client")


def is_http_grid(grid: Grid) -> "TypeGuard[HttpGrid]":
    """Return whether a grid is a deployment's."""
    from flwr.superlink.grid import HttpGrid  # deferred: it takes half a second, and no process of a node needs it

    return isinstance(grid, HttpGrid)


def is_in_memory_grid(grid: Grid) -> bool:
    """Return whether a grid is that of Flower's simulation engine."""
    from flwr.superlink.grid import InMemoryGrid  # deferred: see above

    return isinstance(grid, InMemoryGrid)


@contextlib.contextmanager
def replaced_client(grid: "HttpGrid", wrap: "Callable[[RuntimeHttpClient], Client]") -> Iterator[Client]:
    """Replace the client that makes a grid's requests to the SuperLink, within a `with` block.

    Args:
        grid: A deployment's grid.
        wrap: Returns the replacement for the grid's client.
    """
    client = grid._runtime_client  # noqa: SLF001
    replacement = wrap(client)
    grid._client = cast("RuntimeHttpClient", replacement)  # noqa: SLF001
    try:
        yield replacement
    finally:
        grid._client = client  # noqa: SLF001
