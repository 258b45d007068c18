"""Start Ray for a simulation on one machine without the helper processes that `hyperfl run` does not need.

Flower's simulation calls `ray.init`, which besides what runs the actors starts three Python processes: the monitor of
Ray's autoscaler, though there is nothing to scale; the dashboard's server, on which it waits, although Flower turns the
dashboard off; and the log monitor, which forwards what `log-to-driver=false` drops. `ray.init` has no option for them.

Replaces methods of `ray._private.node.Node`.
"""

import os
from typing import Any

WITHOUT_HELPERS = "HYPERFL_RAY_WITHOUT_HELPERS"
"""Environment variable that asks for it: with Flower's own commands, the dashboard and the logs can be wanted."""

HELPERS = ("start_monitor", "start_api_server", "start_log_monitor")
"""Methods of Ray's node that start one process each."""


def start_ray_without_helpers() -> None:
    """Patch Ray in this process, which has not started it yet, if the environment asks for it."""
    if not os.environ.get(WITHOUT_HELPERS):
        return
    from ray._private.node import Node

    for name in HELPERS:
        setattr(Node, name, _start_nothing)


def _start_nothing(node: Any, **options: object) -> None:  # noqa: ANN401 - a Node, whose class is private
    pass
