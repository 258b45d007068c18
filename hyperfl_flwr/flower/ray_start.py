"""Start Ray for a simulation: again where a busy machine was too slow, and without processes that are not needed.

Flower's simulation calls `ray.init`, which ends with an error if Ray's helper processes need more than 15 s to start.
Ray has no setting for that limit.

Besides what runs the actors, `ray.init` starts three Python processes: the monitor of Ray's autoscaler, though there is
nothing to scale; the dashboard's server, on which it waits, although Flower turns the dashboard off; and the log
monitor, which forwards what `log-to-driver=false` drops. It has no option for them. They are left out by replacing
methods of `ray._private.node.Node`.
"""

import functools
import os
import sys
from collections.abc import Callable
from logging import WARNING
from pathlib import Path
from typing import Any

WITHOUT_HELPERS = "HYPERFL_RAY_WITHOUT_HELPERS"
"""Environment variable that leaves the three out: with Flower's own commands, dashboard and logs can be wanted."""

HELPERS = ("start_monitor", "start_api_server", "start_log_monitor")
"""Methods of Ray's node that start one process each."""

ATTEMPTS = 3

TOO_SLOW = "timed out during startup"
"""Words of Ray's error, which has no class of its own."""


def prepare_ray() -> None:
    """Patch Ray if this is the process of a simulation, which has not started it yet."""
    if Path(sys.argv[0]).name != "flwr-simulation":
        return
    import ray

    ray.init = start_again(ray.init)
    if os.environ.get(WITHOUT_HELPERS):
        from ray._private.node import Node

        for name in HELPERS:
            setattr(Node, name, _start_nothing)


def start_again(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ray.init` with up to `ATTEMPTS` attempts while Ray is too slow; other errors are raised at once.

    What a failed attempt started ends with this process.
    """

    @functools.wraps(start)
    def init(*args: object, **options: object) -> Any:  # noqa: ANN401 - a context, whose class is private
        from hyperfl_flwr.flower.log import log  # deferred: the command line imports this module, and not Flower

        for attempt in range(1, ATTEMPTS):
            try:
                return start(*args, **options)
            except Exception as error:
                if TOO_SLOW not in str(error):
                    raise
                log(WARNING, "Ray did not start in time; is this machine busy? Attempt %d of %d", attempt + 1, ATTEMPTS)
        return start(*args, **options)

    return init


def _start_nothing(node: Any, **options: object) -> None:  # noqa: ANN401 - a Node, whose class is private
    pass
