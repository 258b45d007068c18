"""Replace dead Ray actors in Flower's simulation, and go on with fewer when a host of a cluster dies.

Flower's simulation puts an actor back into its pool even if the actor's process died. The same nodes are then missing
in every later round, yet the run ends as completed. With this patch the pool starts a new actor instead. If the actor's
host has died with it, no host has room for a new one, which would wait for ever: the pool goes on with one actor less.

Wraps `flwr.simulation.ray_transport.ray_actor.BasicActorPool`; Flower offers no choice of the pool.
"""

import contextlib
import os
import sys
import threading
import time
from typing import Any

from hyperfl_flwr.flower.log import log

START_SECONDS = 60.0
"""Longest wait for a new actor's process on a cluster."""

POLL_SECONDS = 0.1
"""Pause between two looks for an idle actor."""


def replace_dead_actors() -> None:
    """Patch Flower's actor pool in this process so that it replaces dead actors; does nothing without Ray."""
    try:
        from flwr.simulation.ray_transport.ray_actor import BasicActorPool
        from ray.exceptions import OutOfMemoryError, RayActorError, WorkerCrashedError
    except ImportError:
        return
    deadly = (RayActorError, WorkerCrashedError, OutOfMemoryError)
    submit_to_idle, shrinking = BasicActorPool.submit, threading.Lock()

    def add_actor_back_to_pool(self: BasicActorPool, future: Any) -> None:  # noqa: ANN401 - a Ray reference
        actor = self._future_to_actor.pop(future)
        # If the actor died, the pool calls this method while it handles the exception that its death raised.
        if not isinstance(sys.exc_info()[1], deadly):
            self.pool.append(actor)
        elif (new := self.create_actor_fn() if not on_cluster() else _started(self)) is not None:  # type: ignore[no-untyped-call]
            log(30, "A simulation process died; a new process replaces it.")
            self.pool.append(new)
        else:
            with shrinking:
                self.num_actors -= 1
                _drop_dead(self)
                log(30, f"A host of the Ray cluster died; {self.num_actors} simulation process(es) remain.")

    def submit(self: BasicActorPool, actor_fn: Any, job: Any) -> Any:  # noqa: ANN401 - as in Flower
        # Flower calls this from as many threads as there were actors at the start.
        while self.num_actors:
            try:
                return submit_to_idle(self, actor_fn, job)
            except IndexError:  # no actor is idle
                time.sleep(POLL_SECONDS)
        raise RuntimeError("no host of the Ray cluster is left that can run a simulation process")

    BasicActorPool.add_actor_back_to_pool = add_actor_back_to_pool  # type: ignore[method-assign]
    BasicActorPool.submit = submit  # type: ignore[method-assign]


def on_cluster() -> bool:
    """Return whether this process's simulation runs on a Ray cluster that was there before."""
    return bool(os.environ.get("RAY_ADDRESS"))


def cluster_hosts() -> list[dict[str, Any]]:
    """Return name, address, CPUs and GPUs of each living host of the Ray cluster; empty without a cluster."""
    ray = sys.modules.get("ray")
    if ray is None or not on_cluster() or not ray.is_initialized():
        return []
    return [
        {
            "name": row["NodeManagerHostname"],
            "address": row["NodeManagerAddress"],
            "cpus": int(row["Resources"].get("CPU", 0)),
            "gpus": int(row["Resources"].get("GPU", 0)),
        }
        for row in sorted(ray.nodes(), key=lambda row: str(row["NodeManagerAddress"]))
        if row["Alive"]
    ]


def _drop_dead(pool: Any) -> None:  # noqa: ANN401 - a BasicActorPool
    """Take the dead host's idle actors out of a pool, so that no message is sent to one of them a second time."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    for idle in list(pool.pool):
        try:
            ray.get(idle.__ray_ready__.remote(), timeout=START_SECONDS)
        except GetTimeoutError:
            continue
        except RayError:
            with contextlib.suppress(ValueError):  # another thread has just sent it a message, which finds it dead
                pool.pool.remove(idle)
                pool.num_actors -= 1


def _started(pool: Any) -> Any:  # noqa: ANN401 - a BasicActorPool, and an actor
    """Return a new actor with a running process; None if the cluster's living hosts have no room for it."""
    import ray
    from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

    new, end = pool.create_actor_fn(), time.monotonic() + START_SECONDS
    is_ready = new.__ray_ready__.remote()
    while time.monotonic() < end:
        if ray.wait([is_ready], timeout=1.0)[0]:  # or has failed: then its first message fails, and it is replaced
            return new
        try:  # Ray needs some seconds to notice that a host has died
            has_room = pool_size_from_resources(pool.client_resources) >= pool.num_actors
        except ValueError:  # no room for any process
            has_room = False
        if not has_room:
            break
    ray.kill(new)
    return None
